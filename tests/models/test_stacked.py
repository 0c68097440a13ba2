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
from pyro_nmm.models import PooledScores, StackedNMM
from pyro_nmm.models.stacked.fit import surrogate


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_are_the_formula(kind):
    hood, scores, y, known = house(), torch.randn(5, 3), torch.arange(5) % 3, mask(5, 0, 3)
    stacked = moved(made(kind), 1.0)
    values = {name: value.detach() for name, value in stacked.named_parameters()}
    kappa, floor = values["log_kappa"].exp(), values["log_floor"].exp()
    if kind == "scores":
        probs = (values["pool.log_scale"].exp() * scores).softmax(-1)
    else:
        probs = stacked.pool(stacked.pool.terms(hood, scores, y, known))
    alpha, logits, *relabel = stacked(hood, scores, y, known)
    torch.testing.assert_close(alpha, kappa * (probs + floor / 3))
    for e, (i, j) in enumerate(zip(hood.target.tolist(), hood.source.tolist(), strict=True)):
        cosine = probs[i] @ probs[j] / (probs[i].norm() * probs[j].norm())
        value = values["similarity"] * cosine + values["gamma"] * (i == j)
        torch.testing.assert_close(logits[e], value)
        for change in relabel:
            rate, keep = values["odds"].sigmoid() * (i != j), torch.eye(3)
            mixed = (1 - rate) * keep + rate * stacked.compatibility.to(keep)
            torch.testing.assert_close(change[e], mixed)
    assert len(relabel) == (kind == "relabelled")


@pytest.mark.parametrize("kind", KINDS)
def test_order_of_nodes_and_labels_does_not_matter(kind):
    """Renumbered nodes and labels have renumbered marginals."""
    hood, scores, y, train, held_out = cliques()
    order, swap, known = torch.randperm(60), torch.tensor([2, 0, 1]), train | held_out
    stacked, other = moved(made(kind), 0.5), made(kind)
    other.load_state_dict(stacked.state_dict())
    if kind != "scores":
        other.pool.offsets.data = stacked.pool.offsets.data[swap]
    if kind == "relabelled":
        other.compatibility = stacked.compatibility[swap][:, swap]
    place, labels = order.argsort(), swap.argsort()[y]
    edges = torch.stack([place[hood.source], place[hood.target]])
    again = Neighborhood(edges, 60), scores[order][:, swap], labels[order], known[order]
    expected = stacked.mixture(hood, scores, y, known).marginals()[order][:, swap]
    torch.testing.assert_close(other.mixture(*again).marginals(), expected)


@given(seed=st.integers(0, 2**16))
def test_pool_is_the_formula(seed):
    """By dense powers of the walk's matrix."""
    torch.manual_seed(seed)
    hood = to_hood(nx.gnp_random_graph(9, 0.3, seed=seed))
    scores, y, known = 2 * torch.randn(9, 3), torch.randint(3, (9,)), torch.rand(9) < 0.4
    pool = moved(PooledScores(3), 1.0)
    pool.temperature.fill_(1.7)
    pool.shares.copy_(0.3 * torch.rand(3))
    walk = torch.zeros(9, 9).index_put((hood.target, hood.source), torch.ones(()))
    walk, labels = walk / walk.sum(1, keepdim=True), torch.zeros(9, 3)
    labels[known, y[known]] = 1.0
    power = [torch.linalg.matrix_power(walk, r) @ labels for r in range(21)]
    reached = sum(0.1 * 0.9**r * power[r] for r in range(20)) + 0.9**20 * power[20]
    share = (labels.sum(0) + 1) / (labels.sum() + 3)
    above = (reached + 0.01 * share) / (reached.sum(-1, keepdim=True) + 0.01) / share
    own = (1 - pool.shares.sum()) * (scores / 1.7).softmax(-1) + pool.shares
    agree = (own * (walk @ own)).sum(-1, keepdim=True)
    logits = (pool.log_scale.exp() + pool.agreement * (agree - 0.75)) * own.log()
    logits = logits + pool.neighbors * (walk @ own + 1e-3).log()
    logits = logits + pool.labels * above.log() + pool.offsets
    torch.testing.assert_close(pool(pool.terms(hood, scores, y, known)), logits.softmax(-1))
    nothing = pool.terms(hood, scores, torch.full((9,), -1), mask(9))
    torch.testing.assert_close(nothing[2], torch.zeros(9, 3))


def test_scores_alone_condition_on_known_labels():
    hood, scores, known = house(), torch.randn(5, 2), mask(5, 0)
    stacked, y = numbers(made("scores", 2), gamma=0.4), torch.tensor([1, 0, 0, 0, 0])
    table = oracle.of_hood(hood, *(value.detach() for value in stacked(hood, scores)))
    mix, joint = stacked.mixture(hood, scores), torch.tensor(table.marginal(0, 3))[1]
    torch.testing.assert_close(
        mix.log_prob(torch.tensor(table.labels)), torch.tensor(table.log_prob)
    )
    torch.testing.assert_close(mix.condition(y, known).marginals()[3], joint / joint.sum())
    found = stacked.posterior(hood, scores, y, known).marginals()[3]
    torch.testing.assert_close(found, joint / joint.sum(), rtol=0, atol=0.1)


def test_labels_in_the_pool_are_no_evidence_about_choices():
    """Other nodes have the distribution of ``alpha`` and ``logits``, and known labels are kept."""
    hood, scores, y, known = house(), torch.randn(5, 3), torch.tensor([1, 0, 0, 0, 0]), mask(5, 0)
    stacked = numbers(StackedNMM(3), gamma=0.4)
    table = oracle.of_hood(hood, *(value.detach() for value in stacked(hood, scores, y, known)))
    posterior, mix = (call(hood, scores, y, known) for call in (stacked.posterior, stacked.mixture))
    torch.testing.assert_close(posterior.marginals()[3], torch.tensor(table.marginal(3)))
    pair = posterior.pairwise(torch.tensor([[1], [3]]))[0]
    torch.testing.assert_close(pair, torch.tensor(table.marginal(1, 3)))
    assert torch.equal(posterior.marginals()[0], torch.tensor([0.0, 1.0, 0.0]))
    assert (posterior.sample((50,))[:, 0] == 1).all()
    joint = torch.tensor(table.marginal(2, 3))[0]  # given a new label, which alpha does not know
    more = mix.condition(y, mask(5, 0, 2))
    torch.testing.assert_close(more.marginals()[3], joint / joint.sum())


def test_gradient_of_the_conditional_bound():
    """The surrogate's mean gradient is the enumerated bound's, in every parameter."""
    torch.manual_seed(1)
    hood = to_hood(nx.path_graph(4))
    stacked, scores = numbers(StackedNMM(2), log_kappa=-0.5), torch.randn(4, 2)  # strong sharing
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
    draws = torch.stack([gradient(surrogate(conditional(), 2, 2)) for _ in range(250)])
    error = draws.std(0) / len(draws) ** 0.5
    assert ((draws.mean(0) - exact).abs() < 4 * error).all()
    assert ((direct - exact).abs() > 4 * error).any()  # without the score it would not pass


def test_is_a_network_for_svi():
    """Its parameters are parameters of a Pyro program."""
    hood, observed = house(), mask(5, 1, 2, 4)
    program = AmortizedNMM(hood, made("pool", 2).double())
    elbo = TraceGraph_ELBO(num_particles=4, vectorize_particles=True, max_plate_nesting=1)
    svi = SVI(program.model, program.guide, Adam({"lr": 0.05}), elbo)
    y, before = torch.tensor([0, 1, 0, 1, 0]), [p.clone() for p in program.network.parameters()]
    svi.step(torch.randn(5, 2), y, ~observed, y=y, observed=observed)
    assert not any(map(torch.equal, before, program.network.parameters()))
    assert "pool.labels" in " ".join(pyro.get_param_store().keys())


@pytest.mark.parametrize("kind", KINDS)
def test_mixture_has_the_gradient_of_scores(kind):
    """And none of the fitted parameters."""
    stacked, hood, labels = moved(made(kind), 0.5), house(), (torch.arange(5) % 3, mask(5, 3))

    def loss(scores):
        return stacked.mixture(hood, scores, *labels).marginals()[0, 0]

    scores = torch.randn(5, 3, requires_grad=True)
    assert torch.autograd.gradcheck(loss, scores)
    loss(scores).backward()
    assert all(value.grad is None for value in stacked.parameters())


@pytest.mark.parametrize("kind", ["pool", "scores"])
def test_posterior_is_averaged_over_draws(kind):
    hood, scores, y, train, held_out = cliques()
    stacked = made(kind).fit(hood, scores, y, train, held_out, **FEW)
    posterior = stacked.posterior(hood, scores, y, train)
    assert isinstance(posterior, AveragedPosterior)
    assert len(posterior.members) == len(stacked.deviations) == 16
    spread = torch.stack([each.marginals() for each in posterior.members])[:, ~train].std(0)
    assert spread.max() > 0.01
    exact = stacked.posterior(hood, scores, y, train, num_draws=0)
    assert type(exact) is Posterior
    change = (posterior.marginals() - exact.marginals()).abs().max()
    assert 0 < change < 0.1  # opposite draws: the mean moves by terms of second order only
    if kind == "pool":  # whose known labels are no evidence
        start = torch.nn.utils.parameters_to_vector(stacked.parameters()).detach().clone()
        torch.nn.utils.vector_to_parameters(start + stacked.deviations[0], stacked.parameters())
        expected = stacked.mixture(hood, scores, y, train).marginals()
        torch.testing.assert_close(posterior.members[0].marginals()[~train], expected[~train])


def test_new_labels_are_evidence_and_in_the_pool():
    """Before an update they are evidence alone, as in ``condition``; after it, both."""
    hood, scores, y, train, new = cliques()
    stacked, some = numbers(StackedNMM(3), gamma=1.0), new & (torch.arange(60) < 8)
    for updated in (False, True):
        stacked.updated.fill_(updated)
        found = stacked.posterior(hood, scores, y, train, new=some)
        known = train | some if updated else train
        alpha, logits = (value.detach() for value in stacked(hood, scores, y, known))
        expected = NeighborMixture(hood, alpha, logits).condition(y, some).marginals()
        assert found.observed.equal(train | some)
        torch.testing.assert_close(found.marginals()[~train], expected[~train], rtol=0, atol=0.05)
