# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Neighbourhoods whose sources are places that many nodes share, which correlates their labels."""

import itertools

import torch
from torch import Tensor

from pyro_nmm.arguments import (
    Array,
    Device,
    as_edge_index,
    as_expected,
    check_finite,
    check_integers,
    expect_all,
)
from pyro_nmm.neighborhood import Neighborhood
from pyro_nmm.sparse import sparse_coo

__all__ = ["grid", "hops", "points", "walks"]


def grid(
    height: int, width: int, stride: int, radius: int | None = None, device: Device | None = None
) -> Neighborhood:
    """Pixels of a ``height x width`` image, and sources on every ``stride``-th row and column of
    them, centred; both in row-major order. Cost: linear in the edges.

    >>> grid(6, 6, stride=3)
    Neighborhood(num_nodes=36, num_sources=4, num_rows=36, num_edges=100)

    :param int radius: A pixel reaches sources at most so many rows and columns away. Default
        ``stride``: two or three sources in each direction, one at the border.
    :raises ValueError: for a size below one, and a ``radius`` at which a pixel reaches no source.
    """
    radius = stride if radius is None else radius
    check_integers(1, height=height, width=width, stride=stride)
    check_integers(0, radius=radius)
    axes = [_near(size, stride, radius, device) for size in (height, width)]
    (rows, above, _), (columns, left, across) = axes
    # Every pair of a row's edge with a column's edge is an edge of the pixel.
    source = (above[:, None] * across + left).flatten()
    pixel = (rows[:, None] * width + columns).flatten()
    return Neighborhood(torch.stack([source, pixel]), height * width, axes[0][2] * across)


def _near(size: int, stride: int, radius: int, device) -> tuple[Tensor, Tensor, int]:
    """Along one axis: pairs of a place and a source in its reach, and the number of sources."""
    number = -(-size // stride)
    first = (size - 1 - stride * (number - 1)) // 2
    place, source = (torch.arange(n, device=device) for n in (size, number))
    gap = (place[:, None] - first - stride * source).abs()
    if int(gap.amin(1).max()) > radius:
        raise ValueError(f"radius={radius} reaches no source from everywhere at stride={stride}")
    near, source = (gap <= radius).nonzero().unbind(1)
    return near, source, number


def points(positions: Array, radius: float, spacing: float) -> tuple[Neighborhood, Tensor]:
    r"""Nodes at points in space, and sources on a square lattice, with the places ``(M, D)`` of
    these. Cost: :math:`O(N (2 \, \text{radius} / \text{spacing} + 1)^D)`.

    >>> hood, places = points(torch.tensor([[0.0, 0.0], [1.0, 0.0], [5.0, 0.0]]), 2.0, 2.0)
    >>> hood, tuple(places.shape)
    (Neighborhood(num_nodes=3, num_sources=7, num_rows=3, num_edges=9), (7, 2))

    :param Tensor positions: ``(N, D)`` coordinates.
    :param float radius: A node reaches the sources at most this far away. At least half of the
        diagonal of a lattice cell, so that it reaches one.
    :param float spacing: from one source to the next along each axis.
    :raises ValueError: for positions that are not finite, and a smaller ``radius``.
    """
    positions = as_expected("positions", positions, (("N", 1), "D"), kind="float")
    expect_all("positions", positions, positions.isfinite(), "be finite")
    check_finite(radius=radius, spacing=spacing)
    num_nodes, num_axes = positions.shape
    if not spacing > 0 or not radius >= spacing * num_axes**0.5 / 2:
        both = f"radius={radius} and spacing={spacing}"
        raise ValueError(f"radius must be at least spacing * sqrt({num_axes}) / 2, got {both}")
    scaled, reach = positions / spacing, int(radius / spacing + 0.5)
    steps = torch.tensor(list(itertools.product(range(-reach, reach + 1), repeat=num_axes)))
    place = scaled.round()[:, None] + steps.to(scaled)
    near = (place - scaled[:, None]).norm(dim=-1) <= radius / spacing
    node = near.nonzero()[:, 0]
    lattice, source = place[near].unique(dim=0, return_inverse=True)
    return Neighborhood(torch.stack([source, node]), num_nodes, len(lattice)), lattice * spacing


def hops(
    edge_index: Array, num_nodes: int, radius: int = 2, spacing: int = 1
) -> tuple[Neighborhood, Tensor]:
    r"""Nodes of any graph, and sources at some of them, with the hops ``(num_edges,)`` that each
    edge is long. The sources are a random maximal set of nodes more than ``spacing`` hops apart, by
    Luby's algorithm [1]; all nodes if ``spacing`` is 0. Cost: :math:`O(E \log N)`, and the edges
    within reach, a hop.

    >>> path = torch.tensor([[0, 1, 1, 2, 2, 3, 3, 4], [1, 0, 2, 1, 3, 2, 4, 3]])
    >>> hood, distance = hops(path, 5, radius=4, spacing=4)  # one source, and all reach it
    >>> hood, bool(distance.max() >= 2)
    (Neighborhood(num_nodes=5, num_sources=1, num_rows=5, num_edges=5), True)

    [1] Michael Luby (1986) "A Simple Parallel Algorithm for the Maximal Independent Set Problem",
    SIAM Journal on Computing 15, https://doi.org/10.1137/0215074.

    :param Tensor edge_index: ``(2, num_edges)`` node ids; an edge counts in both directions.
    :param int radius: A node reaches the sources at most so many hops away; at least ``spacing``.
    :raises ValueError: for node ids out of range, and a smaller ``radius``.
    """
    from torch_geometric.utils import add_remaining_self_loops, to_undirected

    edges = as_edge_index(edge_index, num_nodes)
    check_integers(0, spacing=spacing)
    check_integers(spacing, radius=radius)
    device, size = edges.device, (num_nodes, num_nodes)
    edges = to_undirected(edges.cpu(), num_nodes=num_nodes)
    at = _spread_out(edges, num_nodes, spacing).nonzero()[:, 0]
    near = _ones(add_remaining_self_loops(edges, num_nodes=num_nodes)[0], size)
    starts = torch.stack([at, torch.arange(len(at))])
    # Nodes and the sources that they reach, and in how many of the rounds.
    reached = times = _ones(starts, (num_nodes, len(at)))
    for _ in range(radius):
        reached = torch.sparse.mm(near, reached).coalesce()
        reached = _ones(reached.indices(), reached.shape)
        times = times + reached
    node, source = (times := times.coalesce()).indices()
    hood = Neighborhood(torch.stack([source, node]), num_nodes, len(at))
    return hood.to(device), (radius + 1 - times.values()).long().to(device)


def _ones(places: Tensor, shape: tuple[int, ...]) -> Tensor:
    return sparse_coo(places, torch.ones(places.shape[1]), shape)


def _spread_out(edges: Tensor, num_nodes: int, spacing: int) -> Tensor:
    """A mask of a maximal set of nodes more than ``spacing`` hops apart."""

    def within(values: Tensor) -> Tensor:
        for _ in range(spacing):
            values = values.scatter_reduce(0, edges[1], values[edges[0]], "amax")
        return values

    chosen = torch.zeros(num_nodes, dtype=torch.bool)
    free = ~chosen
    while free.any():
        # A permutation, so that no two free nodes are equal.
        priority = (1 + torch.randperm(num_nodes)) * free
        new = free & (within(priority) == priority)
        chosen = chosen | new
        free = free & (within(new.long()) == 0)
    return chosen


def walks(edge_index: Array, num_nodes: int, membership: Array) -> tuple[Neighborhood, Tensor]:
    r"""The nodes of a graph, a source for each group of them, such as Louvain's communities, and a
    feature ``(num_edges,)`` of each edge:

    .. math::

        x_{ij} = \log \Pr(\text{a step from } i \text{ ends in group } j) .

    The step goes to a neighbour or stays, with equal probabilities. Attention
    :math:`\propto \exp(\beta x_{ij})` chooses among groups as the step does for :math:`\beta = 1`.
    Cost: :math:`O(E \log E)`.

    >>> path = torch.tensor([[0, 1, 1, 2, 2, 3], [1, 0, 2, 1, 3, 2]])
    >>> hood, feature = walks(path, 4, torch.tensor([0, 0, 1, 1]))
    >>> feature.exp()  # node 1 has two of three steps within its own group
    tensor([1.0000, 0.6667, 0.3333, 0.3333, 0.6667, 1.0000])

    Edges count as for :func:`hops`.

    :param Tensor membership: ``(N,)`` the group of every node, integers from zero.
    :raises ValueError: for node ids out of range, and groups of a wrong shape or negative.
    """
    from torch_geometric.utils import add_remaining_self_loops, coalesce, degree, to_undirected

    edges = as_edge_index(edge_index, num_nodes)
    shape, note = (num_nodes,), "one group per node"
    groups = as_expected("membership", membership, shape, kind="labels", like=edges, note=note)
    expect_all("membership", groups, groups >= 0, "not be negative")
    groups, edges = groups.long(), to_undirected(edges, num_nodes=num_nodes)
    node, near = add_remaining_self_loops(edges, num_nodes=num_nodes)[0]
    share, number = 1 / degree(node, num_nodes, torch.get_default_dtype()), int(groups.max()) + 1
    pairs, most = torch.stack([groups[near], node]), max(num_nodes, number)
    pairs, chance = coalesce(pairs, share[node], most, sort_by_row=False)
    return Neighborhood(pairs, num_nodes, number), chance.log()
