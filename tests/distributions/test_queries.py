# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Counts of labels in sets of nodes, shapes of queries, and queries of no draws."""

import itertools

import pytest
import torch
from cases import mask
from graphs import house
from scipy.stats import chisquare

from pyro_nmm import NeighborMixture

EVERY = torch.tensor(list(itertools.product(range(2), repeat=3)))


def test_counts_in_sets():
    """Their distribution is that of the enumeration; sets may overlap, and be ids or masks."""
    hood = house()
    mix = NeighborMixture(hood, 0.5 * torch.rand(5, 2) + 0.1, torch.randn(hood.num_edges))
    posterior = mix.condition(torch.tensor([0, 1, 0, 0, 0]), mask(1))
    sets = [torch.tensor([0, 2, 4]), torch.tensor([0, 1, 0, 0, 1]).bool(), torch.tensor([1])]
    torch.manual_seed(0)
    draws = posterior.counts(sets, label=1, num_samples=4000)
    same = [sets[0].tolist(), sets[1].long(), sets[2].numpy()]
    torch.manual_seed(0)
    assert torch.equal(posterior.counts(same, label=1, num_samples=4000), draws)
    assert draws.shape == (4000, 3)
    assert (draws[:, 2] == 1).all()
    exact = posterior.log_marginal(sets[0], EVERY).exp()
    expected = torch.zeros(4).index_add(0, EVERY.sum(-1), exact)
    assert chisquare(draws[:, 0].bincount(minlength=4), 4000 * expected).pvalue > 1e-3
    # Joint, so that labels which are alike make counts wider than independent ones would be.
    zeros = posterior.counts(sets, label=0, num_samples=10)
    assert (zeros[:, 2] == 0).all()


@pytest.mark.parametrize("kind", ["keep", "matrices"])
@pytest.mark.parametrize("batch", [(), (2,)])
def test_no_draws_at_all(batch, kind):
    """They are empty, of the shape that any number of them has, and so are their densities."""
    hood, nodes = house(), torch.tensor([0, 2])
    ways = {"keep": None, "matrices": torch.full((hood.num_edges, 2, 2), 0.5)}
    alpha = torch.ones(*batch, 5, 2, requires_grad=True)
    mix = NeighborMixture(hood, alpha, torch.zeros(hood.num_edges), ways[kind])
    for shape in ((0,), (3, 0)):
        draws = mix.sample(shape)
        assert draws.shape == (*shape, *batch, 5)
        assert draws.dtype == torch.long
        for found in (mix.log_prob(draws), mix.log_marginal(nodes, draws[..., nodes])):
            assert found.shape == (*shape, *batch)
        found.sum().backward()
        assert torch.equal(alpha.grad, torch.zeros_like(alpha))
        if kind != "matrices":
            law = mix.given(draws)
            assert law.sample().shape == draws.shape
            assert law.log_prob(draws).shape == (*shape, *batch)
    assert mix.expand((0, *batch)).log_prob(torch.zeros(5)).shape == (0, *batch)
