# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Concentrations given by a mean, against the table that they stand for."""

import pyro
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import surrogate
from pyro.ops.provenance import get_provenance, track_provenance
from scipy.stats import chisquare, logistic

from pyro_nmm import (
    ChosenLabels,
    GaussianConcentrations,
    LogisticConcentrations,
    Neighborhood,
    NeighborMixture,
    OrderedConditional,
    backend,
)
from pyro_nmm.guides import AmortizedNMM, FieldGuide, MixtureGuide, fit_mixture
from pyro_nmm.models import grid_edges, ising, nmm

KINDS = GaussianConcentrations, LogisticConcentrations
kinds = pytest.mark.parametrize("kind", KINDS)


def parameters(*shape, num_classes=4):
    mean = (num_classes * torch.rand(*shape)).requires_grad_()
    width = (0.5 + torch.rand(())).requires_grad_()
    scale = (0.5 + torch.rand(shape[-1])).requires_grad_()
    return mean, width, scale


@kinds
@pytest.mark.parametrize("loops", [True, False])
@given(
    mean=st.floats(-40, 300),
    width=st.floats(0.05, 60),
    scale=st.floats(0.01, 50),
    num_classes=st.sampled_from([2, 17, 40, 256]),
)
def test_sums(kind, loops, mean, width, scale, num_classes):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "compiled", backend.compiled if loops else None)
        check_sums(kind, mean, width, scale, num_classes)


def check_sums(kind, mean, width, scale, num_classes):
    alpha = kind(torch.tensor([mean]).double(), width, scale, num_classes)
    table = alpha.table()
    assert table.shape == alpha.shape
    torch.testing.assert_close(alpha.totals(), table.sum(-1), rtol=1e-12, atol=0)
    labels = torch.arange(num_classes)
    at = alpha.at(torch.zeros(num_classes, dtype=torch.long), labels)
    torch.testing.assert_close(at, table[0], rtol=1e-13, atol=0)


@kinds
def test_gradients(kind, kernels):
    mean, width, scale = parameters(2, 5)

    def totals(mean, width, scale):
        return kind(mean, width, scale, 7).totals()

    assert torch.autograd.gradcheck(totals, (mean, width, scale))
    widths = (0.5 + torch.rand(2, 1)).requires_grad_()
    assert torch.autograd.gradcheck(totals, (mean, widths, scale))


@kinds
@pytest.mark.parametrize("batch", [(), (3,)])
def test_conditional_of_a_table(kind, batch):
    """Draws, densities, bounds and gradients are those of the table."""
    hood = Neighborhood.grid(2, 3)
    mean, width, scale = parameters(*batch, 6)
    logits = torch.randn(hood.num_edges, requires_grad=True)
    y, order = torch.randint(4, (*batch, 6)), torch.randperm(6)
    alpha = kind(mean, width, scale, num_classes=4)
    inputs = (mean, width, scale, logits)
    results, c = [], None
    for given_alpha in (alpha, alpha.table()):
        q = OrderedConditional(hood, given_alpha, logits, y, order=order)
        torch.manual_seed(0)
        draw = q.sample((5,))
        c = draw if c is None else c
        assert torch.equal(draw, c)
        value = surrogate(
            OrderedConditional(hood, given_alpha, logits, y, None, order, "no_score"), c
        )
        results.append([q.log_prob(c), q.log_labels(c), value])
        results[-1] += torch.autograd.grad(value.sum(), inputs)
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.slow
@kinds
def test_mixture_of_a_patch(kind):
    """Every query is that of the table."""
    hood = Neighborhood.grid(2, 3)
    alpha, logits = kind(*parameters(6), 4), torch.randn(hood.num_edges)
    ours, theirs = (
        NeighborMixture(hood, alpha, logits),
        NeighborMixture(hood, alpha.table(), logits),
    )
    y, pairs = torch.tensor([0, 1, 1, 3, 2, 1]), torch.tensor([[0, 2], [1, 5]])
    observed = torch.tensor([True, True, False, False, True, False])
    for query in (
        lambda mixture: mixture.marginals(),
        lambda mixture: mixture.pairwise(pairs),
        lambda mixture: mixture.log_prob(y),
        lambda mixture: mixture.elbo(y, observed, 3),
        lambda mixture: mixture.entropy_bound(2),
        lambda mixture: mixture.log_likelihood(y),
        lambda mixture: mixture.condition(y, observed).marginals(),
        lambda mixture: mixture.condition(y, observed, 4).pairwise(pairs),
    ):
        results = []
        for mixture in (ours, theirs):
            torch.manual_seed(0)
            results.append(query(mixture))
        torch.testing.assert_close(*results)
    hood = Neighborhood.grid(2, 2)
    ours = NeighborMixture(hood, kind(*parameters(4), 4), torch.randn(hood.num_edges))
    images = torch.cartesian_prod(*[torch.arange(4)] * 4)
    assert ours.log_prob(images).exp().sum().item() == pytest.approx(1)


@kinds
def test_labels_given_choices(kind):
    """Draws from urns and densities, of all labels of four nodes, are those of the table."""
    mean, width, scale = parameters(2, 3, num_classes=3)
    alpha = kind(mean, width, scale, num_classes=3)
    choices = torch.tensor([[0, 0, 0, 2], [1, 0, 1, 0]])
    ours, theirs = ChosenLabels(alpha, choices), ChosenLabels(alpha.table(), choices)
    labels = torch.cartesian_prod(*[torch.arange(3)] * 4)[:, None]
    log_probs = ours.log_prob(labels), theirs.log_prob(labels)
    torch.testing.assert_close(*log_probs)
    grads = [torch.autograd.grad(t[5].sum(), (mean, width, scale)) for t in log_probs]
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other)
    draws = ours.sample((20_000,))
    assert draws.shape == (20_000, 2, 4)
    state = (draws * torch.tensor([27, 9, 3, 1])).sum(-1)
    for column, log_prob in zip(state.T, log_probs[0].T, strict=True):
        expected = 20_000 * log_prob.exp().detach()
        counts = torch.bincount(column, minlength=81)
        assert chisquare(counts.numpy(), expected.numpy()).pvalue > 1e-4


def test_labels_of_a_strip(monkeypatch):
    """Strips change nothing but memory; rare labels of the floor are drawn too."""
    alpha = GaussianConcentrations(torch.tensor([1.0, 6.0]), 1.0, num_classes=8, floor=0.05)
    nodes = torch.arange(2).repeat(20_000)
    monkeypatch.setattr("pyro_nmm.concentrations.STRIP", 7001)
    draws = alpha.draw(nodes).view(-1, 2)
    for node, probs in enumerate(alpha.table() / alpha.totals()[:, None]):
        counts = torch.bincount(draws[:, node], minlength=8)
        assert chisquare(counts.numpy(), (20_000 * probs).numpy()).pvalue > 1e-4


def test_program():
    """The collapsed program takes them, and its density is that of the table."""
    hood, logits = Neighborhood.grid(2, 3), torch.randn(14 + 6 + 8)
    alpha = GaussianConcentrations(*parameters(6), 4)
    assert logits.shape == (hood.num_edges,)
    trace = pyro.poutine.trace(nmm).get_trace(hood, alpha, logits, collapsed=True)
    sites = {name: trace.nodes[name]["value"] for name in ("c", "y")}
    replayed = pyro.condition(nmm, sites)
    other = pyro.poutine.trace(replayed).get_trace(hood, alpha.table(), logits, collapsed=True)
    torch.testing.assert_close(trace.log_prob_sum(), other.log_prob_sum())


@kinds
def test_gradients_of_a_latent_mean(kind):
    """As Pyro tracks it: nothing of the gradient is lost."""
    hood, y = Neighborhood.grid(1, 3), torch.tensor([1, 0, 3])
    mean, c = torch.tensor([1.0, 2.0, 3.0], requires_grad=True), torch.tensor([0, 1, 1])
    results = []
    for write in (lambda alpha: alpha, lambda alpha: alpha.table()):
        tracked = track_provenance(mean, frozenset({"mean"}))
        alpha = write(kind(tracked, 1.5, num_classes=4))
        q = OrderedConditional(hood, alpha, torch.zeros(hood.num_edges), y, order=torch.arange(3))
        results.append(torch.autograd.grad(q.log_labels(c).sum(), mean)[0])
        assert get_provenance(q.log_prob(c)) == {"mean"}
    assert torch.allclose(*results)


def test_logistic_is_that_of_scipy():
    """Masses of units, tails at the ends, digits far from the mean too."""
    alpha = LogisticConcentrations(torch.tensor([3.2]), 0.7, num_classes=40, floor=1e-300)
    edges, law = torch.arange(39).numpy() + 0.5, logistic(3.2, 0.7)
    below, above = law.cdf(edges[:3]), law.sf(edges[3:])
    expected = [below[0], *(below[1:] - below[:-1]), 1 - below[-1] - above[0]]
    expected += [*(above[:-1] - above[1:]), above[-1]]
    torch.testing.assert_close(alpha.table()[0], torch.tensor(expected), rtol=1e-10, atol=0)


@kinds
def test_single_precision(kind):
    mean = torch.tensor([0.0, 100.0, 255.0]).float().requires_grad_()
    alpha = kind(mean, 1.0, 1e-2)
    hood = Neighborhood.grid(1, 3)
    q = OrderedConditional(
        hood, alpha, torch.zeros(hood.num_edges).float(), torch.tensor([255, 0, 0])
    )
    bound = q.log_labels(q.sample()).sum()
    assert bound.isfinite()
    assert torch.autograd.grad(bound, mean)[0].isfinite().all()


class Means(torch.nn.Module):
    """A network whose alpha is a formula."""

    def __init__(self, hood, kind, num_classes):
        super().__init__()
        self.kind, self.num_classes = kind, num_classes
        self.mean = torch.nn.Parameter(torch.linspace(0, num_classes - 1, hood.num_nodes))
        self.width = torch.nn.Parameter(torch.tensor(0.8))
        self.logits = torch.nn.Parameter(torch.zeros(hood.num_edges))

    def forward(self, hood, *field):
        return self.kind(self.mean, self.width, 2.0, self.num_classes), self.logits


@kinds
def test_without_gradients(kind):
    mean, width, scale = parameters(3)
    alpha = kind(mean, width, scale, num_classes=4, floor=0.01)
    plain = alpha.detach()
    assert type(plain) is kind
    assert plain.floor == 0.01
    assert torch.equal(plain.table(), alpha.table())
    assert alpha.table().requires_grad
    assert not plain.table().requires_grad


@kinds
def test_queries_after_a_fit(kind):
    """Guides give their mixture without gradients, also of a network whose alpha is a formula."""
    hood, field = Neighborhood.grid(2, 2), ising(grid_edges(2, 2), 0.4, torch.zeros(4))
    network = Means(hood, kind, 2)
    expected = NeighborMixture(hood, network(hood)[0].table(), network.logits).marginals()
    for guide in (
        AmortizedNMM(hood, network),
        FieldGuide(hood, network, field),
        MixtureGuide(hood, network, lambda: None),
    ):
        mix = guide.mixture()
        assert type(mix.alpha) is kind
        assert not mix.table.requires_grad
        torch.testing.assert_close(mix.marginals(), expected.detach())


def test_fit_of_a_formula_to_a_field():
    hood, field = Neighborhood.grid(2, 2), ising(grid_edges(2, 2), 0.4, torch.tensor([0.8] * 4))
    network = Means(hood, LogisticConcentrations, 2)
    before = NeighborMixture(hood, network(hood)[0].table(), network.logits).marginals()
    mix, _ = fit_mixture(field, hood, network, num_steps=60, lr=0.1)
    truth = field.marginals()
    assert (mix.marginals() - truth).abs().sum() < 0.5 * (before - truth).abs().sum()
    assert not mix.marginals().requires_grad
