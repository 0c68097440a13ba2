# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Gradients where edges never turn one label into another: learned means of permutations."""

import networkx as nx
import pyro
import pytest
import torch
from graphs import parameters, to_hood
from pyro.infer import TraceGraph_ELBO
from torch.autograd import grad

from pyro_nmm import EvidenceConditional, NeighborMixture
from pyro_nmm.guides import ordered_guide
from pyro_nmm.models import StackedNMM, nmm


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
        return q.log_evidence(value).sum() + q.log_prob(value).sum().sin()

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
