# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Edges that relabel, against sums over choices and moments in NumPy, also with zeros."""

from functools import partial

import networkx as nx
import pytest
import torch
from cases import KINDS, enumerated, joint_tables, matrices
from graphs import house, labellings, parameters, shared_sources, star, to_hood
from pyro.infer import TraceGraph_ELBO
from scipy.stats import chisquare
from torch.autograd import grad

from pyro_nmm import EvidenceConditional, NeighborMixture
from pyro_nmm.guides import AmortizedNMM, FieldGuide, MixtureGuide, density
from pyro_nmm.models import FreeNMM, ising

GRAPHS = {"star": partial(star, 3), "house": house, "shared": shared_sources}
GRAPHS |= {"path": lambda: to_hood(nx.path_graph(4))}


def case(name, kind, size=2):
    hood = GRAPHS[name]()
    alpha, logits = parameters(hood, size, scale=1.0)
    return NeighborMixture(hood, alpha, logits, KINDS[kind](hood, size))


@pytest.mark.parametrize(
    ("name", "size", "kind"),
    [("star", 2, "matrices"), ("shared", 2, "permutations"), ("path", 3, "matrices")],
)
def test_distribution(name, size, kind):
    """Likelihood, marginals, pairs, small sets and samples."""
    mix = case(name, kind, size)
    labels, probs = enumerated(mix)
    joint = joint_tables(labels, probs)
    marginals = joint.diagonal().sum(0).T
    torch.testing.assert_close(mix.log_prob(labels).exp(), probs)
    torch.testing.assert_close(mix.marginals(), marginals)
    pairs = torch.tensor([[0, 1, 2, 3, 3], [1, 2, 3, 0, 3]])
    torch.testing.assert_close(mix.pairwise(pairs), joint[tuple(pairs)])
    found = mix.log_marginal(torch.tensor([2, 0]), labellings(2, size)).exp()
    torch.testing.assert_close(found, joint[2, 0].flatten())
    counts = (mix.sample((40_000,))[:, None] == labels).all(-1).sum(0)
    assert chisquare(counts, 40_000 * probs).pvalue > 1e-4


def test_batch_of_matrices():
    hood = GRAPHS["path"]()
    alpha, logits = parameters(hood, 2, (3,))
    relabel = matrices(hood, 2, (3,))
    mix = NeighborMixture(hood, alpha, logits, relabel)
    pairs, y = torch.tensor([[0, 1], [2, 2]]), labellings(4)
    single = [NeighborMixture(hood, *part) for part in zip(alpha, logits, relabel, strict=True)]
    for b, one in enumerate(single):
        torch.testing.assert_close(mix.marginals()[b], one.marginals())
        torch.testing.assert_close(mix.pairwise(pairs)[b], one.pairwise(pairs))
        torch.testing.assert_close(mix.log_prob(y[:, None])[:, b], one.log_prob(y))
    means = mix.sample((20_000,)).double().mean(0)
    assert (means - mix.marginals()[..., 1]).abs().max() < 0.02
    assert mix.elbo(y[5], num_samples=7).shape == (7, 3)


def test_edges_that_keep_labels_change_nothing():
    hood = house()
    parts, y = parameters(hood, 3), torch.randint(3, (5,))
    plain, mix = (
        NeighborMixture(hood, *parts, relabel)
        for relabel in (None, torch.eye(3).expand(hood.num_edges, -1, -1))
    )
    torch.testing.assert_close(mix.log_prob(y), plain.log_prob(y))
    torch.testing.assert_close(mix.marginals(), plain.marginals())


@pytest.mark.parametrize("kind", KINDS)
def test_likelihood_estimates(kind):
    """The bound below, and weighted draws at, the exact value; conditional too."""
    mix = case("house", kind)
    y = torch.tensor([0, 1, 1, 0, 1])
    exact = mix.log_prob(y)
    bound = mix.elbo(y, num_samples=4000)
    weights = (bound - exact).exp()
    assert abs(weights.mean() - 1) < 4 * weights.std() / 4000**0.5
    assert abs(mix.log_likelihood(y, num_particles=20_000) - exact) < 0.03
    given, first = torch.tensor([True, False, True, False, False]), torch.tensor([0, 2])
    rest = mix.log_likelihood(y, given=given, num_particles=20_000)
    assert abs(rest - (exact - mix.log_marginal(first, y[first]))) < 0.03
    unseen = y.where(given, -1)  # never read
    assert mix.elbo(unseen, given).isfinite().all()


class Swaps:
    """Edges of a path that keep three labels, or swap the first two, with a learned weight."""

    def __init__(self):
        torch.manual_seed(0)
        self.hood = to_hood(nx.path_graph(3))
        self.alpha, self.logits = parameters(self.hood, 3, scale=0.5)
        self.y, self.weight = torch.tensor([0, 1, 2]), torch.tensor(0.3, requires_grad=True)

    def mixture(self, weight):
        share, keep = weight.sigmoid(), torch.eye(3)
        mean = share * keep + (1 - share) * keep[[1, 0, 2]]
        relabel = mean.expand(self.hood.num_edges, 3, 3)
        return NeighborMixture(self.hood, self.alpha, self.logits, relabel)

    def check(self, value):
        """The gradient of a function of the weight is its central difference."""
        (found,) = grad(value(self.weight), self.weight)
        step, at = 1e-5, self.weight.detach()
        expected = (value(at + step) - value(at - step)) / (2 * step)
        assert expected != 0
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-8)


def test_gradients_of_matrices(kernels):
    swaps, some, order = Swaps(), torch.tensor([0, 2]), torch.tensor([1, 2, 0])
    swaps.check(lambda weight: swaps.mixture(weight).log_prob(swaps.y))
    swaps.check(lambda weight: swaps.mixture(weight).log_marginal(some, swaps.y[some]))
    value = swaps.mixture(swaps.weight).in_order(swaps.y, order=order).sample((20,))

    def bound(weight):
        q = swaps.mixture(weight).in_order(swaps.y, order=order)
        return q.log_terms(value).sum() + q.log_prob(value).sum().sin()

    swaps.check(bound)


def test_zeros_are_impossible_still():
    """A label that no edge makes of any other has probability zero, and is no NaN."""
    swaps = Swaps()
    never = torch.tensor([0.5, 0.5, 0.0]).expand(swaps.hood.num_edges, 3, 3)
    mix = NeighborMixture(swaps.hood, swaps.alpha, swaps.logits, never)
    assert mix.log_prob(swaps.y) == -torch.inf
    torch.testing.assert_close(mix.log_prob(torch.tensor([0, 1, 0])).exp(), torch.tensor(1 / 8))


class Flipping(FreeNMM):
    """Its third output turns every label round."""

    def forward(self, hood):
        return *super().forward(hood), torch.eye(2).flip(0).expand(hood.num_edges, 2, 2)


@pytest.mark.parametrize("kind", [MixtureGuide, FieldGuide])
def test_families_with_a_network_that_relabels(kind):
    """A third output is for edges that keep labels alone."""
    hood = to_hood(nx.path_graph(2))
    field = ising(torch.tensor([[0], [1]]), 0.1, torch.zeros(2))
    target = field if kind is FieldGuide else density(field.log_potential, 2, 2)
    with pytest.raises(ValueError, match="edges that keep labels"):
        kind(hood, Flipping(hood, 2), target).guide()


def test_network_that_relabels():
    """A third output of a network goes through model, guide and queries."""
    hood = to_hood(nx.path_graph(3))
    program = AmortizedNMM(hood, Flipping(hood, 2))
    elbo = TraceGraph_ELBO(4, vectorize_particles=True, max_plate_nesting=0)
    y = torch.tensor([0, 1, 0])
    assert elbo.loss_and_grads(program.model, program.guide, y=y) > 0
    assert program.mixture().relabel.shape == (7, 2, 2)


def test_evidence_of_edges():
    """
    With the evidence that a refusal names for hints at nodes' own labels, the estimate is the
    probability of the hints, a sum over all labels; evidence of edges alone keeps its posterior.
    """
    mix = case("path", "matrices")
    hints = torch.randn(4, 2)
    evidence = (mix.relabel.log() + hints[mix.hood.target][:, None]).logsumexp(-1)
    y = labellings(4)
    truth = (mix.log_prob(y) + hints[torch.arange(4), y].sum(-1)).logsumexp(0)
    found = mix.latents(evidence).log_likelihood(num_particles=20_000)
    assert (found - truth).abs() < 0.03
    q = EvidenceConditional(mix.hood, mix.alpha, mix.logits, evidence)
    assert q.posterior().marginals().isfinite().all()


KEEPS = "is for edges that keep labels: leave out relabel"


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda mix, y: mix.choices(y), f"choices {KEEPS}"),
        (lambda mix, y: mix.given(y), f"given {KEEPS}"),
        (lambda mix, y: mix.entropy_bound(), f"entropy_bound {KEEPS}"),
        (lambda mix, y: mix.prior(4).predict(method="sequential"), "edges that keep labels"),
        # It was read as evidence of the borrowed label: .0556 in place of .0129.
        (lambda mix, y: mix.latents(torch.zeros(4, 2)), "of nodes' own labels, .* use condition"),
        (lambda mix, y: mix.latents(torch.zeros(3, 4, 2)), "evidence .* nodes' own labels"),
        # A posterior of borrowed labels gave .4639 for a label of probability .1902.
        *((lambda mix, y, o=options: mix.in_order(y).expand(()).posterior(**o),
           r"borrowed labels.*NeighborMixture\.condition")
          for options in ({}, {"num_samples": 3}, {"num_samples": 3, "num_sweeps": 2})),
    ],
)  # fmt: skip
def test_what_edges_that_relabel_refuse(call, match):
    with pytest.raises(ValueError, match=match):
        call(case("path", "matrices"), torch.zeros(4, dtype=torch.long))
