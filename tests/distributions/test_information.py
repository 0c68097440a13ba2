# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Information gain from random partners: against all pairs, and against enumeration."""

import networkx as nx
import pytest
import torch
from graphs import house, parameters, random_sources, to_hood, two_triangles

from pyro_nmm import Neighborhood, NeighborMixture
from pyro_nmm.ops.partners import all_partners, draw_partners


def lone_nodes():
    """Node 0 shares a source with 1, node 2 with no node; an attention of zero is among them."""
    return Neighborhood(torch.tensor([[0, 1, 0, 2, 3], [0, 0, 1, 2, 3]]), 4, 4)


HOODS = {
    "house": house,
    "two components": two_triangles,
    "sources that are no nodes": lambda: random_sources(6, 3),
    "lone nodes": lone_nodes,
}


@pytest.mark.parametrize("make", HOODS.values(), ids=HOODS)
@pytest.mark.parametrize("num_free", [None, 3])
def test_partners_are_drawn_by_their_chance(make, num_free):
    """Every pair is found, and scales have mean one: five standard deviations of a binomial."""
    torch.manual_seed(0)
    hood, number = make(), 20_000
    alpha, logits = parameters(hood, 2)
    logits[hood.ptr[hood.ptr.diff().argmax()]] = -torch.inf
    attention, total = hood.softmax(logits).double(), alpha.sum(-1)
    free = torch.arange(hood.num_nodes) < (num_free or hood.num_nodes)
    nodes = free.nonzero()[:, 0].flip(0)
    pairs, scale = draw_partners(hood, nodes, attention, total, free, number)
    expected, _ = all_partners(hood, nodes, free)
    assert set(map(tuple, pairs.T.tolist())) == set(map(tuple, expected.T.tolist()))
    assert pairs.unique(dim=1).shape == pairs.shape

    weight = (0.9 * attention + 0.1 / hood.ptr.diff()[hood.row]) / (1 + total[hood.source]).sqrt()
    dense = torch.zeros(hood.num_nodes, hood.num_sources, dtype=torch.double)
    dense[hood.target, hood.source] = weight * free[hood.target]
    chance = (dense @ dense.T).fill_diagonal_(0)
    chance = (chance / chance.sum(-1, keepdim=True))[pairs[0], pairs[1]]
    spread = ((1 - chance) / (number * chance)).sqrt()
    assert ((scale - 1).abs() <= 5 * spread + 1e-9).all()


def posterior_of(kind):
    torch.manual_seed(1)
    hood, more = house(), {}
    alpha, logits = 0.5 * torch.rand(5, 2) + 0.1, torch.randn(hood.num_edges)
    if kind == "evidence":
        return NeighborMixture(hood, alpha, logits).latents(torch.randn(5, 2)).posterior()
    if kind == "relabel":
        matrices = torch.eye(2) + 0.3 * torch.rand(hood.num_edges, 2, 2)
        more["relabel"] = matrices / matrices.sum(-1, keepdim=True)
    mix = NeighborMixture(hood, alpha, logits, **more)
    return mix.condition(torch.ones(5).long(), torch.arange(5) == 1)


@pytest.mark.parametrize("kind", ["one label", "relabel", "evidence"])
def test_many_partners_give_the_sum_over_all_pairs(kind):
    """Within 5 % of the sum of mutual information, for every node."""
    posterior = posterior_of(kind)
    exact = posterior.information_gain()
    entropy = torch.special.entr(posterior.marginals()).sum(-1)
    found = posterior.information_gain(num_partners=4000)
    assert ((found - exact).abs() <= 0.05 * (exact - entropy) + 1e-5).all()
    assert (exact - entropy).max() > 0.01
    nodes = torch.tensor([3, 0, 1])
    some = posterior.information_gain(nodes, num_partners=4000)
    torch.testing.assert_close(exact[nodes], posterior.information_gain(nodes))
    assert ((some - exact[nodes]).abs() <= 0.05 * (exact - entropy)[nodes] + 1e-5).all()


def shared_sources(num_nodes, num_sources):
    """Three sources for each node: of the closest among some on a ring."""
    first = torch.randint(num_sources, (num_nodes,))
    sources = (first[:, None] + torch.arange(3)) % num_sources
    edges = torch.stack([sources.flatten(), torch.arange(num_nodes).repeat_interleave(3)])
    return Neighborhood(edges, num_nodes, num_sources)


GRAPHS = {
    "hubs": lambda: to_hood(nx.barabasi_albert_graph(300, 4, seed=0)),
    "shared sources": lambda: shared_sources(300, 12),
}


@pytest.mark.parametrize("make", GRAPHS.values(), ids=GRAPHS)
def test_few_partners_estimate_the_sum(make):
    """Of 32 partners: mean error below 20 % of the sum, and sums without bias within 2 %."""
    torch.manual_seed(0)
    hood = make()
    alpha = 0.5 * (2 * torch.randn(hood.num_sources, 3)).softmax(-1) + 0.01
    mix = NeighborMixture(hood, alpha, torch.randn(hood.num_edges))
    posterior = mix.condition(mix.sample(), torch.rand(300) < 0.1, num_samples=16)
    sums = posterior.information_gain() - torch.special.entr(posterior.marginals()).sum(-1)
    draws = torch.stack([posterior.information_gain(num_partners=32) for _ in range(8)])
    found = draws - torch.special.entr(posterior.marginals()).sum(-1)
    assert (found - sums).abs().mean() < 0.2 * sums.mean()
    torch.testing.assert_close(found.mean(), sums.mean(), rtol=0.02, atol=0)


def test_nodes_without_partners_have_their_entropy():
    hood = lone_nodes()
    mix = NeighborMixture(hood, torch.full((4, 2), 0.5), torch.zeros(hood.num_edges))
    y = torch.zeros(4, dtype=torch.long)
    posterior = mix.condition(y, torch.arange(4) == 0)
    # Node 1 shares a source with the observed node only, and its marginal is (3/4, 1/4) or so.
    entropy = torch.special.entr(posterior.marginals()).sum(-1)
    torch.testing.assert_close(posterior.information_gain(num_partners=3), entropy)
    every = mix.condition(y)
    assert torch.equal(every.information_gain(num_partners=3), torch.zeros(4))


def test_draws_follow_the_random_seed():
    posterior = posterior_of("one label")
    torch.manual_seed(5)
    first = posterior.information_gain(num_partners=2)
    torch.manual_seed(5)
    assert torch.equal(posterior.information_gain(num_partners=2), first)
