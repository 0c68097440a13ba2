# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
Sums over all labellings of a pairwise Markov random field, node after node; and its nodes in
independent sets.
"""

from collections import deque

import torch
from torch import Size, Tensor

#: Largest table of the sum-product recursion: a grid of two labels, 17 wide.
MAX_TABLE = 2**19


#: A node that leaves the table, those that stay in it, and the table with its own labels last.
Left = tuple[int, list[int], Tensor]


def log_sum(edges: Tensor, unary: Tensor, pairwise: Tensor) -> Tensor:
    r"""
    :math:`\log Z = \log \sum_y \exp \big( \sum_i u_i(y_i) + \sum_{(i, j)} w_{ij}(y_i, y_j) \big)`.

    Nodes enter a table one by one, breadth first, and leave it after their last neighbour has
    come: a transfer matrix, site by site, on a grid.

    :param Tensor edges: ``(2, P)``.
    :param Tensor unary: ``(..., N, C)``.
    :param Tensor pairwise: ``(..., P, C, C)``, first node's label first.
    :return: ``(...)``. Cost: :math:`O(N C^w)` and, for gradients, as much memory; ``w`` is the
        width of a grid plus one.
    :raises ValueError: if the table would exceed :data:`MAX_TABLE`.
    """
    return _eliminate(edges, unary, pairwise, None)


def exact_draws(edges: Tensor, unary: Tensor, pairwise: Tensor, num_draws: int) -> Tensor:
    """
    ``(num_draws, N)``: independent draws of :math:`y`, each node given those that were in the table
    when it left. Parameters, cost and errors are those of :func:`log_sum`, without batch
    dimensions.
    """
    left: list[Left] = []
    _eliminate(edges, unary, pairwise, left)
    draws = torch.zeros(num_draws, unary.shape[-2], dtype=torch.long, device=unary.device)
    for node, inside, table in reversed(left):
        logits = table[tuple(draws[:, n] for n in inside)]
        logits = logits.expand(num_draws, -1)
        draws[:, node] = torch.distributions.Categorical(logits=logits).sample()
    return draws


def _eliminate(edges: Tensor, unary: Tensor, pairwise: Tensor, left: list[Left] | None) -> Tensor:
    """The logarithm of the sum; ``left``, if given, takes the nodes as they leave."""
    num_nodes, num_classes = unary.shape[-2:]
    order, last = _schedule(edges, num_nodes)
    width = _width(order, last)
    if num_classes**width > MAX_TABLE:
        raise ValueError(
            f"the exact sum needs a table of {num_classes}^{width} entries, past {MAX_TABLE}: use "
            f"log_potential, which needs no normalizer, or annealed_log_normalizer"
        )
    into: list[list[tuple[int, int, bool]]] = [[] for _ in range(num_nodes)]
    for number, (i, j) in enumerate(edges.T.tolist()):
        first, second = (i, j) if order[i] < order[j] else (j, i)
        into[second].append((first, number, first == j))
    table = unary.new_zeros(torch.broadcast_shapes(unary.shape[:-2], pairwise.shape[:-3]))
    inside: list[int] = []
    batch = table.dim()
    for node in sorted(range(num_nodes), key=order.__getitem__):
        inside.append(node)
        table = table.unsqueeze(-1) + _along(unary[..., node, :], [-1], len(inside))
        for other, number, flip in into[node]:
            pair = pairwise[..., number, :, :]
            dims = [inside.index(other) - len(inside), -1]
            table = table + _along(pair.mT if flip else pair, dims, len(inside))
        for gone in [n for n in inside if last[n] == order[node]]:
            place = inside.index(gone)
            inside.remove(gone)
            if left is not None:
                left.append((gone, list(inside), table.movedim(batch + place, -1)))
            table = table.logsumexp(batch + place)
    return table


def _along(value: Tensor, dims: list[int], size: int) -> Tensor:
    """``value`` with its last dimensions at the negative places ``dims`` of ``size`` ones."""
    batch = value.shape[: value.dim() - len(dims)]
    shape = [1] * size
    for dim, length in zip(dims, value.shape[len(batch) :], strict=True):
        shape[dim] = length
    return value.reshape(Size([*batch, *shape]))


def adjacency(edges: Tensor, num_nodes: int) -> list[list[int]]:
    """The neighbours of every node, of edges ``(2, P)`` that are listed in one direction."""
    neighbors: list[list[int]] = [[] for _ in range(num_nodes)]
    for i, j in edges.T.tolist():
        neighbors[i].append(j)
        neighbors[j].append(i)
    return neighbors


def _schedule(edges: Tensor, num_nodes: int) -> tuple[list[int], list[int]]:
    """The place of every node in the order, and the place after which it may leave."""
    neighbors = adjacency(edges, num_nodes)
    order = [-1] * num_nodes
    count = 0
    for root in sorted(range(num_nodes), key=lambda n: len(neighbors[n])):
        if order[root] >= 0:
            continue
        order[root], count, queue = count, count + 1, deque([root])
        while queue:  # Cuthill and McKee: breadth first, nodes of small degree before others
            for node in sorted(neighbors[queue.popleft()], key=lambda n: len(neighbors[n])):
                if order[node] < 0:
                    order[node], count = count, count + 1
                    queue.append(node)
    last = [max([order[n], *(order[m] for m in neighbors[n])]) for n in range(num_nodes)]
    return order, last


def _width(order: list[int], last: list[int]) -> int:
    """Most nodes that stand in the table at once."""
    change = [0] * (len(order) + 1)
    for start, end in zip(order, last, strict=True):
        change[start] += 1
        change[end + 1] -= 1
    return int(torch.tensor(change).cumsum(0).max())


def greedy_colors(edges: Tensor, num_nodes: int) -> list[Tensor]:
    """Sets of nodes without an edge ``(2, P)`` inside: each node joins the first that it may."""
    neighbors = adjacency(edges, num_nodes)
    color = [-1] * num_nodes
    for node in range(num_nodes):
        taken = {color[n] for n in neighbors[node]}
        color[node] = next(k for k in range(len(taken) + 1) if k not in taken)
    numbers = torch.tensor(color, device=edges.device)
    return [(numbers == k).nonzero()[:, 0] for k in range(max(color) + 1)]
