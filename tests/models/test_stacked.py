# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""StackedNMM of every kind: its formulas, its limits, its posteriors and its gradients."""

import itertools

import networkx as nx
import oracle
import pyro
import pytest
import torch
from graphs import house, to_hood
from hypothesis import given
from hypothesis import strategies as st
from pyro.infer import SVI, TraceGraph_ELBO
from pyro.optim import Adam
from stacking import FEW, KINDS, cliques, made, mask, moved, numbers

from pyro_nmm import Neighborhood, NeighborMixture, OrderedConditional, Posterior
from pyro_nmm.distributions.averaged_posterior import AveragedPosterior
from pyro_nmm.guides import AmortizedNMM
from pyro_nmm.models import PooledScores, StackedNMM, temperature_scaling
from pyro_nmm.models.stacked.fit import NUM_DRAWS, surrogate
from pyro_nmm.models.stacked.formula import DAMPING, SHRINKAGE, STEPS, with_own_sources
from pyro_nmm.models.stacked.table import GraphScores


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("weighted", [False, True])
def test_parameters_are_the_formula(kind, weighted):
    hood, scores, y, known = house(), torch.randn(5, 3), torch.arange(5) % 3, mask(5, 0, 3)
    stacked = moved(made(kind), 1.0)
    weight = torch.rand(hood.num_edges) + 0.5 if weighted else torch.ones(hood.num_edges)
    values = {name: value.detach() for name, value in stacked.named_parameters()}
    kappa, floor = values["log_kappa"].exp(), values["log_floor"].exp()
    if stacked.pool is None:
        probs = (values["log_scale"].exp() * scores).softmax(-1)
    else:
        probs = stacked.pool(stacked.pool.terms(hood, scores, y, known, weight))
        floor = kappa * floor / 3
    alpha, logits, *relabel = stacked(hood, scores, y, known, weight if weighted else None)
    torch.testing.assert_close(alpha, kappa * probs + floor)
    for e, (i, j) in enumerate(zip(hood.target.tolist(), hood.source.tolist(), strict=True)):
        cosine = probs[i] @ probs[j] / (probs[i].norm() * probs[j].norm())
        value = values["similarity"] * cosine + values["gamma"] * (i == j) + weight[e].log()
        torch.testing.assert_close(logits[e], value)
        if relabel:
            rate, keep = values["odds"].sigmoid() * (i != j), torch.eye(3)
            mixed = (1 - rate) * keep + rate * stacked.compatibility.to(keep)
            torch.testing.assert_close(relabel[0][e], mixed)
    assert len(relabel) == (kind == "relabelled")


@pytest.mark.parametrize("kind", KINDS)
def test_order_of_nodes_and_labels_does_not_matter(kind):
    """Renumbered nodes and labels have renumbered marginals."""
    hood, scores, y, train, held_out = cliques()
    order, swap, known = torch.randperm(60), torch.tensor([2, 0, 1]), train | held_out
    stacked, other = moved(made(kind), 0.5), made(kind)
    other.load_state_dict(stacked.state_dict())
    if other.pool is not None:
        other.pool.offsets.data = stacked.pool.offsets.data[swap]
    if kind == "relabelled":
        other.compatibility = stacked.compatibility[swap][:, swap]
    place, labels = order.argsort(), swap.argsort()[y]
    edges = torch.stack([place[hood.source], place[hood.target]])
    again = Neighborhood(edges, 60), scores[order][:, swap], labels[order], known[order]
    expected = stacked.mixture(hood, scores, y, known).marginals()[order][:, swap]
    torch.testing.assert_close(other.mixture(*again).marginals(), expected)


@given(seed=st.integers(0, 2**16), weighted=st.booleans())
def test_pool_is_the_formula(seed, weighted):
    """By dense powers of the walk's matrix."""
    torch.manual_seed(seed)
    hood = to_hood(nx.gnp_random_graph(9, 0.3, seed=seed))
    scores, y, known = 2 * torch.randn(9, 3), torch.randint(3, (9,)), torch.rand(9) < 0.4
    weight = torch.rand(hood.num_edges) + 0.1 if weighted else torch.ones(hood.num_edges)
    pool = moved(PooledScores(3), 1.0)
    pool.temperature.fill_(1.7)
    walk = torch.zeros(9, 9).index_put((hood.target, hood.source), weight)
    walk, labels = walk / walk.sum(1, keepdim=True), torch.zeros(9, 3)
    labels[known, y[known]] = 1.0
    power = [torch.linalg.matrix_power(walk, r) @ labels for r in range(STEPS + 1)]
    reached = sum((1 - DAMPING) * DAMPING**r * term for r, term in enumerate(power[:-1]))
    reached = reached + DAMPING**STEPS * power[-1]
    share = (labels.sum(0) + 1) / (labels.sum() + 3)
    above = (reached + SHRINKAGE * share) / (reached.sum(-1, keepdim=True) + SHRINKAGE) / share
    own = (scores / 1.7).softmax(-1)
    agree = (own * (walk @ own)).sum(-1, keepdim=True)
    logits = (pool.log_scale.exp() + pool.agreement * (agree - 0.75)) * scores / 1.7
    logits = logits + pool.neighbors * (walk @ own + 1e-3).log()
    logits = logits + pool.labels * above.log() + pool.offsets
    terms = pool.terms(hood, scores, y, known, weight if weighted else None)
    torch.testing.assert_close(pool(terms), logits.softmax(-1))
    nothing = pool.terms(hood, scores, torch.full((9,), -1), mask(9))
    torch.testing.assert_close(nothing[2], torch.zeros(9, 3))


def test_temperature_scaling_and_a_bias_are_limits():
    """No sharing, no floor, attention to oneself, and no other evidence than scores."""
    hood, scores, y = house(), torch.randn(5, 3), torch.tensor([0, 1, 2, 1, 0])
    stacked, known = (
        numbers(StackedNMM(3), log_kappa=30.0, log_floor=-60.0, gamma=60.0),
        mask(5, 0, 1),
    )
    temperature, bias = temperature_scaling(scores, y, ~known), torch.tensor([0.3, -1.0, 0.2])
    for parameter in stacked.pool.parameters():
        parameter.data.zero_()
    stacked.pool.temperature.fill_(temperature)
    for offsets in (torch.zeros(3), bias):
        stacked.pool.offsets.data.copy_(offsets)
        found = stacked.mixture(hood, scores, y, known).marginals()
        expected = (scores / temperature + offsets).softmax(-1).float()
        torch.testing.assert_close(found[2:].float(), expected[2:])
        torch.testing.assert_close(found[:2], torch.eye(3)[:2].to(found))  # the known labels


@pytest.mark.parametrize("kind", ["pool", "scores"])
def test_posterior_is_the_enumeration(kind):
    """Known nodes are evidence for scores alone, and a part of alpha with a pool."""
    hood, scores = house(), torch.randn(5, 2)
    stacked, y = numbers(made(kind, 2), gamma=0.4), torch.tensor([1, 0, 0, 0, 0])
    alpha, logits = (value.detach() for value in stacked(hood, scores, y, mask(5, 0)))
    table = oracle.of_hood(hood, alpha, logits)
    mix, posterior = (
        call(hood, scores, y, mask(5, 0)) for call in (stacked.mixture, stacked.posterior)
    )
    if kind != "pool":
        labels = torch.tensor(table.labels)
        torch.testing.assert_close(mix.log_prob(labels), torch.tensor(table.log_prob))
        joint = torch.tensor(table.marginal(0, 3))[1]
        given_one = mix.condition(y, mask(5, 0)).marginals()
        torch.testing.assert_close(given_one[3], joint / joint.sum())
        return
    torch.testing.assert_close(posterior.marginals()[3], torch.tensor(table.marginal(3)))
    pair = posterior.pairwise(torch.tensor([[1], [3]]))[0]
    torch.testing.assert_close(pair, torch.tensor(table.marginal(1, 3)))
    assert torch.equal(posterior.marginals()[0], torch.tensor([0.0, 1.0]))
    assert (posterior.sample((50,))[:, 0] == 1).all()
    joint = torch.tensor(table.marginal(2, 3))[0]  # given a new label, which alpha does not know
    more = mix.condition(y, mask(5, 0, 2))
    torch.testing.assert_close(more.marginals()[3], joint / joint.sum())
    drawn = posterior.condition(y, mask(5, 2), num_samples=4000).marginals()[3]
    torch.testing.assert_close(drawn, joint / joint.sum(), rtol=0, atol=0.02)


@given(seed=st.integers(0, 2**16))
def test_own_sources_change_nothing_else(seed):
    """Labels of all sets of other nodes are as likely as before, where edges relabel too."""
    torch.manual_seed(seed)
    hood, known = house(), torch.rand(5) < 0.5
    known[0], known[1] = False, True
    alpha, logits, y = torch.rand(5, 2) + 0.1, torch.randn(hood.num_edges), torch.randint(2, (5,))
    relabel = torch.rand(hood.num_edges, 2, 2)
    relabel = relabel / relabel.sum(-1, keepdim=True)
    others = (~known).nonzero()[:, 0]
    labels = torch.tensor(list(itertools.product(range(2), repeat=len(others))))
    data = GraphScores(hood, alpha, y, known)
    for more in ((), (relabel,)):
        before = NeighborMixture(hood, alpha, logits, *more)
        (after,) = with_own_sources(data, data.scores, 1.0, [(alpha, logits, *more)])
        torch.testing.assert_close(
            after.log_marginal(others, labels), before.log_marginal(others, labels)
        )
        torch.testing.assert_close(after.marginals()[known].argmax(-1), y[known])


@pytest.mark.parametrize("kind", ["scores", "pool"])
def test_gradient_of_the_conditional_bound(kind):
    """The surrogate's mean gradient is the enumerated bound's, in every parameter."""
    torch.manual_seed(1)
    hood = to_hood(nx.path_graph(4))
    stacked, scores = numbers(made(kind, 2), log_kappa=-0.5), torch.randn(4, 2)  # strong sharing
    y, order, known = torch.tensor([0, 1, 0, 0]), torch.tensor([1, 3, 0, 2]), mask(4, 1, 3)
    parameters = list(stacked.parameters())

    def conditional():
        return OrderedConditional(hood, *stacked(hood, scores, y, known), y, order=order)

    def gradient(value):
        slopes = torch.autograd.grad(value, parameters)
        return torch.cat([slope.view(-1) for slope in slopes])

    rows = [hood.source[hood.ptr[i] : hood.ptr[i + 1]].tolist() for i in range(4)]
    every, q = torch.tensor(list(itertools.product(*rows))), conditional()
    exact = gradient((q.log_prob(every).exp() * q.log_terms(every)[:, 2:].sum(-1)).sum())
    weights = q.log_prob(every).detach().exp()
    direct = gradient((weights * conditional().log_terms(every)[:, 2:].sum(-1)).sum())
    draws = torch.stack([gradient(surrogate(conditional(), 2, 20)) for _ in range(100)])
    error = draws.std(0) / len(draws) ** 0.5
    assert ((draws.mean(0) - exact).abs() < 4 * error).all()
    assert ((direct - exact).abs() > 4 * error).any()  # without the score it would not pass


@pytest.mark.parametrize("kind", ["scores", "pool"])
def test_is_a_network_for_svi(kind):
    """Its parameters are parameters of a Pyro program."""
    hood, observed = house(), mask(5, 1, 2, 4)
    program = AmortizedNMM(hood, made(kind, 2).double())
    elbo = TraceGraph_ELBO(num_particles=4, vectorize_particles=True, max_plate_nesting=1)
    svi = SVI(program.model, program.guide, Adam({"lr": 0.05}), elbo)
    y, before = torch.tensor([0, 1, 0, 1, 0]), [p.clone() for p in program.network.parameters()]
    svi.step(torch.randn(5, 2), y, ~observed, y=y, observed=observed)
    assert not any(map(torch.equal, before, program.network.parameters()))
    assert ("pool.labels" in " ".join(pyro.get_param_store().keys())) == (kind == "pool")


@pytest.mark.parametrize("kind", ["pool", "scores", "share"])
def test_posterior_without_known_labels(kind):
    """It is the mixture, in every query."""
    hood, scores, y = house(), torch.randn(5, 3), torch.arange(5) % 3
    stacked = moved(made("pool" if kind == "share" else kind))
    if kind == "share":
        stacked.share.fill_(0.7)
    known = hood, scores, torch.full((5,), -1), mask(5)
    mix, posterior = stacked.mixture(*known), stacked.posterior(*known)
    pairs = torch.tensor([[0, 2, 1], [1, 4, 1]])
    torch.testing.assert_close(posterior.marginals(), mix.marginals())
    torch.testing.assert_close(posterior.pairwise(pairs), mix.pairwise(pairs))
    joint = (each.log_marginal(pairs[0], y[:3]) for each in (posterior, mix))
    torch.testing.assert_close(*joint)
    rates = torch.nn.functional.one_hot(posterior.sample((20_000,)), 3).double().mean(0)
    error = (mix.marginals() * (1 - mix.marginals()) / 20_000).sqrt()
    assert ((rates - mix.marginals()).abs() < 5 * error + 1e-6).all()
    assert torch.equal(posterior.predict(), mix.marginals().argmax(-1))


@pytest.mark.parametrize("kind", KINDS)
def test_mixture_has_the_gradient_of_scores(kind):
    """As quotients of differences, and none of the fitted parameters."""
    stacked, hood, labels = moved(made(kind), 0.5), house(), (torch.arange(5) % 3, mask(5, 3))

    def loss(scores):
        return stacked.mixture(hood, scores, *labels).marginals()[0, 0]

    scores = torch.randn(5, 3, requires_grad=True)
    assert torch.autograd.gradcheck(loss, scores)
    loss(scores).backward()
    assert all(value.grad is None for value in stacked.parameters())
    assert not loss(scores.detach()).requires_grad


@pytest.mark.parametrize("kind", ["pool", "scores"])
def test_posterior_is_averaged_over_draws(kind):
    hood, scores, y, train, held_out = cliques()
    stacked = made(kind).fit(hood, scores, y, train, held_out, **FEW)
    assert stacked.deviations.shape[0] == NUM_DRAWS
    posterior = stacked.posterior(hood, scores, y, train)
    assert isinstance(posterior, AveragedPosterior)
    assert len(posterior.members) == NUM_DRAWS
    assert sum(len(each.components) for each in posterior.members) == 64
    spread = torch.stack([each.marginals() for each in posterior.members])[:, ~train].std(0)
    assert spread.max() > 0.01
    exact = stacked.posterior(hood, scores, y, train, num_draws=0)
    assert type(exact) is Posterior
    change = (posterior.marginals() - exact.marginals()).abs().max()
    assert 0 < change < 0.1  # opposite draws: the mean moves by terms of second order only
    assert len(stacked.posterior(hood, scores, y, train, num_samples=3).members) == 3
    assert type(stacked.posterior(hood, scores, y, train, num_samples=1)) is Posterior
    start = torch.nn.utils.parameters_to_vector(stacked.parameters()).detach().clone()
    if kind == "pool":  # whose known labels are no evidence
        for change, member in zip(stacked.deviations[:3], posterior.members, strict=False):
            torch.nn.utils.vector_to_parameters(start + change, stacked.parameters())
            expected = stacked.mixture(hood, scores, y, train).marginals()
            torch.testing.assert_close(member.marginals()[~train], expected[~train])


def test_new_labels_are_evidence_and_in_the_pool():
    """Before an update they are evidence alone, as in ``condition``; after it, both."""
    hood, scores, y, train, new = cliques()
    stacked = StackedNMM(3).fit(hood, scores, y, train, new, **FEW)
    exact = {"num_samples": None, "num_draws": 0}
    some = new & (torch.arange(60) < 8)
    found = stacked.posterior(hood, scores, y, train, new=some, **exact)
    expected = stacked.posterior(hood, scores, y, train, **exact).condition(y, some)
    torch.testing.assert_close(found.marginals(), expected.marginals())
    stacked.update(hood, scores, y, train, new, num_steps=5)
    assert stacked.updated
    found = stacked.posterior(hood, scores, y, train, new=some, **exact)
    alpha, logits = stacked(hood, scores, y, train | some)
    plain = NeighborMixture(hood, alpha.detach(), logits.detach()).condition(y, some)
    torch.testing.assert_close(found.marginals()[~train], plain.marginals()[~train])
    assert found.observed.equal(train | some)
    assert not stacked.fit(hood, scores, y, train, new, **FEW).updated
