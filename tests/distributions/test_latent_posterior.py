# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Posteriors of latent labels against enumeration; sweeps against their invariant law."""

import itertools

import pytest
import torch
from graphs import house, labellings, parameters, random_sources, shared_sources, star
from pyro.ops.stats import effective_sample_size

from pyro_nmm import Neighborhood, NeighborMixture
from pyro_nmm.ops.evidence import LatentTerms, draw_latent
from pyro_nmm.ops.gibbs import run_chains, sweep

GRAPHS = {"house": house, "star": star, "shared": shared_sources}


def brute_force(mix, evidence, observed=None):
    """Every labelling of all nodes, and its probability given the evidence."""
    labels = labellings(mix.hood.num_nodes, mix.num_classes)
    found = evidence[torch.arange(len(evidence)), labels]
    found = found if observed is None else found[:, observed]
    return labels, (mix.log_prob(labels) + found.sum(-1)).softmax(0)


def problem(name, num_classes=2):
    hood = GRAPHS[name]()
    mix = NeighborMixture(hood, *parameters(hood, num_classes))
    evidence = torch.randn(hood.num_nodes, num_classes)
    evidence[0, 0] = -torch.inf
    return mix, evidence


@pytest.mark.parametrize("mask", [None, torch.tensor([True, False, True, True, False])])
@pytest.mark.parametrize("name", GRAPHS)
def test_exact_posterior(name, mask):
    mix, evidence = problem(name)
    posterior = mix.latents(evidence, mask).posterior()
    labels, probs = brute_force(mix, evidence, mask)
    one_hot = torch.nn.functional.one_hot(labels, 2).double()
    torch.testing.assert_close(posterior.marginals(), torch.einsum("q,qnc->nc", probs, one_hot))
    pairs = torch.tensor(list(itertools.product(range(5), repeat=2))).T
    tables = torch.einsum("q,qia,qjb->ijab", probs, one_hot, one_hot).flatten(0, 1)
    torch.testing.assert_close(posterior.pairwise(pairs), tables)
    torch.testing.assert_close(posterior.log_marginal(torch.arange(5), labels).exp(), probs)
    nodes = torch.tensor([3, 1, 0])
    best = torch.zeros(8).index_add(0, labels[:, nodes] @ torch.tensor([4, 2, 1]), probs)
    mode = labellings(3)[best.argmax()]
    assert torch.equal(posterior.predict(nodes, "joint"), mode)


def test_more_labels():
    """Weighted draws given evidence go on with observed labels."""
    mix, evidence = problem("house")
    mask = torch.tensor([True, False, True, True, False])
    y, known = torch.tensor([0, 1, 0, 0, 0]), torch.tensor([False, True, False, False, False])
    labels, probs = brute_force(mix, evidence, mask)
    probs = probs * (labels[:, 1] == 1)
    probs = probs / probs.sum()
    one_hot = torch.nn.functional.one_hot(labels, 2).double()
    truth = torch.einsum("q,qnc->nc", probs, one_hot)
    first = mix.latents(evidence, mask).posterior(num_samples=100_000, weighted=True)
    found = first.condition(y, known).marginals()
    torch.testing.assert_close(found, truth, atol=0.01, rtol=0)


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("num_classes", [2, 3])
def test_exact_posterior_stays_exact(name, num_classes):
    """Given labels of more nodes, all at once or one after the other, as by enumeration."""
    mix, evidence = problem(name, num_classes)
    mask = torch.tensor([True, False, False, True, False])
    y, known = torch.tensor([0, 1, 0, 0, 1]), torch.tensor([False, True, False, False, True])
    labels, probs = brute_force(mix, evidence, mask)
    probs = probs * (labels[:, known] == y[known]).all(-1)
    probs = probs / probs.sum()
    one_hot = torch.nn.functional.one_hot(labels, num_classes).double()
    truth = torch.einsum("q,qnc->nc", probs, one_hot)
    first = mix.latents(evidence, mask).posterior()
    nodes = known.nonzero()[:, 0]
    turns = first
    for node in nodes.flip(0):
        turns = turns.condition(y, torch.arange(5) == node)
    for posterior in (first.condition(y, known), turns):
        assert posterior.is_exact
        torch.testing.assert_close(posterior.marginals(), truth)
        torch.testing.assert_close(posterior.log_marginal(torch.arange(5), labels).exp(), probs)
        pairs = torch.tensor([[0, 1, 2, 4], [2, 4, 3, 0]])
        tables = torch.stack([
            torch.einsum("q,qa,qb->ab", probs, one_hot[:, i], one_hot[:, j])
            for i, j in pairs.T.tolist()
        ])  # fmt: skip
        torch.testing.assert_close(posterior.pairwise(pairs), tables)
        assert torch.equal(posterior.predict(nodes), y[nodes])
        assert (posterior.sample((50,), nodes) == y[nodes]).all()
    assert not first.condition(y, known, num_samples=5).is_exact


@pytest.mark.parametrize(
    ("kernels", "name"),
    [("loops", "house"), ("tensors", "star"), ("blocks", "shared")],
    indirect=["kernels"],
)
def test_draws(kernels, name):
    """
    Weighted draws and chains, their joint samples, and marginals of nodes that are left out:
    probabilities may be off by .02.
    """
    mix, evidence = problem(name)
    mask = torch.tensor([True, True, True, False, True])
    labels, probs = brute_force(mix, evidence, mask)
    one_hot = torch.nn.functional.one_hot(labels, 2).double()
    truth = torch.einsum("q,qnc->nc", probs, one_hot)
    weighted = mix.latents(evidence, mask).posterior(num_samples=20_000, weighted=True)
    torch.testing.assert_close(weighted.marginals(), truth, atol=0.02, rtol=0)
    chains = mix.latents(evidence, mask).posterior(num_samples=2_000, num_sweeps=20)
    torch.testing.assert_close(chains.marginals(), truth, atol=0.02, rtol=0)
    draws = weighted.sample((20_000,))
    place = draws @ (2 ** torch.arange(4, -1, -1))
    counts = torch.bincount(place, minlength=32) / len(draws)
    torch.testing.assert_close(counts, probs, atol=0.02, rtol=0)
    assert chains.chains.gelman_rubin().isfinite().all()


def test_queries_after_sweeps_agree():
    """
    With each other, to the last digit, and with enumeration: 2,000 states are off by less than .06.
    The last states of eight chains alone are off by .2, and by more than a label's entropy.
    """
    hood = Neighborhood(torch.tensor([[0, 1, 1, 2, 2, 0], [1, 0, 2, 1, 0, 2]]), num_nodes=3)
    mix = NeighborMixture(hood, torch.full((3, 2), 0.2), torch.zeros(hood.num_edges))
    q = mix.latents(torch.tensor([[0.0, 0.5], [0.0, -1.0], [0.3, 0.0]]))
    exact, swept = q.posterior(), q.posterior(8, num_sweeps=500, num_states=2000)
    assert len(swept.components) == 2000
    nodes, pairs = torch.arange(3), torch.tensor([[0, 0, 1], [1, 2, 2]])
    tables, marginals = swept.pairwise(pairs), swept.marginals()
    torch.testing.assert_close(tables.sum(-1), marginals[pairs[0]])
    torch.testing.assert_close(tables.sum(-2), marginals[pairs[1]])
    joint = swept.log_marginal(nodes, labellings(3)).exp().view(2, 2, 2)
    torch.testing.assert_close(joint.sum(2), tables[0])
    torch.testing.assert_close(joint.sum(1), tables[1])
    close = {"atol": 0.06, "rtol": 0}
    torch.testing.assert_close(tables, exact.pairwise(pairs), **close)
    torch.testing.assert_close(
        swept.information_gain(nodes), exact.information_gain(nodes), **close
    )
    assert torch.equal(swept.predict(), exact.predict())
    draws = swept.sample((20_000,)).double()
    torch.testing.assert_close(draws.mean(0), exact.marginals()[:, 1], **close)


@pytest.mark.parametrize(("num_states", "expected"), [(None, 16), (5, 4), (16, 16), (100, 16)])
def test_states_are_kept_by_chain(num_states, expected):
    """Four chains of eight sweeps have 16 states in their second halves."""
    mix, evidence = problem("house")
    found = mix.latents(evidence).posterior(4, num_sweeps=8, num_states=num_states)
    assert len(found.components) == expected


@pytest.mark.parametrize("seed", range(8))
def test_loop_and_fixed_point_agree(monkeypatch, seed):
    from pyro_nmm import backend

    if backend.compiled is None:
        pytest.skip("needs numba")
    hood = [house(), star(), random_sources(9, 3), Neighborhood.grid(4, 4)][seed % 4]
    num_classes = 2 + seed % 3
    alpha, logits = parameters(hood, num_classes)
    size = hood.num_nodes if seed < 4 else hood.num_edges
    terms = LatentTerms(
        hood.log_softmax(logits)[None], alpha[None], torch.randn(1, size, num_classes)
    )
    start = draw_latent(hood, terms, torch.rand(6, hood.num_rows))
    uniforms = torch.rand(7, 6, hood.num_rows)
    one = sweep(hood, terms, start, uniforms)
    monkeypatch.setattr(backend, "compiled", None)
    two = sweep(hood, terms, start, uniforms)
    assert all(map(torch.equal, (*one.draw, *one[1:]), (*two.draw, *two[1:])))
    assert (one.visits.sum(-1) == 7).all()


@pytest.mark.parametrize("kernels", ["loops", "tensors"], indirect=True)
def test_sweeps_leave_their_law_as_it_is(kernels):
    """From exact draws of the posterior, a sweep gives exact draws, by a chi-squared test."""
    mix, evidence = problem("house")
    hood = mix.hood
    exact = mix.latents(evidence).posterior().components
    terms = LatentTerms(hood.log_softmax(mix.logits)[None], mix.alpha[None], evidence[None])
    start = exact.drawn(30_000)
    edges = hood.find(exact.choices[start])
    draw = sweep(hood, terms, (type(draw_latent(hood, terms, torch.rand(1, 5))))(
        edges, exact.labels[start]), torch.rand(1, 30_000, 5)).draw  # fmt: skip
    found = torch.stack([hood.source[draw.edges], draw.labels], 1)
    key = found.flatten(1) @ (6 ** torch.arange(10))
    place = torch.stack([exact.choices, exact.labels], 1).flatten(1) @ (6 ** torch.arange(10))
    place, order = place.sort()
    weights = exact.weights[order]
    keep = weights * 30_000 > 5
    counts = torch.bincount(torch.searchsorted(place, key), minlength=len(place))
    expected = weights * 30_000
    statistic = ((counts - expected)[keep] ** 2 / expected[keep]).sum()
    freedom = int(keep.sum()) - 1
    assert abs(statistic - freedom) < 5 * (2 * freedom) ** 0.5
    rare = expected[~keep].sum()
    assert abs(counts[~keep].sum() - rare) < 5 * (rare + 1) ** 0.5


def test_diagnostics():
    hood = Neighborhood.grid(6, 6)
    alpha, logits = torch.full((36, 2), 0.3), torch.zeros(hood.num_edges)
    terms = LatentTerms(hood.log_softmax(logits)[None], alpha[None], torch.zeros(1, 36, 2))
    start = draw_latent(hood, terms, torch.rand(4, 36))
    found, states = run_chains(hood, terms, start, 200, num_kept=3)
    assert states.labels.shape == (12, 36)
    assert torch.equal(states.labels[-4:], found.draw.labels)
    assert found.totals.shape == (4, 100, 2)
    expected = effective_sample_size(found.totals, chain_dim=0, sample_dim=1)
    torch.testing.assert_close(found.effective_size(), expected)
    assert (found.gelman_rubin() < 1.3).all()
    stuck = found._replace(totals=found.totals + 100 * torch.arange(4)[:, None, None])
    assert (stuck.gelman_rubin() > 2).all()


def test_more_labels_than_an_exact_sum_takes():
    hood = Neighborhood.grid(5, 5)
    large = NeighborMixture(hood, torch.ones(25, 2), torch.zeros(hood.num_edges))
    some = large.latents(torch.zeros(25, 2), torch.arange(25) < 2).posterior()
    assert len(some.condition(torch.zeros(25).long(), torch.arange(25) > 1, 7).components) == 7
