# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Intervals of ordinal labels."""

from typing import NamedTuple

import torch
from torch import Tensor

from pyro_nmm.arguments import as_tensor, expect, expect_all
from pyro_nmm.concentrations import Concentrations, chosen_rows, written_out
from pyro_nmm.neighborhood import Neighborhood
from pyro_nmm.sparse import sparse_csr

#: Rows whose distributions are written out at once.
STRIP = 2048


class Intervals(NamedTuple):
    r"""
    Every node's mean label :math:`\sum_k k \, p(y_i = k)` and the real-valued ends of an interval,
    each ``(..., N)``. :meth:`NeighborMixture.intervals` makes them.
    """

    mean: Tensor
    low: Tensor
    high: Tensor

    def coverage(self, y: Tensor) -> Tensor:
        r"""
        The share of labels ``(..., N)`` in their intervals. A label ``k`` on an end counts by the
        part of ``k - 0.5`` to ``k + 0.5`` that is inside. Its mean under the model is ``level``.

        >>> low, high = torch.tensor([3.25, 0.0, 5.0]), torch.tensor([4.5, 9.0, 7.0])
        >>> Intervals((low + high) / 2, low, high).coverage(torch.tensor([3, 4, 8]))
        tensor(0.4167)
        """
        y, shape = as_tensor("y", y, self.low.device), ("...", *self.low.shape[-1:])
        expect("y", y, shape, kind="integers", note="one label per node")
        expect_all("y", y, y >= 0, "hold labels, which are not negative")
        inside = torch.minimum(y + 0.5, self.high) - torch.maximum(y - 0.5, self.low)
        return inside.clamp(0, 1).mean()


@torch.no_grad()
def label_intervals(
    hood: Neighborhood, alpha: Concentrations, attention: Tensor, level: float
) -> Intervals:
    """Intervals with half of ``1 - level`` beyond each end, in strips of rows."""
    if not 0 < level < 1:
        raise ValueError(f"level must lie between 0 and 1, got {level}")
    intervals, num_classes = [], alpha.shape[-1]
    tail, labels = (1 - level) / 2, torch.arange(num_classes, device=hood.device)
    for rows in torch.arange(hood.num_rows, device=hood.device).split(STRIP):
        part = hood.take(rows)
        sources, place = part.source.unique(return_inverse=True)
        table = written_out(chosen_rows(alpha, sources))
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
