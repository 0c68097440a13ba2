# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
Choices in an order, given labels, evidence of nodes or evidence of edges: against enumeration and
against a loop over nodes. All of these amount to evidence of edges.
"""

import copy
import itertools
from functools import partial

import networkx as nx
import numpy as np
import pytest
import torch
from cases import everything, random_case
from graphs import house, parameters, shared_sources, star, to_hood, two_triangles
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2
from torch.nn.functional import one_hot

from pyro_nmm import (
    ChosenLabels,
    EvidenceConditional,
    NeighborChoice,
    NeighborMixture,
    OrderedConditional,
)
from pyro_nmm.ops import entries as entries_module
from pyro_nmm.ops.entries import Entries, evidence_entries, met, predictive
from pyro_nmm.ops.sampling import draw_by_sweeps, draw_entries

GRAPHS = {"star": partial(star, 3), "house": house, "triangles": two_triangles}
GRAPHS |= {"shared": shared_sources}
KINDS = "labels", "evidence", "edge evidence"
SOME = torch.tensor([True, False, True, True])


class Case:
    """A conditional of one kind, and the evidence of edges that it stands for."""

    def __init__(self, kind, hood, alpha, logits, y=None, batch=(), **options):
        self.hood, self.alpha, self.logits, size = hood, alpha, logits, alpha.shape[-1]
        self.observed = "evidence" not in kind
        if self.observed:
            y = torch.randint(size, (*batch, hood.num_nodes)) if y is None else y
            self.edge_evidence = one_hot(y[..., hood.row], size).double().log()
            self.data, make = y, OrderedConditional
        else:
            rows = hood.num_edges if "edge" in kind else hood.num_nodes
            evidence = torch.randn(*batch, rows, size)
            # A label that is known, one that is not, and one that two values are ruled out of.
            evidence[..., 0, :], evidence[..., 1:2, :], evidence[..., 0, 1] = -torch.inf, 0, 0.3
            self.edge_evidence = evidence if "edge" in kind else evidence[..., hood.row, :]
            self.data, make = evidence, EvidenceConditional
        self.make = partial(make, hood, **options)
        self.q = self.make(alpha, logits, self.data)

    def again(self):
        """The same conditional without a draw that it remembers."""
        return self.make(self.alpha, self.logits, self.data, order=self.q.order)

    def values(self):
        """Choices and labels ``(Q, 2, n)``, and their log-probability jointly with the data."""
        rows = self.q.observed_rows
        values = everything(rows, self.alpha.shape[-1])
        choices, labels = values.unbind(1)
        joint = NeighborChoice(rows, self.logits[rows.edge]).log_prob(choices)
        joint = joint + ChosenLabels(self.alpha, choices).log_prob(labels)
        joint = joint + self.edge_evidence[rows.edge[rows.find(choices)], labels].sum(-1)
        if self.observed:  # labels are no part of a sample
            values, joint = values[joint.isfinite()], joint[joint.isfinite()]
        return (values[:, 0] if self.observed else values), joint


def new_case(kind, name="house", num_classes=2, observed=None, batch=(), **options):
    hood = GRAPHS[name]()
    if observed is not None:
        rest = torch.ones(hood.num_nodes - len(observed), dtype=torch.bool)
        observed = torch.cat([observed, rest])
    alpha, logits = parameters(hood, num_classes, batch)
    return Case(kind, hood, alpha, logits, batch=batch, observed=observed, **options)


def check_densities(case):
    """All values sum to one, and the terms are p / q; log q, terms and log p where p > 0."""
    value, joint = case.values()
    log_q, bound = case.q.log_prob(value), case.q.log_terms(value).sum(-1)
    torch.testing.assert_close(log_q.exp().sum(), torch.tensor(1.0))
    possible = joint.isfinite()
    assert torch.equal(possible, log_q.isfinite())
    torch.testing.assert_close((joint - log_q)[possible], bound[possible])
    return log_q[possible], bound[possible], joint[possible]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("name", "observed"), [("house", None), ("triangles", SOME), ("shared", SOME)]
)
def test_is_a_distribution_and_its_weights_integrate_to_the_likelihood(
    kernels, name, observed, kind
):
    case = new_case(kind, name, observed=observed)
    log_q, bound, joint = check_densities(case)
    assert (log_q.exp() * bound).sum() <= joint.logsumexp(0)


def test_edges_whose_evidence_is_far_below_that_of_others(kernels):
    """By 2,000 nats, whose exponential no number holds."""
    case = new_case("edge evidence")
    own = case.hood.source == case.hood.target
    case.data = case.edge_evidence = case.data - 2000.0 * own[:, None]
    case.q = case.again()
    check_densities(case)
    assert (case.q.sample((20,))[:, 0] != torch.arange(5)).all()


def draw_one_by_one(hood, alpha, logits, evidence, order, uniforms):
    """As its definition reads: one node after the other. Evidence is of edges."""
    alpha, scores, evidence = alpha.numpy(), logits.numpy(), evidence.numpy()
    ptr, source, counts = hood.ptr.numpy(), hood.source.numpy(), np.zeros_like(alpha)
    chosen, log_q, log_w = [], 0.0, 0.0
    for i, u in zip(order.tolist(), uniforms.tolist(), strict=True):
        row = slice(ptr[i], ptr[i + 1])
        weight = np.exp(scores[row] - scores[row].max())
        weight = (weight / weight.sum())[:, None] * (alpha + counts)[source[row]]
        weight = weight / (alpha + counts)[source[row]].sum(1, keepdims=True)
        weight = weight * np.exp(evidence[row])
        probs = weight.flatten() / weight.sum()
        k = min(int((np.cumsum(probs) <= u).sum()), len(probs) - 1)
        edge, label = divmod(k, alpha.shape[1])
        counts[source[row][edge], label] += 1
        chosen.append([source[row][edge], label])
        log_q, log_w = log_q + np.log(probs[k]), log_w + np.log(weight.sum())
    return np.array(chosen), log_q, log_w


@settings(max_examples=150)
@given(st.integers(0, 2**31), st.sampled_from(["random", "hubs", "grid", "sources"]))
def test_same_uniforms_same_draws_as_one_by_one(kernels, seed, graph):
    hood, alpha, logits, y, observed, order, shape, uniforms = random_case(seed, graph)
    torch.manual_seed(seed)
    batch = () if seed % 4 else shape
    case = Case(KINDS[seed % 3], hood, alpha, logits, y, batch, observed=observed, order=order)
    q = case.q
    draw = draw_entries(q.rows, q._flat(shape), uniforms)
    log_w, log_q = (part.sum(-1) for part in predictive(q.rows, q._flat(shape), draw))
    alpha = alpha.expand(*shape, -1, -1).reshape(-1, *alpha.shape[-2:])
    logits = logits.expand(*shape, -1).reshape(-1, hood.num_edges)
    evidence = case.edge_evidence
    evidence = evidence.expand(*shape, -1, -1).reshape(-1, *evidence.shape[-2:])
    drawn = torch.stack([q.rows.source[draw.edges], draw.labels], -1)
    for b in range(len(uniforms)):
        arguments = alpha[b], logits[b], evidence[b], order, uniforms[b]
        expected, *values = draw_one_by_one(hood, *arguments)
        assert drawn[b].tolist() == expected.tolist()
        torch.testing.assert_close([log_q[b].item(), log_w[b].item()], values)


@pytest.mark.parametrize("num_classes", [4, 50])  # fewer and more counts than edges
def test_sweeps_and_loop_agree_on_a_graph_with_hubs(num_classes):
    hood = to_hood(nx.barabasi_albert_graph(3000, 3, seed=0))
    for scale in (0.01, 1.0, 100.0):
        alpha, logits = parameters(hood, num_classes)
        q = OrderedConditional(hood, scale * alpha, logits, torch.randint(num_classes, (3000,)))
        entries, uniforms = q._flat(torch.Size([2])), torch.rand(2, 3000)
        draws = (draw(q.rows, entries, uniforms) for draw in (draw_by_sweeps, draw_entries))
        found = ((*draw[:2], *met(q.rows, entries, draw, slice(0, 3000))) for draw in draws)
        assert all(map(torch.equal, *found))


@pytest.mark.parametrize(
    ("kernels", "name", "kind"),
    [
        ("tensors", "star", "labels"),
        ("blocks", "shared", "edge evidence"),
        ("loops", "triangles", "evidence"),
    ],
    indirect=["kernels"],
)
def test_samples_follow_log_prob(kernels, name, kind):
    """
    By a chi-squared test: 10,000 draws notice probabilities that are off by a tenth each. Draws
    equal those of the loop over nodes above, bit for bit, so each kernel needs few graphs.
    """
    case = new_case(kind, name, observed=torch.tensor([True, False, True, False]))
    value, _ = case.values()
    draws = case.q.sample((10_000,))
    place = (draws.flatten(1)[:, None] == value.flatten(1)).all(-1)
    assert (place.sum(1) == 1).all()
    counts, expected = place.sum(0), case.q.log_prob(value).exp() * len(draws)
    keep = expected > 5
    statistic = ((counts - expected)[keep] ** 2 / expected[keep]).sum()
    rare = expected[~keep].sum()
    assert (counts[~keep].sum() - rare).abs() < 5 * (rare + 1).sqrt()
    assert chi2.sf(statistic, keep.sum() - 1) > 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_a_draw_that_is_remembered(kernels, kind):
    """It has the density of its value, unless it was written into."""
    case = new_case(kind)
    q = case.q
    for shape in [(), (1,), (2, 3)]:
        sample, fresh = q.sample(shape), case.again()
        kept = q.log_prob(sample), q.log_terms(sample)
        torch.testing.assert_close(kept, (fresh.log_prob(sample), fresh.log_terms(sample)))
        torch.testing.assert_close(
            q.expand((4, *shape)).log_prob(sample), kept[0].expand(4, *shape)
        )
    sample[0] = sample[1].clone()
    torch.testing.assert_close(q.log_prob(sample), case.again().log_prob(sample))


@pytest.mark.parametrize("kind", KINDS)
def test_samples_are_in_ascending_node_id_whatever_the_order(kind):
    case = new_case(kind, observed=torch.tensor([True, False, True, True, False]))
    strong = case.logits + 50 * (case.hood.source == case.hood.target)
    for order in ([0, 2, 3], [3, 0, 2]):
        q = case.make(case.alpha, strong, case.data, order=torch.tensor(order))
        assert q.order.tolist() == order
        sample = q.sample()
        assert (sample if case.observed else sample[0]).tolist() == [0, 2, 3]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("a", "b", "c"), [((3,), (2, 1), ()), ((), (2, 1), (3,)), ((), (), (3,))])
def test_batches_are_columns(kernels, a, b, c, kind):
    hood, order = house(), torch.tensor([3, 0, 2])
    (alpha, _), (_, logits) = parameters(hood, 3, a), parameters(hood, 3, b)
    options = {"observed": torch.tensor([True, False, True, True, False]), "order": order}
    case = Case(kind, hood, alpha, logits, batch=c, **options)
    q, event = case.q, (3,) if case.observed else (2, 3)
    assert q.batch_shape == torch.broadcast_shapes(a, b, c)
    value = q.sample((4,))
    assert value.shape == (4, *q.batch_shape, *event)
    q = q.expand((4, *q.batch_shape))
    log_prob, shape = q.log_prob(value), q.batch_shape
    alpha, logits = alpha.expand(*shape, -1, -1), logits.expand(*shape, -1)
    data = case.data.expand(*shape, *case.data.shape[len(c) :])
    for i in itertools.product(*map(range, shape)):
        one = case.make(alpha[i], logits[i], data[i])
        torch.testing.assert_close(log_prob[i], one.log_prob(value[i]))
    assert q.expand((5, *shape)).sample().shape == (5, *shape, *event)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch", [(), (3,)])
def test_derivatives_of_densities(kernels, kind, batch):
    """Log-attention is any number here: rows need not sum to one."""
    hood = shared_sources()
    case = Case(kind, hood, *parameters(hood, 3, batch), batch=batch)
    q, shape = case.q, torch.Size([3])
    draw, entries = q._draw(shape), q._flat(shape)
    leaves = [entries.log_attention, entries.alpha]
    leaves.append(entries.total if case.observed else entries.data.clamp(min=-3))

    def densities(*leaves):
        if case.observed:
            return predictive(q.rows, Entries(*leaves, *entries[3:]), draw)
        return predictive(q.rows, evidence_entries(*leaves), draw)

    assert torch.autograd.gradcheck(densities, [t.detach().requires_grad_() for t in leaves])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch", [(), (3,)])
def test_densities_in_blocks_are_those_of_the_whole(kernels, kind, batch, monkeypatch):
    """With their gradients, for a draw, which knows its counts, and for a value that is given."""
    case = new_case(kind, "shared", 3, batch=batch, order=torch.tensor([3, 0, 4, 1, 2]))
    leaves, data = [case.alpha.requires_grad_(), case.logits.requires_grad_()], case.data
    if not case.observed:
        leaves.append(data := data.clamp(min=-3).requires_grad_())
    weights = torch.randn(2, 4, *batch, 5)

    def answers(copied):
        torch.manual_seed(1)
        q = case.make(*leaves[:2], data)
        value = q.sample((4,))
        value = value.clone() if copied else value
        terms, log_q = q.log_terms(value), q.log_prob(value)
        loss = (terms * weights[0]).sum() + (log_q * weights[1, ..., 0]).sum()
        return terms, log_q, *torch.autograd.grad(loss, leaves)

    for copied in (False, True):
        whole = answers(copied)
        with monkeypatch.context() as patch:
            patch.setattr(entries_module, "KEPT", 4)
            torch.testing.assert_close(answers(copied), whole)


def test_copies_have_the_same_order(way):
    hood = two_triangles()
    q = NeighborMixture(hood, *parameters(hood, 2)).choices(torch.arange(hood.num_nodes) % 2)
    assert torch.equal(copy.deepcopy(q).order, q.order)


@pytest.mark.parametrize("latent", [False, True])
def test_values_that_no_row_can_make(kernels, latent):
    """Without validation they have the density zero, and no gradient."""
    hood = to_hood(nx.Graph([(0, 1), (2, 2)]))
    alpha, logits = torch.rand(3, 2) + 0.1, torch.zeros(5, requires_grad=True)
    data = torch.randn(3, 2) if latent else torch.tensor([0, 1, 0])
    make = EvidenceConditional if latent else OrderedConditional
    q = make(hood, alpha, logits, data, validate_args=False)
    value = torch.tensor([[0, 1, 2], [2, 1, 2]])  # node 2 is no neighbour of node 0
    if latent:
        value = torch.stack([value, torch.tensor([[0, 1, 0], [0, 1, 0]])], 1)
    log_prob = q.log_prob(value)
    assert log_prob.isfinite().tolist() == [True, False]
    assert log_prob[1] == -torch.inf
    (gradient,) = torch.autograd.grad(log_prob[0], logits)
    assert gradient.isfinite().all()
