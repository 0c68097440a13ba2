# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Rows and keys renumbered, so that tables hold only what occurs."""

import torch
from torch import Tensor

from pyro_nmm.neighborhood import Neighborhood


def compact(rows: Neighborhood) -> tuple[Neighborhood, Tensor]:
    """
    The same rows, with their sources numbered from zero, and ``(M,)`` these sources, ascending.

    >>> hood = Neighborhood(torch.tensor([[7, 9], [8, 7]]), num_nodes=10)
    >>> rows, sources = compact(hood.take(torch.tensor([7, 8])))
    >>> sources
    tensor([7, 8, 9])
    >>> rows.source
    tensor([0, 2, 0, 1])
    """
    sources, place = rows.source.unique(return_inverse=True)
    arguments = rows.num_nodes, rows.nodes, rows.ptr, place, rows.edge
    return Neighborhood.of_rows(*arguments, num_sources=len(sources)), sources


def consecutive(rows: Neighborhood, first: int, last: int) -> tuple[Neighborhood, slice]:
    """Rows ``first..last - 1``, and their edges, without :meth:`Neighborhood.take` of all rows."""
    ptr = rows.ptr[first : last + 1]
    span = slice(*ptr[[0, -1]].tolist())
    parts = rows.nodes[first:last], ptr - span.start, rows.source[span], rows.edge[span]
    return Neighborhood.of_rows(rows.num_nodes, *parts, rows.num_sources), span


def sharing(hood: Neighborhood, nodes: Tensor) -> Tensor:
    """``(2, P)``: each of some nodes with every other node that shares a source with it."""
    order = hood.source.argsort(stable=True)
    degree = hood.source.bincount(minlength=hood.num_sources)
    first = degree.cumsum(0) - degree
    rows = hood.take(nodes)
    number = degree[rows.source]
    start = (first[rows.source] - number.cumsum(0) + number).repeat_interleave(number)
    place = start + torch.arange(len(start), device=start.device)
    pairs = torch.stack([rows.target.repeat_interleave(number), hood.target[order[place]]])
    return pairs[:, pairs[0] != pairs[1]].unique(dim=1)


class Places:
    """Integers ``(K,)`` that occur, each with a ``place`` ``(K,)`` in a table."""

    place: Tensor

    def __init__(self, keys: Tensor) -> None:
        self.keys, self.place = keys.unique(return_inverse=True)

    def find(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Places of other keys ``(...)``, and whether they have one."""
        # torch would copy other layouts itself, and warn users of it.
        place = torch.searchsorted(self.keys, keys.contiguous()).clamp(max=len(self.keys) - 1)
        return place, self.keys[place] == keys

    def count(self, keys: Tensor) -> Tensor:
        """``(B, num_places)`` int32: how often each occurs among keys ``(B, n)``."""
        place, occurs = self.find(keys)
        table = torch.zeros(len(keys), len(self.keys), dtype=torch.int32, device=keys.device)
        return table.scatter_add_(1, place, occurs.int())
