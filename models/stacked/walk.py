# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Steps of a walk on a graph."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch_geometric.utils import segment

from pyro_nmm import Neighborhood
from pyro_nmm.blocks import row_blocks
from pyro_nmm.sparse import sparse_csr


@dataclass(frozen=True)
class Walk:
    """
    Steps from a node to any of those that it may choose, by weight or all alike: a matrix whose
    rows sum to one, ``(N, N)``. ``walk @ values`` is made in blocks of rows, of the graph's own
    edges, so that nothing else is stored.
    """

    ptr: Tensor  #: ``(N + 1,)`` first edge of every row
    source: Tensor  #: ``(E,)`` nodes
    weight: Tensor | None  #: ``(E,)``

    @classmethod
    def of(cls, hood: Neighborhood, edge_weight: Tensor | None = None) -> Walk:
        """Of all rows of a graph; sources that are no nodes have no part in it."""
        if not hood.bipartite:
            return cls(hood.ptr, hood.source, edge_weight)
        nodes = (hood.source < hood.num_nodes).nonzero()[:, 0]
        degree = hood.row[nodes].bincount(minlength=hood.num_nodes)
        ptr = torch.cat([degree.new_zeros(1), degree.cumsum(0)])
        return cls(ptr, hood.source[nodes], None if edge_weight is None else edge_weight[nodes])

    def __matmul__(self, values: Tensor) -> Tensor:
        """:param Tensor values: ``(N, C)``; the result has this shape."""
        found = torch.empty_like(values)
        for rows in row_blocks(self.ptr, 1):
            found[rows] = self.step(rows, values)
        return found

    def step(self, rows: slice, values: Tensor) -> Tensor:
        """``(R, C)``: the given rows of ``walk @ values``. Cost: :math:`O(E_R C)`."""
        ptr = self.ptr[rows.start : rows.stop + 1]
        edges = slice(int(ptr[0]), int(ptr[-1]))
        source, ptr = self.source[edges], ptr - ptr[0]
        if self.weight is None:
            weight, total = values.new_ones(len(source)), ptr.diff().to(values)
        else:
            weight = self.weight[edges].to(values)
            total = segment(weight, ptr)
        steps = sparse_csr(ptr, source, weight, (len(ptr) - 1, len(values)))
        return (steps @ values) / total[:, None]
