# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Sources that are no nodes: who reaches whom, and what is refused."""

import itertools

import networkx as nx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pyro_nmm import sources


def edges(hood):
    return set(zip(hood.source.tolist(), hood.target.tolist(), strict=True))


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 5), st.integers(0, 3))
def test_grid(height, width, stride, more):
    radius = stride + more
    hood = sources.grid(height, width, stride, radius)
    across, down = -(-width // stride), -(-height // stride)
    assert hood.num_sources == across * down
    places = [
        [(size - 1 - stride * (number - 1)) // 2 + stride * k for k in range(number)]
        for size, number in ((height, down), (width, across))
    ]
    assert edges(hood) == {
        (a * across + b, y * width + x)
        for a, above in enumerate(places[0])
        for b, left in enumerate(places[1])
        for y in range(height)
        for x in range(width)
        if abs(y - above) <= radius and abs(x - left) <= radius
    }


@pytest.mark.parametrize("radius", [3.0, 3.7])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_points(dims, radius):
    """A node whose nearest lattice point is half a cell away reaches one step further."""
    positions = 5 * torch.randn(40, dims)
    hood, places = sources.points(positions, radius, spacing=2.0)
    assert hood.num_nodes == 40
    assert hood.num_sources == len(places) == len(places.unique(dim=0))
    torch.testing.assert_close(places / 2, (places / 2).round())
    near = (positions[hood.target] - places[hood.source]).norm(dim=-1)
    assert (near <= radius + 1e-9).all()
    # Every lattice point in reach is a source.
    cells = torch.arange(-20, 21).double() * 2
    lattice = torch.cartesian_prod(*[cells] * dims).view(-1, dims)
    assert hood.num_edges == int((torch.cdist(positions, lattice) <= radius).sum())


@pytest.mark.parametrize(("radius", "spacing"), [(2, 0), (1, 1), (2, 1), (3, 2), (4, 4)])
def test_hops(radius, spacing):
    """Against all shortest paths: sources that are apart, and that reach everyone."""
    graph = nx.gnp_random_graph(50, 0.06, seed=radius)
    edge_index = torch.tensor(list(graph.edges)).T
    hood, distance = sources.hops(edge_index, 50, radius, spacing)
    paths = dict(nx.all_pairs_shortest_path_length(graph))
    own = distance == 0
    place = hood.row[own][hood.source[own].argsort()].tolist()  # the node of every source
    assert len(place) == hood.num_sources
    assert all(paths[a].get(b, 99) > spacing for a, b in itertools.permutations(place, 2))
    found = zip(hood.source.tolist(), hood.row.tolist(), distance.tolist(), strict=True)
    assert set(found) == {
        (j, i, hops)
        for j, node in enumerate(place)
        for i, hops in paths[node].items()
        if hops <= radius
    }
    # No more could be added.
    assert all(min(paths[i].get(node, 99) for node in place) <= spacing for i in range(50))


@given(st.integers(1, 9), st.integers(0, 2**16))
def test_walks(num_nodes, seed):
    """Against the dense matrix; edges may repeat, and join a node with itself."""
    rng = torch.Generator().manual_seed(seed)
    edge_index = torch.randint(num_nodes, (2, 2 * num_nodes), generator=rng)
    membership = torch.randint(3, (num_nodes,), generator=rng)
    near = torch.eye(num_nodes, dtype=torch.double)
    near[edge_index[0], edge_index[1]] = near[edge_index[1], edge_index[0]] = 1.0
    groups = torch.nn.functional.one_hot(membership).double()
    expected = near / near.sum(1, keepdim=True) @ groups
    hood, feature = sources.walks(edge_index, num_nodes, membership)
    found = torch.zeros_like(expected)
    found[hood.target, hood.source] = feature.exp().double()
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    assert hood.num_sources == groups.shape[1]
    assert hood.num_edges == int((expected > 0).sum())
