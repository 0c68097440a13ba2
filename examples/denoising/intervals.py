# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Means and intervals of ordered labels, such as grey levels."""

from typing import NamedTuple

import torch
from torch import Tensor

from pyro_nmm import NeighborMixture
from pyro_nmm.sparse import sparse_csr

#: Rows whose distributions of labels are written out at once.
STRIP = 2048


class Intervals(NamedTuple):
    r"""Mean labels :math:`\sum_k k \, p(y_i = k)` and the ends of intervals, each ``(..., N)``."""

    mean: Tensor  #: ``(..., N)`` mean label
    low: Tensor  #: ``(..., N)`` lower end
    high: Tensor  #: ``(..., N)`` upper end

    def coverage(self, y: Tensor) -> Tensor:
        r"""The share of labels ``(..., N)`` in their intervals. A label ``k`` on an end counts by
        the part of ``k - 0.5`` to ``k + 0.5`` that is inside. Its mean is ``level``.

        >>> low, high = torch.tensor([3.25, 0.0, 5.0]), torch.tensor([4.5, 9.0, 7.0])
        >>> Intervals((low + high) / 2, low, high).coverage(torch.tensor([3, 4, 8]))
        tensor(0.4167)
        """
        inside = torch.minimum(y + 0.5, self.high) - torch.maximum(y - 0.5, self.low)
        return inside.clamp(0, 1).mean()


@torch.no_grad()
def label_intervals(mix: NeighborMixture, level: float = 0.9) -> Intervals:
    """Every node's mean label and an interval with half of ``1 - level`` beyond each end, in strips
    of rows. A label ``k`` is spread over ``k - 0.5`` to ``k + 0.5``, because whole numbers would
    cover more than ``level``."""
    hood, alpha, attention = mix.hood, mix.alpha, mix.attention
    intervals, num_classes = [], alpha.shape[-1]
    tail, labels = (1 - level) / 2, torch.arange(num_classes, device=hood.device)
    for rows in torch.arange(hood.num_rows, device=hood.device).split(STRIP):
        part = hood.take(rows)
        sources, place = part.source.unique(return_inverse=True)
        table = alpha.index_select(-2, sources)
        table = table / table.sum(-1, keepdim=True)
        batch = torch.broadcast_shapes(table.shape[:-2], attention.shape[:-1])
        weights = attention[..., part.edge].expand(*batch, -1).reshape(-1, part.num_edges)
        tables = table.expand(*batch, -1, -1).reshape(-1, *table.shape[-2:])
        size = len(rows), len(sources)
        mixed = [sparse_csr(part.ptr, place, w, size) @ t
                 for w, t in zip(weights, tables, strict=True)]  # fmt: skip
        probs = torch.stack(mixed).view(*batch, len(rows), num_classes)
        ends = _quantiles(probs, torch.tensor([tail, 1 - tail]).to(probs))
        intervals.append(torch.stack([(probs * labels).sum(-1), *ends.unbind(-1)]))
    return Intervals(*torch.cat(intervals, -1))


def _quantiles(probs: Tensor, levels: Tensor) -> Tensor:
    """``(..., Q)``: quantiles of labels that are each spread over one unit."""
    below = probs.cumsum(-1)
    levels = levels.expand(*probs.shape[:-1], -1).contiguous()
    label = torch.searchsorted(below, levels).clamp(max=probs.shape[-1] - 1)
    part = 1 - (below.gather(-1, label) - levels) / probs.gather(-1, label)
    return label - 0.5 + part.clamp(0, 1)
