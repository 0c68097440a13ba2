# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Latent labels given evidence, against enumeration and against a loop over nodes."""

from functools import partial

import networkx as nx
import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from bounds import check_gradient, expected_evidence_bound, gradients
from cases import everything, random_case
from graphs import house, labellings, parameters, shared_sources, star, to_hood, two_triangles
from hypothesis import given, settings
from hypothesis import strategies as st
from pyro.infer import Trace_ELBO, TraceGraph_ELBO
from scipy.stats import chi2

from pyro_nmm import (
    ChosenLabels,
    EvidenceConditional,
    NeighborChoice,
    NeighborMixture,
    OrderedConditional,
)
from pyro_nmm.guides import evidence_guide, ordered_guide
from pyro_nmm.models import nmm
from pyro_nmm.ops.evidence import latent_predictive

GRAPHS = {"star": partial(star, 3), "house": house, "triangles": two_triangles}
GRAPHS |= {"shared": shared_sources}


def random_evidence(hood, num_classes, each_edge):
    """With a label that is known, one that is not, and one that two values are ruled out of."""
    evidence = torch.randn(hood.num_edges if each_edge else hood.num_nodes, num_classes)
    evidence[0], evidence[1] = -torch.inf, 0
    evidence[0, 1] = 0.3
    return evidence


def log_likelihoods(rows, evidence, value):
    """``(Q, n)``: the evidence of the nodes of ``rows`` at choices and labels ``(Q, 2, n)``."""
    choices, labels = value.unbind(1)
    place = rows.nodes.expand_as(choices)
    if len(evidence) != rows.num_nodes:
        place = rows.edge[rows.find(choices)]
    return evidence[place, labels]


@pytest.mark.parametrize("each_edge", [False, True], ids=["nodes", "edges"])
@pytest.mark.parametrize(
    "mask", [None, torch.tensor([True, False, True, True])], ids=["all", "some"]
)
@pytest.mark.parametrize("name", GRAPHS)
def test_is_a_distribution_and_its_weights_integrate_to_the_evidence(
    kernels, name, mask, each_edge
):
    hood = GRAPHS[name]()
    if mask is not None:
        mask = torch.cat([mask, torch.ones(hood.num_nodes - 4, dtype=torch.bool)])
    alpha, logits = parameters(hood, 2)
    evidence, rows = random_evidence(hood, 2, each_edge), hood.restrict(mask)
    value = everything(rows, 2)
    order = rows.nodes[torch.randperm(rows.num_rows)]
    q = EvidenceConditional(hood, alpha, logits, evidence, mask, order)
    log_q, bound = q.log_prob(value), q.log_evidence(value).sum(-1)
    torch.testing.assert_close(log_q.exp().sum(), torch.tensor(1.0))
    joint = NeighborChoice(rows, logits[rows.edge]).log_prob(value[:, 0])
    joint = joint + ChosenLabels(alpha, value[:, 0]).log_prob(value[:, 1])
    joint = joint + log_likelihoods(rows, evidence, value).sum(-1)
    there = joint.isfinite()
    assert torch.equal(there, log_q.isfinite())
    torch.testing.assert_close((joint - log_q)[there], bound[there])
    truth = joint.logsumexp(0)
    torch.testing.assert_close((log_q + bound)[there].logsumexp(0), truth)
    assert (log_q.exp() * bound)[there].sum() <= truth


def test_exact_evidence_of_nodes():
    """The sum over choices and labels is that over labellings."""
    hood = house()
    alpha, logits = parameters(hood, 3)
    evidence, labels = torch.randn(5, 3), labellings(5, 3)
    value = everything(hood, 3)
    q = EvidenceConditional(hood, alpha, logits, evidence)
    found = (q.log_prob(value) + q.log_evidence(value).sum(-1)).logsumexp(0)
    log_prob = NeighborMixture(hood, alpha, logits).log_prob(labels)
    truth = (log_prob + evidence[torch.arange(5), labels].sum(-1)).logsumexp(0)
    torch.testing.assert_close(found, truth)


def draw_one_by_one(hood, alpha, logits, evidence, order, uniforms):
    """As its definition reads: one node after the other."""
    alpha, scores, evidence = alpha.numpy(), logits.numpy(), evidence.numpy()
    ptr, source, counts = hood.ptr.numpy(), hood.source.numpy(), np.zeros_like(alpha)
    chosen, log_q, log_w = [], 0.0, 0.0
    for i, u in zip(order.tolist(), uniforms.tolist(), strict=True):
        row = slice(ptr[i], ptr[i + 1])
        weight = np.exp(scores[row] - scores[row].max())
        weight = (weight / weight.sum())[:, None] * (alpha + counts)[source[row]]
        weight = weight / (alpha + counts)[source[row]].sum(1, keepdims=True)
        weight = weight * np.exp(evidence[row] if len(evidence) != hood.num_nodes else evidence[i])
        probs = weight.flatten() / weight.sum()
        k = min(int((np.cumsum(probs) <= u).sum()), len(probs) - 1)
        edge, label = divmod(k, alpha.shape[1])
        counts[source[row][edge], label] += 1
        chosen.append([source[row][edge], label])
        log_q, log_w = log_q + np.log(probs[k]), log_w + np.log(weight.sum())
    return np.array(chosen), log_q, log_w


@settings(max_examples=100)
@given(st.integers(0, 2**31), st.sampled_from(["random", "hubs", "grid", "sources"]))
def test_same_uniforms_same_draws_as_one_by_one(kernels, seed, kind):
    hood, alpha, logits, _, observed, order, shape, uniforms = random_case(seed, kind)
    generator = torch.Generator().manual_seed(seed)
    size = (hood.num_nodes, hood.num_edges)[seed % 2], alpha.shape[-1]
    batch = () if seed % 3 else shape
    evidence = 3 * torch.randn(*batch, *size, generator=generator)
    q = EvidenceConditional(hood, alpha, logits, evidence, observed, order)
    draw = q._draw(shape, uniforms)
    choices = q.rows.source[draw.edges]
    log_w, log_q = (part.sum(-1) for part in latent_predictive(q.rows, q._flat(shape), draw))
    alpha = alpha.expand(*shape, -1, -1).reshape(-1, *alpha.shape[-2:])
    logits = logits.expand(*shape, -1).reshape(-1, hood.num_edges)
    evidence = evidence.expand(*shape, -1, -1).reshape(-1, *size)
    for b in range(len(uniforms)):
        case = alpha[b], logits[b], evidence[b]
        expected, *values = draw_one_by_one(hood, *case, order, uniforms[b])
        assert torch.stack([choices[b], draw.labels[b]], 1).tolist() == expected.tolist()
        torch.testing.assert_close([log_q[b].item(), log_w[b].item()], values)


def test_observed_labels_are_evidence(kernels):
    """Bit for bit the choices, and their probabilities."""
    for seed in range(20):
        hood, alpha, logits, y, observed, order, shape, uniforms = random_case(seed, "random")
        size, num_classes = len(order), alpha.shape[-1]
        evidence = torch.full((*y.shape, num_classes), -torch.inf)
        evidence.scatter_(-1, y[..., None], 0)
        known = OrderedConditional(hood, alpha, logits, y, observed, order)
        latent = EvidenceConditional(hood, alpha, logits, evidence, observed, order)
        one, two = known._draw(shape, uniforms), latent._draw(shape, uniforms)
        assert torch.equal(one.edges, two.edges)
        assert torch.equal(two.labels, known.labels.expand(*shape, -1).reshape(-1, size))
        for q in (known, latent):
            q._draw = lambda shape, kept=(one if q is known else two): kept
        c, both = known.sample(), latent.sample()
        assert torch.equal(c, both[..., 0, :])
        torch.testing.assert_close(known.log_prob(c), latent.log_prob(both))
        torch.testing.assert_close(known.log_labels(c), latent.log_evidence(both))


@pytest.mark.parametrize("loss", [TraceGraph_ELBO, Trace_ELBO])
@pytest.mark.parametrize("estimator", ["reward_to_go", "no_score"])
def test_guides_agree_draw_by_draw(loss, estimator):
    """One-hot evidence has the gradient of observed labels, and not more noise."""
    hood = house()
    alpha, logits = (leaf.requires_grad_() for leaf in parameters(hood, 2))
    y = torch.tensor([0, 1, 1, 0, 1])
    evidence = torch.nn.functional.one_hot(y, 2).double().log()
    latent = partial(nmm, hood, alpha, logits, collapsed=True)
    guide = partial(evidence_guide, hood, alpha, logits, evidence, collapsed=True)
    given = partial(nmm, hood, alpha, logits, y, collapsed=True)
    known = partial(ordered_guide, hood, alpha, logits, y, collapsed=True)
    found = []
    for model, q in ((latent, guide), (given, known)):
        pyro.set_rng_seed(0)
        elbo = loss(4, max_plate_nesting=0, vectorize_particles=True)

        def with_parameter(model=model):
            pyro.param("known", torch.zeros(()))  # Trace_ELBO looks for one
            return model()

        elbo.loss_and_grads(with_parameter, partial(q, estimator=estimator))
        found.append([leaf.grad.clone() for leaf in (alpha, logits)])
        alpha.grad, logits.grad = None, None
    torch.testing.assert_close(*found)


def test_no_evidence_says_nothing(kernels):
    hood = house()
    alpha, logits = parameters(hood, 3)
    q = EvidenceConditional(hood, alpha, logits, torch.zeros(5, 3))
    value = q.sample((50,))
    torch.testing.assert_close(q.log_evidence(value), torch.zeros(50, 5))
    # Where nothing is known, the sequence draws the prior, and leaving nodes out changes nothing.
    evidence, exact = torch.randn(5, 3), []
    evidence[[1, 3]] = 0
    for mask in (None, (evidence != 0).any(-1)):
        q = EvidenceConditional(hood, alpha, logits, evidence, mask)
        value = everything(hood.restrict(mask), 3)
        exact.append((q.log_prob(value) + q.log_evidence(value).sum(-1)).logsumexp(0))
    torch.testing.assert_close(*exact)


@pytest.mark.parametrize(
    ("kernels", "name"),
    [("loops", "star"), ("tensors", "house"), ("blocks", "shared"), ("loops", "triangles")],
    indirect=["kernels"],
)
def test_samples_follow_log_prob(kernels, name):
    """
    By a chi-squared test: 10,000 draws notice probabilities that are off by a tenth each. Draws
    equal those of the loop over nodes above, bit for bit, so each kernel needs one graph.
    """
    hood = GRAPHS[name]()
    alpha, logits = parameters(hood, 2)
    mask = torch.arange(hood.num_nodes) < 3
    q = EvidenceConditional(hood, alpha, logits, torch.randn(hood.num_nodes, 2), mask)
    value = everything(hood.restrict(mask), 2)
    draws = q.sample((10_000,))
    place = (draws.flatten(1)[:, None] == value.flatten(1)).all(-1)
    assert (place.sum(1) == 1).all()
    counts, expected = place.sum(0), q.log_prob(value).exp() * len(draws)
    keep = expected > 5
    statistic = ((counts - expected)[keep] ** 2 / expected[keep]).sum()
    rare = expected[~keep].sum()
    assert (counts[~keep].sum() - rare).abs() < 5 * (rare + 1).sqrt()
    assert chi2.sf(statistic, keep.sum() - 1) > 1e-4


class Field:
    """Three nodes, a Normal emission of unknown means, and leaf parameters."""

    def __init__(self):
        self.hood = to_hood(nx.path_graph(3))
        alpha, self.logits = parameters(self.hood, 2, scale=1.0)
        self.log_alpha, self.means = alpha.log(), torch.tensor([-0.5, 0.4])
        self.w = torch.tensor([-1.0, 0.3, 0.6])
        self.leaves = [self.log_alpha, self.logits, self.means]
        for leaf in self.leaves:
            leaf.requires_grad_()

    def evidence(self):
        return dist.Normal(self.means, 0.7).log_prob(self.w[:, None])

    def model(self, **options):
        pyro.param("known", torch.zeros(()))  # Trace_ELBO looks for a parameter before it derives
        y = nmm(self.hood, self.log_alpha.exp(), self.logits, **options)
        pyro.sample("w", dist.Normal(self.means[y], 0.7).to_event(1), obs=self.w)

    def guide(self, **options):
        arguments = self.hood, self.log_alpha.exp(), self.logits, self.evidence()
        evidence_guide(*arguments, **options)

    def loss(self):
        """The negative bound: a mean over orders, a sum over choices and labels."""
        given = self.hood, self.log_alpha.exp(), self.logits, self.evidence()
        return -expected_evidence_bound(*given)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "estimator", "collapsed"),
    [
        (TraceGraph_ELBO, "reward_to_go", False),
        (TraceGraph_ELBO, "reinforce", True),
        (Trace_ELBO, "reward_to_go", True),
        (Trace_ELBO, "reinforce", False),
    ],
)
def test_gradient(loss, estimator, collapsed):
    """20,000 draws notice a gradient that is off by 2 % of its length."""
    check_gradient(Field(), loss, estimator, collapsed)


@pytest.mark.slow
@pytest.mark.parametrize(("loss", "collapsed"), [(TraceGraph_ELBO, False), (Trace_ELBO, True)])
def test_gradient_of_one_step_credit(loss, collapsed):
    """What it leaves out is below 5 % of the gradient, of three nodes; noise is below 1 %."""
    field, elbo = Field(), loss(500, max_plate_nesting=0, vectorize_particles=True)
    model = partial(field.model, collapsed=collapsed)
    guide = partial(field.guide, collapsed=collapsed, estimator="one_step_credit")
    _, grads = gradients(elbo, model, guide, field.leaves, 40)
    truth = torch.cat([g.flatten() for g in torch.autograd.grad(field.loss(), field.leaves)])
    assert (grads.mean(0) - truth).norm() < 0.05 * truth.norm()


def test_one_step_credit_is_a_finite_difference(kernels):
    """The charge of a draw: what later terms lose when its count is taken away."""
    hood = shared_sources()
    alpha, logits = parameters(hood, 3)
    evidence = torch.randn(5, 3)
    order = torch.randperm(5)
    q = EvidenceConditional(hood, alpha, logits, evidence, None, order, "one_step_credit")
    draw = q._draw(torch.Size([4]))
    terms = q._flat(torch.Size([4]))
    predicted = latent_predictive(q.rows, terms, draw)[0]
    credits = q._costs(draw, predicted)
    attention = hood.softmax(logits)
    for b in range(4):
        pairs = list(
            zip(q.rows.source[draw.edges[b]].tolist(), draw.labels[b].tolist(), strict=True)
        )

        def log_g(place, without=None, pairs=pairs):
            node, counts = order[place], torch.zeros_like(alpha)
            for earlier in range(place):
                if earlier != without:
                    counts[pairs[earlier]] += 1
            row = slice(hood.ptr[node], hood.ptr[node + 1])
            mean = (alpha + counts) / (alpha + counts).sum(1, keepdim=True)
            mean = mean[hood.source[row]]
            return (attention[row] @ (mean @ evidence[node].exp())).log()

        for i in range(5):
            change = [log_g(later) - log_g(later, i) for later in range(i + 1, 5)]
            torch.testing.assert_close(credits[b, i], sum(change, torch.zeros(())))


def test_a_step_evaluates_its_draw_once(monkeypatch):
    """Density and score are asked for by two sites, of which one has the batch of the particles."""
    calls, values = [], EvidenceConditional._values
    monkeypatch.setattr(
        EvidenceConditional, "_values", lambda q, *draw: calls.append(q) or values(q, *draw)
    )
    elbo = TraceGraph_ELBO(4, max_plate_nesting=0, vectorize_particles=True)
    field = Field()
    model = partial(field.model, collapsed=True)
    elbo.loss_and_grads(model, partial(field.guide, collapsed=True, estimator="reward_to_go"))
    assert len(calls) == 1
