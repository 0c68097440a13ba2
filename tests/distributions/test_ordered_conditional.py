# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

import itertools

import networkx as nx
import pytest
import torch
from cases import random_case
from graphs import house, parameters, shared_sources, star, to_hood, two_triangles
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2
from sequential import draw as draw_one_by_one

from pyro_nmm import (
    ChosenLabels,
    NeighborChoice,
    NeighborMixture,
    OrderedConditional,
    backend,
)
from pyro_nmm.ops.entries import Entries
from pyro_nmm.ops.enumeration import enumerate_choices
from pyro_nmm.ops.predictive import predictive
from pyro_nmm.ops.sampling import draw_by_sweeps, draw_entries

GRAPHS = {"star": star, "house": house, "two_triangles": two_triangles, "shared": shared_sources}
MASKS = [None, torch.tensor([True, False, True, True, False])]


def setting(name, num_classes=3):
    hood = GRAPHS[name]()
    alpha, logits = parameters(hood, num_classes)
    return hood, alpha, logits, torch.randint(num_classes, (hood.num_nodes,))


@pytest.mark.parametrize("observed", MASKS, ids=["all", "some"])
@pytest.mark.parametrize("name", GRAPHS)
def test_is_a_distribution_and_its_weights_integrate_to_the_likelihood(kernels, name, observed):
    hood, alpha, logits, y = setting(name)
    q = OrderedConditional(hood, alpha, logits, y, observed)
    rows = hood.restrict(observed)
    choices = rows.source[enumerate_choices(rows)]
    log_q = q.log_prob(choices)
    torch.testing.assert_close(log_q.exp().sum(), torch.tensor(1.0))
    joint = NeighborChoice(rows, logits[rows.edge]).log_prob(choices)
    joint = joint + ChosenLabels(alpha, choices).log_prob(y[rows.nodes])
    bound = q.log_labels(choices).sum(-1)
    torch.testing.assert_close(joint - log_q, bound)
    exact = NeighborMixture(hood, alpha, logits).log_marginal(rows.nodes, y[rows.nodes])
    torch.testing.assert_close((log_q + bound).exp().sum().log(), exact)
    assert (log_q.exp() * bound).sum() <= exact


@settings(max_examples=100)
@given(st.integers(0, 2**31), st.sampled_from(["random", "hubs", "grid", "sources"]))
def test_same_uniforms_same_choices_as_one_by_one(kernels, seed, kind):
    hood, alpha, logits, y, observed, order, shape, uniforms = random_case(seed, kind)
    q = OrderedConditional(hood, alpha, logits, y, observed, order)
    draw = q._draw(shape, uniforms)
    choices = q.rows.source[draw.edges]
    log_q = predictive(q.rows, q._flat(shape), draw)[1].sum(-1)
    alpha = alpha.expand(*shape, -1, -1).reshape(-1, *alpha.shape[-2:])
    logits = logits.expand(*shape, -1).reshape(-1, hood.num_edges)
    y = y.expand(*shape, -1).reshape(-1, hood.num_nodes)
    for b in range(len(uniforms)):
        expected, log_prob = draw_one_by_one(hood, alpha[b], logits[b], y[b], order, uniforms[b])
        assert choices[b].tolist() == expected.tolist()
        torch.testing.assert_close(log_q[b].item(), log_prob)


@pytest.mark.skipif(backend.compiled is None, reason="needs numba")
@pytest.mark.parametrize("num_classes", [4, 50])  # fewer and more counts than edges
def test_sweeps_and_loop_agree_on_a_graph_with_hubs(num_classes):
    graph = nx.barabasi_albert_graph(3000, 3, seed=0)
    hood = to_hood(graph)
    for scale in (0.01, 1.0, 100.0):
        alpha, logits = parameters(hood, num_classes)
        q = OrderedConditional(hood, scale * alpha, logits, torch.randint(num_classes, (3000,)))
        entries, uniforms = q._flat(torch.Size([2])), torch.rand(2, 3000)
        one = draw_by_sweeps(q.rows, entries, uniforms)
        two = draw_entries(q.rows, entries, uniforms)
        assert all(map(torch.equal, (*one[:2], *one.counts), (*two[:2], *two.counts)))


@pytest.mark.parametrize("name", GRAPHS)
def test_samples_follow_log_prob(kernels, name):
    hood, alpha, logits, y = setting(name)
    observed = MASKS[1]
    q = OrderedConditional(hood, alpha, logits, y, observed)
    rows = hood.restrict(observed)
    edges = enumerate_choices(rows)
    draws = rows.find(q.sample((30_000,)))
    match = (draws[:, None] == edges).all(-1)
    assert (match.sum(1) == 1).all()
    counts, expected = match.sum(0), q.log_prob(rows.source[edges]).exp() * len(draws)
    keep = expected > 5
    statistic = ((counts - expected)[keep] ** 2 / expected[keep]).sum()
    rare = expected[~keep].sum()
    assert (counts[~keep].sum() - rare).abs() < 5 * (rare + 1).sqrt()
    assert chi2.sf(statistic, keep.sum() - 1) > 1e-4


def test_log_prob_of_a_draw_is_log_prob_of_its_value(kernels):
    """The counts that sample() leaves for log_prob are those of the value."""
    hood, alpha, logits, y = setting("house")
    q = OrderedConditional(hood, alpha, logits, y)
    for shape in [(), (1,), (2, 3)]:
        c = q.sample(shape)
        kept = q.log_prob(c), q.log_labels(c)
        fresh = OrderedConditional(hood, alpha, logits, y, order=q.order)
        hood._found = None
        torch.testing.assert_close(kept, (fresh.log_prob(c), fresh.log_labels(c)))
        other = c.roll(1, 0) if shape else c
        torch.testing.assert_close(q.log_prob(other), fresh.log_prob(other))


def test_a_draw_that_was_written_into_is_another_value(kernels):
    hood, alpha, logits, y = setting("house")
    q = OrderedConditional(hood, alpha, logits, y)
    c = q.sample((3,))
    c[0] = torch.arange(5)
    fresh = OrderedConditional(house(), alpha, logits, y, order=q.order)
    torch.testing.assert_close(q.log_prob(c), fresh.log_prob(c))
    choice, other = NeighborChoice(hood, logits), NeighborChoice(house(), logits)
    torch.testing.assert_close(choice.log_prob(c), other.log_prob(c))


def test_expand_after_a_draw(kernels):
    hood, alpha, logits, y = setting("house")
    q = OrderedConditional(hood, alpha, logits, y)
    c = q.sample()
    torch.testing.assert_close(q.expand((3,)).log_prob(c), q.log_prob(c).expand(3))


def test_entries_are_in_ascending_node_id_whatever_the_order():
    hood, alpha, logits, y = setting("house")
    observed = MASKS[1]
    strong = logits + 50 * (hood.source == hood.target)
    for order in ([0, 2, 3], [3, 0, 2]):
        q = OrderedConditional(hood, alpha, strong, y, observed, torch.tensor(order))
        assert q.order.tolist() == order
        assert q.sample().tolist() == [0, 2, 3]


@pytest.mark.parametrize(
    ("a", "b", "c"), list(itertools.product([(), (3,)], [(), (2, 1)], [(), (3,)]))
)
def test_batches_are_columns(kernels, a, b, c):
    hood = house()
    alpha, _ = parameters(hood, 3, batch=a)
    _, logits = parameters(hood, 3, batch=b)
    y = torch.randint(3, (*c, 5))
    order = torch.tensor([3, 0, 2])
    q = OrderedConditional(hood, alpha, logits, y, MASKS[1], order)
    assert q.batch_shape == torch.broadcast_shapes(a, b, c)
    value = q.sample((4,))
    assert value.shape == (4, *q.batch_shape, 3)
    q = q.expand((4, *q.batch_shape))
    log_prob, shape = q.log_prob(value), q.batch_shape
    assert log_prob.shape == shape
    alpha, logits = alpha.expand(*shape, 5, 3), logits.expand(*shape, -1)
    y = y.expand(*shape, -1)
    for i in itertools.product(*map(range, shape)):
        one = OrderedConditional(hood, alpha[i], logits[i], y[i], MASKS[1], order)
        torch.testing.assert_close(log_prob[i], one.log_prob(value[i]))
    assert q.expand((5, *shape)).sample().shape == (5, *shape, 3)


def test_gradient_of_the_predictive_pass():
    hood, alpha, logits, y = setting("house")
    for batch in [(), (3,)]:
        alpha, logits = parameters(hood, 3, batch)
        y = torch.randint(3, (*batch, 5))
        q = OrderedConditional(hood, alpha, logits, y)
        shape = torch.Size([3])
        draw = q._draw(shape)
        *terms, labels, _ = q._flat(shape)
        terms = [t.detach().requires_grad_() for t in terms]
        # log-attention is any number here: the pass does not assume that rows sum to one.
        assert torch.autograd.gradcheck(
            lambda *t, q=q, draw=draw, labels=labels: predictive(
                q.rows, Entries(*t, labels, 3), draw
            ),
            terms,
        )


def test_bound_is_below_and_close_on_a_larger_graph(kernels):
    hood = to_hood(nx.path_graph(9))
    alpha, logits = parameters(hood, 2)
    mix = NeighborMixture(hood, alpha, logits)
    y = mix.sample()
    bound = mix.elbo(y, num_samples=4000)
    assert bound.shape == (4000,)
    error = bound.std() / 4000**0.5
    exact = mix.log_prob(y)
    assert bound.mean() - 4 * error < exact
    tighter = bound.logsumexp(0) - torch.tensor(4000.0).log()
    weights = (bound - exact).exp()
    assert (weights.mean() - 1).abs() < 4 * weights.std() / 4000**0.5
    assert (tighter - exact).abs() < 0.1
