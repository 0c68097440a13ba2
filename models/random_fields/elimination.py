# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Exact sums and draws of a field, one node after the other, and colours of its graph."""

from bisect import bisect_left

import torch
from torch import Tensor
from torch.distributions import Categorical

#: Largest table of the sum-product recursion: a grid of two labels, 17 wide.
MAX_TABLE = 2**19
#: A node that leaves the table, the nodes that stay, and the table with the node's labels last.
Left = tuple[int, list[int], Tensor]


def log_sum(
    edges: Tensor, unary: Tensor, pairwise: Tensor, left: list[Left] | None = None
) -> Tensor:
    r"""``(...)``: the log sum over all labellings, of terms ``(..., N, C)`` of nodes and tables
    ``(..., P, C, C)`` of pairs ``(2, P)``. Nodes enter a table one by one, breadth first, and leave
    it, for ``left``, after their last neighbour has come. Cost: :math:`O(N C^w)`.
    """
    num_nodes, num_classes = unary.shape[-2:]
    neighbors = _neighbors(edges, num_nodes)
    order = _breadth_first(neighbors)
    place = {node: number for number, node in enumerate(order)}
    last = [max(place[m] for m in (n, *neighbors[n])) for n in range(num_nodes)]
    ends = sorted(last)
    width = max((t + 1 - bisect_left(ends, t) for t in range(num_nodes)), default=0)
    if num_classes**width > MAX_TABLE:
        raise ValueError(
            f"the exact sum needs a table of {num_classes}^{width} entries, past {MAX_TABLE}: use "
            f"log_potential, which needs no normalizer, annealed_log_normalizer of a PairwiseMRF "
            f"without batch, or for marginals and samples pyro_nmm.guides.fit_mixture"
        )
    second = edges[1].tolist()
    table = unary.new_zeros(torch.broadcast_shapes(unary.shape[:-2], pairwise.shape[:-3]))
    inside: list[int] = []
    for node in order:
        inside.append(node)
        table = table.unsqueeze(-1) + _along(unary[..., node, :], [-1], len(inside))
        for other, number in neighbors[node].items():
            if place[other] < place[node]:
                pair = pairwise[..., number, :, :]
                pair = pair.mT if second[number] == other else pair
                table = table + _along(pair, [inside.index(other) - len(inside), -1], len(inside))
        for gone in [n for n in inside if last[n] == place[node]]:
            dim = inside.index(gone) - len(inside)
            inside.remove(gone)
            if left is not None:
                left.append((gone, list(inside), table.movedim(dim, -1)))
            table = table.logsumexp(dim)
    return table


def exact_draws(edges: Tensor, unary: Tensor, pairwise: Tensor, num_draws: int) -> Tensor:
    """``(num_draws, N)``: each node given those in the table when it left; without a batch."""
    left: list[Left] = []
    log_sum(edges, unary, pairwise, left)
    draws = torch.zeros(num_draws, unary.shape[-2], dtype=torch.long, device=unary.device)
    for node, inside, table in reversed(left):
        logits = table[tuple(draws[:, n] for n in inside)]
        draws[:, node] = Categorical(logits=logits.expand(num_draws, -1)).sample()
    return draws


def greedy_colors(edges: Tensor, num_nodes: int) -> list[Tensor]:
    """Sets of nodes without an edge inside: each node joins the first that it may."""
    neighbors = _neighbors(edges, num_nodes)
    color = [-1] * num_nodes
    for node in range(num_nodes):
        near = {color[n] for n in neighbors[node]}
        color[node] = next(k for k in range(num_nodes) if k not in near)
    numbers = torch.tensor(color, device=edges.device)
    return [(numbers == k).nonzero()[:, 0] for k in range(max(color) + 1)]


def _along(value: Tensor, dims: list[int], size: int) -> Tensor:
    """``value`` with its last dimensions at the negative places ``dims`` of ``size`` ones."""
    shape = [1] * size
    for dim, length in zip(dims, value.shape[-len(dims) :], strict=True):
        shape[dim] = length
    return value.reshape(*value.shape[: -len(dims)], *shape)


def _neighbors(edges: Tensor, num_nodes: int) -> list[dict[int, int]]:
    """The neighbours of every node, and the numbers of the edges to them."""
    neighbors: list[dict[int, int]] = [{} for _ in range(num_nodes)]
    for number, (i, j) in enumerate(edges.T.tolist()):
        neighbors[i][j] = neighbors[j][i] = number
    return neighbors


def _breadth_first(neighbors: list[dict[int, int]]) -> list[int]:
    """Cuthill and McKee's order: breadth first, nodes of small degree before others."""
    order: list[int] = []
    seen: set[int] = set()
    for root in sorted(range(len(neighbors)), key=lambda n: len(neighbors[n])):
        queue = [] if root in seen else [root]
        seen.update(queue)
        for node in queue:  # which grows
            near = sorted(neighbors[node], key=lambda n: len(neighbors[n]))
            new = [n for n in near if n not in seen]
            seen.update(new)
            queue += new
        order += queue
    return order
