# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Importance-weighted and sequential Monte Carlo estimates against enumeration."""

import math

import networkx as nx
import pytest
import torch
from cases import everything, sharing_house
from cost import Work
from documents import ROOT
from graphs import house, parameters, to_hood
from torch.nn.functional import one_hot

from pyro_nmm import NeighborMixture, OrderedConditional
from pyro_nmm.distributions.smc import _systematic, sequential_monte_carlo
from pyro_nmm.ops.counts import posterior_alpha
from pyro_nmm.ops.diagnostics import effective_size
from pyro_nmm.ops.stages import Stages


def by_stages(hood, alpha, logits, y, parts, num_particles, threshold):
    """Nodes in parts, with their labels."""
    nodes = torch.cat(list(parts))
    stages = Stages(hood.take(nodes), alpha, logits, y[nodes])
    return sequential_monte_carlo(stages, [len(part) for part in parts], num_particles, threshold)


def check_unbiased(estimate, exact, num_particles, num_runs):
    """
    E[exp(estimate)] is the likelihood, in standard errors. 20 runs of 1,000 particles notice a bias
    of 3 %. A bias that vanishes with many particles takes 400 runs of three, which notice 10 %.
    """
    ratios = torch.stack([estimate() for _ in range(num_runs)]).sub(exact).exp()
    assert ratios.std() > 0.3 / num_particles**0.5  # a test of something
    error = ratios.std() / num_runs**0.5
    assert error < 0.025
    assert (ratios.mean() - 1).abs() < 5 * error, (ratios.mean(), error)


@pytest.mark.parametrize(
    ("threshold", "stages", "num_particles", "num_runs"),
    [
        (1.0, 5, 3, 400),
        (1.0, 5, 1000, 20),
        (0.9, 5, 1000, 20),
        (1.0, 2, 1000, 20),
        (0.0, 5, 1000, 20),
        (0.0, 1, 1000, 20),
    ],
    ids=["few particles", "every stage", "adaptive", "two stages", "never", "importance"],
)
def test_unbiased(threshold, stages, num_particles, num_runs):
    mix, y = sharing_house(share=0.2)
    parts = torch.tensor([4, 0, 3, 2, 1]).tensor_split(stages)
    given = mix.hood, mix.alpha, mix.logits, y, parts, num_particles, threshold
    check_unbiased(lambda: by_stages(*given).sum(), mix.log_prob(y), num_particles, num_runs)


def test_resampling_happens_and_only_after_the_first_stage():
    """The same seed with and without it: equal at first, then not."""
    mix, y = sharing_house(share=0.2)
    parts, values = torch.arange(5).split(1), []
    for threshold in (0.0, 1.0):
        torch.manual_seed(3)
        args = (mix.hood, mix.alpha, mix.logits, y, parts, 3, threshold)
        values.append(by_stages(*args))
    assert torch.equal(values[0][0], values[1][0])
    assert not torch.allclose(values[0][-1], values[1][-1])


def test_resampling_is_unbiased():
    """A particle has as many children as its weight says on average, and never one more or less."""
    weights = torch.tensor([0.05, 0.15, 0.35, 0.45], dtype=torch.double)
    draws = [_systematic(weights.log()).bincount(minlength=4) for _ in range(2000)]
    children = torch.stack(draws).double()
    assert ((children - 4 * weights).abs() < 1).all()
    assert (children.mean(0) - 4 * weights).abs().max() < 0.05  # standard errors are .011 at most


@pytest.mark.parametrize("each_edge", [False, True], ids=["nodes", "edges"])
def test_unbiased_given_evidence(kernels, each_edge):
    """Estimates of p(w) against the sum over choices and labels, resampled or not."""
    mix, y = sharing_house(share=0.2)
    hood, order = mix.hood, torch.tensor([4, 0, 3, 1])
    evidence = 3.0 * one_hot(y, 2)  # against what the nodes share
    if each_edge:
        size = 2 * hood.num_edges
        evidence = evidence[hood.row] + torch.linspace(-0.5, 0.5, size).view(-1, 2)
    rows = hood.take(order)
    own = evidence[rows.edge if each_edge else rows.nodes]
    q = mix.latents(evidence, torch.arange(5) != 2)
    value = everything(q.observed_rows, 2)
    exact = (q.log_prob(value) + q.log_evidence(value).sum(-1)).logsumexp(0)
    stages = Stages(rows, mix.alpha, mix.logits, own)
    cases = [(1.0, 1000, 20), (0.0, 1000, 20)]
    if kernels == "loops":  # what few particles show does not depend on how they are drawn
        cases.append((1.0, 3, 400))
    for threshold, *size in cases:

        def estimate(number=size[0], threshold=threshold):
            return sequential_monte_carlo(stages, [1, 2, 1], number, threshold).sum()

        check_unbiased(estimate, exact, *size)


def test_evidence_that_is_a_label_has_the_label_s_likelihood():
    mix, y = sharing_house(share=0.2)
    evidence = torch.full((5, 2), -torch.inf)
    evidence[torch.arange(5), y] = 0
    estimate = mix.latents(evidence).log_likelihood(20_000, num_stages=2)
    assert abs(estimate - mix.log_prob(y)) < 0.03
    given = torch.tensor([True, False, True, False, False])
    mask = torch.tensor([True, True, True, False, True])
    q = mix.latents(evidence, mask)
    nodes, first = (m.nonzero()[:, 0] for m in (mask, given))
    exact = mix.log_marginal(nodes, y[nodes]) - mix.log_marginal(first, y[first])
    assert abs(q.log_likelihood(20_000, given=given) - exact) < 0.03


def test_converges_to_the_exact_likelihood():
    mix, y = sharing_house(share=0.2)
    for stages in (1, 5):
        estimate = mix.log_likelihood(y, num_particles=20_000, num_stages=stages)
        assert abs(estimate - mix.log_prob(y)) < 0.03
    bound = mix.elbo(y, num_samples=4000).mean()
    few = torch.stack([mix.log_likelihood(y, num_particles=4) for _ in range(400)])
    assert bound + 0.02 < few.mean() < mix.log_prob(y)


def test_conditional():
    """log p(y_tau | y_rho) is the difference of two exact likelihoods."""
    mix, y = sharing_house(share=0.2)
    given = torch.tensor([True, False, True, False, False])
    observed = torch.tensor([False, False, False, True, True])
    both, first = (m.nonzero()[:, 0] for m in (given | observed, given))
    exact = mix.log_marginal(both, y[both]) - mix.log_marginal(first, y[first])
    estimate = mix.log_likelihood(y, observed, given, num_particles=20_000, num_stages=2)
    assert abs(estimate - exact) < 0.03
    rest = mix.log_likelihood(y, given=given, num_particles=20_000)
    assert abs(rest - (mix.log_prob(y) - mix.log_marginal(first, y[first]))) < 0.03


def test_order():
    """One order and one stage: the ordered bound's own draws, and weights of mean p(y)."""
    mix, y = sharing_house(share=0.2)
    order, size = torch.tensor([4, 1, 0, 3, 2]), 20_000
    torch.manual_seed(5)
    found = mix.log_likelihood(y, num_particles=size, num_stages=1, order=order)
    torch.manual_seed(5)
    q = OrderedConditional(mix.hood, mix.alpha, mix.logits, y, order=order)
    weights = q.log_labels(q.sample((size,))).sum(-1)
    torch.testing.assert_close(found, weights.logsumexp(0) - math.log(size))
    ratios = (weights - mix.log_prob(y)).exp()
    assert abs(ratios.mean() - 1) < 4 * ratios.std() / size**0.5


def dense(hood, alpha, logits, y, stages, size, threshold):
    """Every particle with a table of concentrations of its own, as the definition reads."""
    alpha = alpha.expand(size, *alpha.shape)
    log_weights, increments = torch.full((size,), -math.log(size)), []
    for nodes in stages:
        observed = torch.zeros(hood.num_nodes, dtype=torch.bool)
        observed[nodes] = True
        q = OrderedConditional(hood, alpha, logits, y, observed, order=nodes)
        choices = q.sample()
        weighted = log_weights + q.log_labels(choices).sum(-1)
        increments.append(weighted.logsumexp(0))
        log_weights = weighted - increments[-1]
        labels = y[q.observed_rows.nodes].expand_as(choices)
        alpha = posterior_alpha(alpha, choices, labels)
        if (2 * log_weights).logsumexp(0) > -math.log(max(threshold * size, 1)):
            alpha = alpha[_systematic(log_weights)]
            log_weights = torch.full_like(log_weights, -math.log(size))
    return torch.stack(increments)


@pytest.mark.parametrize("threshold", [0.0, 0.5, 1.0], ids=["never", "adaptive", "always"])
def test_counts_that_move_are_the_dense_tables(kernels, threshold):
    """Draw by draw under one seed, with hubs, and resampling before lineages have met."""
    hood = to_hood(nx.barabasi_albert_graph(60, 3, seed=1))
    alpha, logits = parameters(hood, 3, scale=1.0)
    y = NeighborMixture(hood, 0.2 * alpha, logits).sample()
    stages, values = torch.randperm(60)[:50].split(4), []
    for function in (by_stages, dense):
        torch.manual_seed(5)
        values.append(function(hood, 0.2 * alpha, logits, y, stages, 6, threshold))
    torch.testing.assert_close(*values, rtol=0, atol=1e-10)


def test_linear_in_nodes():
    """Four times the nodes are four times the work, and the tables have no row for a node."""
    work = []
    for num_nodes in (1000, 4000):
        hood = to_hood(nx.barabasi_albert_graph(num_nodes, 2, seed=1))
        mix = NeighborMixture(hood, *parameters(hood, 10, scale=1.0))
        y = mix.sample()
        with Work() as done:
            mix.log_likelihood(y, num_particles=4)
        work.append(done.total)
        assert done.largest < 4 * mix.hood.num_edges + 1000
    # How far resampling reaches back differs between draws; quadratic work would be 16 times.
    assert work[1] / work[0] < 6


def test_labels_of_other_nodes_are_never_read():
    mix, y = sharing_house(share=0.2)
    observed = torch.tensor([True, True, False, False, True])
    y[~observed] = 99
    assert mix.log_likelihood(y, observed).isfinite()


@pytest.mark.parametrize("kind", ["labels", "matrices", "evidence"])
def test_elements_of_a_batch(kind):
    hood = to_hood(nx.cycle_graph(4))
    alpha, logits = parameters(hood, 2, (2,), scale=0.5)
    relabel = torch.rand(hood.num_edges, 2, 2).softmax(-1) if kind == "matrices" else None
    mix = NeighborMixture(hood, alpha[:, None], logits[:, None], relabel)
    y = torch.tensor([[0, 1, 1, 0], [1, 1, 0, 0], [0, 0, 0, 0]])
    if kind == "evidence":
        q = mix.latents(one_hot(y, 2).double().log())
        found = q.log_likelihood(num_particles=4000)
    else:
        found = mix.log_likelihood(y, num_particles=4000)
    assert found.shape == (2, 3)
    assert (found - mix.log_prob(y)).abs().max() < 0.05


@pytest.mark.slow
def test_pseudo_marginal_metropolis_hastings():
    """The chain of docs/pyro.md against an enumerated posterior."""
    text = (ROOT / "docs" / "pyro.md").read_text().partition("## Pseudo-marginal")[2]
    code = text.partition("```python")[2].partition("```")[0]
    hood = house()
    alpha, logits, truth = torch.ones(5, 2), torch.zeros(hood.num_edges), torch.zeros(5).long()
    found = globals() | {"hood": hood, "alpha": alpha, "logits": logits, "truth": truth}
    exec(code.replace("range(200)", "range(2000)"), found)
    draws = torch.stack(found["draws"])
    grid = torch.linspace(-5, 5, 81)
    mix = NeighborMixture(hood, grid.exp()[:, None, None] * alpha, logits)
    weights = (mix.log_prob(truth) - grid**2 / 2).softmax(0)
    mean = weights @ grid
    deviation = (weights @ (grid - mean) ** 2).sqrt()
    size = effective_size(draws[None])
    assert size > 150
    assert abs(draws.mean() - mean) < 4.5 * deviation / size**0.5
    assert abs(mean) > 3 * deviation / size**0.5  # unlike the prior's
