# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Edges that relabel, against sums over choices and moments in NumPy, also with zeros."""

from functools import partial

import networkx as nx
import pyro
import pytest
import torch
from cases import KINDS, enumerated, joint_tables, matrices
from graphs import house, labellings, parameters, shared_sources, star, to_hood
from pyro.infer import TraceGraph_ELBO
from scipy.stats import chisquare
from torch.autograd import grad

from pyro_nmm import EvidenceConditional, NeighborMixture, OrderedConditional
from pyro_nmm.guides import ordered_guide
from pyro_nmm.models import StackedNMM, nmm
from pyro_nmm.relabel import as_channel

GRAPHS = {"star": partial(star, 3), "house": house, "shared": shared_sources}
GRAPHS |= {"path": lambda: to_hood(nx.path_graph(4))}


def case(name, kind, size=2):
    hood = GRAPHS[name]()
    alpha, logits = parameters(hood, size, scale=1.0)
    return NeighborMixture(hood, alpha, logits, KINDS[kind](hood, size))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("name", "size"), [("star", 2), ("shared", 2), ("path", 2), ("path", 3)])
def test_distribution(name, size, kind):
    """Likelihood, marginals, pairs and small sets."""
    mix = case(name, kind, size)
    labels, probs = enumerated(mix)
    joint = joint_tables(labels, probs)
    marginals = joint.diagonal().sum(0).T
    torch.testing.assert_close(mix.log_prob(labels).exp(), probs)
    torch.testing.assert_close(mix.marginals(), marginals)
    alone = marginals[torch.arange(len(marginals)), labels[1]].log()
    torch.testing.assert_close(mix.node_log_probs(labels[1]), alone)
    pairs = torch.tensor([[0, 1, 2, 3, 3], [1, 2, 3, 0, 3]])
    torch.testing.assert_close(mix.pairwise(pairs), joint[tuple(pairs)])
    found = mix.log_marginal(torch.tensor([2, 0]), labellings(2, size)).exp()
    torch.testing.assert_close(found, joint[2, 0].flatten())


@pytest.mark.parametrize("kind", KINDS)
def test_samples(kind):
    """With a batch of matrices too, and per draw."""
    mix = case("path", kind)
    labels, probs = enumerated(mix)
    counts = (mix.sample((40_000,))[:, None] == labels).all(-1).sum(0)
    assert chisquare(counts, 40_000 * probs).pvalue > 1e-4
    if kind == "permutations":
        c = torch.tensor([[1, 0, 2, 2], [0, 1, 1, 3]])
        q = mix.given(c)
        probs = q.log_prob(labels[:, None]).exp()
        torch.testing.assert_close(probs.sum(0), torch.ones(2))
        counts = (q.sample((30_000,)) == labels[:, None, None]).all(-1).sum(1)
        assert (chisquare(counts, 30_000 * probs).pvalue > 1e-4).all()


def test_a_permutation_and_its_inverse():
    """Of three labels in a circle, which is not its own inverse."""
    circle = as_channel(torch.tensor([[1, 2, 0]]))
    borrowed, shown = torch.tensor([[0], [1], [2]]), torch.tensor([[1], [2], [0]])
    assert torch.equal(circle.show(borrowed), shown)
    assert torch.equal(circle.borrow(shown), borrowed)
    probs = torch.tensor([[0.5, 0.3, 0.2]])
    torch.testing.assert_close(circle.push(probs), torch.tensor([[0.2, 0.5, 0.3]]))


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
    assert mix.sample((4,)).shape == (4, 3, 4)
    means = mix.sample((20_000,)).double().mean(0)
    assert (means - mix.marginals()[..., 1]).abs().max() < 0.02
    assert mix.elbo(y[5], num_samples=7).shape == (7, 3)


def test_edges_that_keep_labels_change_nothing():
    """The identity, as a permutation bit for bit."""
    hood = house()
    alpha, logits = parameters(hood, 3)
    y, order = torch.randint(3, (5,)), torch.randperm(5)
    keep = torch.arange(3).expand(hood.num_edges, -1)
    values = []
    for relabel in (None, keep):
        torch.manual_seed(1)
        q = OrderedConditional(hood, alpha, logits, y, order=order, relabel=relabel)
        c = q.sample((20,))
        values.append([c, q.log_prob(c), q.log_terms(c), q.borrowed(c)])
    assert all(map(torch.equal, *values))
    plain = NeighborMixture(hood, alpha, logits)
    for relabel in (keep, torch.eye(3).expand(hood.num_edges, -1, -1)):
        mix = NeighborMixture(hood, alpha, logits, relabel)
        torch.testing.assert_close(mix.log_prob(y), plain.log_prob(y))
        torch.testing.assert_close(mix.marginals(), plain.marginals())


@pytest.mark.parametrize("kind", KINDS)
def test_likelihood_estimates(kind):
    """The bound below, and sequential Monte Carlo at, the exact value; conditional too."""
    mix = case("house", kind)
    y = torch.tensor([0, 1, 1, 0, 1])
    exact = mix.log_prob(y)
    bound = mix.elbo(y, num_samples=4000)
    assert bound.mean() < exact + 4 * bound.std() / 4000**0.5
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

    def relabel(self, weight):
        share, keep = weight.sigmoid(), torch.eye(3)
        mean = share * keep + (1 - share) * keep[[1, 0, 2]]
        return mean.expand(self.hood.num_edges, 3, 3)

    def mixture(self, weight):
        return NeighborMixture(self.hood, self.alpha, self.logits, self.relabel(weight))

    def check(self, value, rtol=1e-5):
        """The gradient of a function of the weight is its central difference."""
        (found,) = grad(value(self.weight), self.weight)
        step, at = 1e-5, self.weight.detach()
        expected = (value(at + step) - value(at - step)) / (2 * step)
        assert expected != 0
        torch.testing.assert_close(found, expected, rtol=rtol, atol=1e-8)


def test_enumeration():
    swaps, some = Swaps(), torch.tensor([0, 2])
    swaps.check(lambda weight: swaps.mixture(weight).log_prob(swaps.y))
    swaps.check(lambda weight: swaps.mixture(weight).log_marginal(some, swaps.y[some]))


def test_zeros_are_impossible_still():
    """A label that no edge makes of any other has probability zero, and is no NaN."""
    swaps = Swaps()
    never = torch.tensor([0.5, 0.5, 0.0]).expand(swaps.hood.num_edges, 3, 3)
    mix = NeighborMixture(swaps.hood, swaps.alpha, swaps.logits, never)
    assert mix.log_prob(swaps.y) == -torch.inf
    torch.testing.assert_close(mix.log_prob(torch.tensor([0, 1, 0])).exp(), torch.tensor(1 / 8))


def test_terms_of_the_bound(kernels):
    swaps, order = Swaps(), torch.tensor([1, 2, 0])
    value = swaps.mixture(swaps.weight).in_order(swaps.y, order=order).sample((20,))

    def bound(weight):
        evidence = swaps.mixture(weight).parameters.evidence(swaps.y)
        arguments = swaps.hood, swaps.alpha, swaps.logits, evidence
        q = EvidenceConditional(*arguments, order=order)
        return q.log_terms(value).sum() + q.log_prob(value).sum().sin()

    swaps.check(bound)
    (found,) = grad(swaps.mixture(swaps.weight).elbo(swaps.y, num_samples=5).sum(), swaps.weight)
    assert found.isfinite()


@pytest.mark.parametrize("collapsed", [False, True])
def test_pyro_loss(kernels, collapsed):
    swaps, options = Swaps(), {"collapsed": collapsed}
    given = swaps.hood, swaps.alpha, swaps.logits, swaps.y

    def model():
        nmm(*given, relabel=swaps.relabel(swaps.weight), **options)

    def guide():
        ordered_guide(*given, relabel=swaps.relabel(swaps.weight), **options)

    pyro.set_rng_seed(0)
    elbo = TraceGraph_ELBO(50, max_plate_nesting=0, vectorize_particles=True)
    elbo.loss_and_grads(model, guide)
    assert swaps.weight.grad.isfinite()
    assert swaps.weight.grad != 0


def test_stacked_compatibility_with_a_zero():
    """A matrix that rules out a label for a neighbour is fitted as any other."""
    torch.manual_seed(0)
    hood, y = to_hood(nx.cycle_graph(30)), torch.arange(30) % 3
    matrix = torch.tensor([[0.2, 0.8, 0.0], [0.3, 0.2, 0.5], [0.5, 0.5, 0.0]])
    stacked = StackedNMM(3, compatibility=matrix)
    train = torch.arange(30) < 10
    stacked.fit(hood, torch.randn(30, 3), y, train, ~train, num_steps=5)
    assert all(number.isfinite().all() for number in stacked.parameters())
