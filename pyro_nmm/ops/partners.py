# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Nodes that share a source, all or some at random, and the information of their labels."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from pyro_nmm.blocks import blocks
from pyro_nmm.neighborhood import Neighborhood, spans


def sharing(hood: Neighborhood, nodes: Tensor) -> Tensor:
    """``(2, P)``: each of some nodes with every other node that shares a source with it."""
    order = hood.source.argsort(stable=True)
    degree = hood.source.bincount(minlength=hood.num_sources)
    first = degree.cumsum(0) - degree
    rows = hood.take(nodes)
    number = degree[rows.source]
    place = spans(first[rows.source], number)
    pairs = torch.stack([rows.target.repeat_interleave(number), hood.target[order[place]]])
    return pairs[:, pairs[0] != pairs[1]].unique(dim=1)


class _Line:
    """Lengths ``(K,)`` laid end to end, in segments ``ptr[i]:ptr[i + 1]``."""

    def __init__(self, lengths: Tensor, ptr: Tensor) -> None:
        self.ends, self.ptr = lengths.cumsum(0), ptr
        self.begins = pad(self.ends, (1, 0))[:-1]

    def find(self, segment: Tensor, distance: Tensor) -> tuple[Tensor, Tensor]:
        """Which length lies at a distance from the segment's start, and the distance into it."""
        first, last = self.ptr[segment], self.ptr[segment + 1] - 1
        distance = distance + self.begins[first]
        # To the right, past lengths of zero. The clamp undoes rounding into another segment.
        place = torch.searchsorted(self.ends, distance, right=True).clamp(first, last)
        return place, (distance - self.begins[place]).clamp(min=0)


def all_partners(hood: Neighborhood, nodes: Tensor, free: Tensor) -> tuple[Tensor, Tensor]:
    """Every pair ``(2, P)`` that :func:`draw_partners` may draw, and ``scale`` one."""
    pairs = sharing(hood, nodes)
    pairs = pairs[:, free[pairs].all(0)]
    return pairs, torch.ones(pairs.shape[1], device=hood.device)


def draw_partners(
    hood: Neighborhood, nodes: Tensor, attention: Tensor, total: Tensor, free: Tensor,
    num_partners: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    r"""Distinct pairs ``(2, P)`` of nodes and random partners over a source; ``scale`` ``(P,)``:

    .. math::

        q(j \mid i) \propto \sum_{s \in n(i) \cap n(j)} \frac{w_{is} w_{js}}{1 + A_s} , \qquad
        w_{is} = 0.9 \, L_{is} + \frac{0.1}{|n(i)|} .

    The sum of ``scale`` times :math:`f(i, j)` over the drawn pairs of `i` is an unbiased estimate
    of :math:`\sum_j f(i, j)` over all `j` that share a source with `i`. ``nodes`` ``(K,)`` are
    distinct and among the ``free``, a mask ``(N,)`` of possible partners. Attention is in double
    precision. Cost: :math:`O(E \log E)`, and :math:`O(|n(i)| \log E)` for each draw.
    """
    rows, order = hood.take(nodes), hood.source.argsort(stable=True)
    # The even part of the weights lets every pair be drawn, however small its attention.
    weight = 0.9 * attention + 0.1 / hood.ptr.diff()[hood.row]
    weight = weight / (1 + total[hood.source]).sqrt() * free[hood.target]
    degree = hood.source.bincount(minlength=hood.num_sources)
    back = _Line(weight[order], pad(degree.cumsum(0), (1, 0)))
    # Summed for each source alone: what other nodes weigh is exactly zero if there are none.
    all_weights = weight.new_zeros(hood.num_sources).index_add_(0, hood.source, weight)
    row_weight = weight[rows.within]
    paths = row_weight * (all_weights[rows.source] - row_weight).clamp(min=0)
    there, reach = _Line(paths, rows.ptr), rows.sum(paths)

    # One point in each of equal intervals has a lower variance than independent points.
    row = torch.arange(rows.num_rows, device=order.device)[:, None]
    point = torch.rand(rows.num_rows, num_partners, dtype=row_weight.dtype, device=order.device)
    point = (point + torch.arange(num_partners, device=order.device)) / num_partners
    edge, rest = there.find(row, point * reach[:, None])
    rest = rest / row_weight[edge]
    begin = back.begins[order.argsort()[rows.within]] - back.begins[back.ptr[rows.source]]
    rest = torch.where(rest < begin[edge], rest, rest + row_weight[edge])  # past the node itself
    end = order[back.find(rows.source[edge], rest)[0]]
    # Without other nodes, or by rounding, an end may be the node itself or one that is not free.
    good = (weight[end] > 0) & (hood.target[end] != nodes[row]) & (reach[:, None] > 0)

    key = (row * hood.num_nodes + hood.target[end])[good]
    key, count = key.unique(return_counts=True)
    row = key.div(hood.num_nodes, rounding_mode="floor")
    pairs, shared = torch.stack([nodes[row], key % hood.num_nodes]), weight.new_zeros(len(key))
    for part in blocks(len(key), 1 + hood.num_edges // hood.num_rows):
        pair, first, second = hood.common_neighbors(pairs[:, part])
        shared[part] = shared[part].index_add(0, pair, weight[first] * weight[second])
    return pairs, count / num_partners * reach[row] / shared


def mutual_information(tables: Tensor) -> Tensor:
    """``(...)``: mutual information, in nats, of pairs with joint distributions ``(..., C, C)``."""
    joint = torch.special.entr(tables).sum((-1, -2))
    alone = torch.special.entr(tables.sum(-1)) + torch.special.entr(tables.sum(-2))
    return (alone.sum(-1) - joint).clamp(min=0)
