# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Some rows of a large graph as a small problem: only what occurs there has a place."""

import torch
from torch import Tensor

from pyro_nmm.neighborhood import Neighborhood


def compact(rows: Neighborhood) -> tuple[Neighborhood, Tensor]:
    """
    The same rows, with their sources numbered from zero, so that tables of them are as long
    as the sources are many.

    >>> hood = Neighborhood(torch.tensor([[7, 9], [8, 7]]), num_nodes=10)
    >>> rows, sources = compact(hood.take(torch.tensor([7, 8])))
    >>> sources
    tensor([7, 8, 9])
    >>> rows.source
    tensor([0, 2, 0, 1])

    :return: the rows, and ``(M,)`` their sources in ascending order.
    """
    sources, place = rows.source.unique(return_inverse=True)
    arguments = rows.num_nodes, rows.nodes, rows.ptr, place, rows.edge
    small = Neighborhood.of_rows(*arguments, num_sources=len(sources))
    return small, sources


def consecutive(rows: Neighborhood, first: int, last: int) -> tuple[Neighborhood, slice]:
    """
    Rows ``first..last - 1``, and their edges. Cost: linear in these edges, which
    :meth:`Neighborhood.take` is not: it looks at the size of every row.
    """
    ptr = rows.ptr[first : last + 1]
    span = slice(*ptr[[0, -1]].tolist())
    part = Neighborhood.of_rows(
        rows.num_nodes,
        rows.nodes[first:last],
        ptr - span.start,
        rows.source[span],
        rows.edge[span],
        rows.num_sources,
    )
    return part, span


class Places:
    """
    Keys that occur, each with a place in a table.

    :param Tensor keys: ``(K,)`` integers.
    """

    def __init__(self, keys: Tensor) -> None:
        #: ``(K,)`` the place of every key.
        self.place: Tensor
        self.keys, self.place = keys.unique(return_inverse=True)

    def find(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Places of other keys ``(...)``, and whether they have one."""
        # torch would copy other layouts itself, and warn users of it.
        place = torch.searchsorted(self.keys, keys.contiguous()).clamp(max=len(self.keys) - 1)
        return place, self.keys[place] == keys

    def count(self, keys: Tensor) -> Tensor:
        """``(B, num_places)`` int32: how often each occurs among keys ``(B, n)``."""
        place, found = self.find(keys)
        table = torch.zeros(len(keys), len(self.keys), dtype=torch.int32, device=keys.device)
        return table.scatter_add_(1, place, found.int())
