# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The neighbourhoods ``n(i)`` of a graph as sorted rows of edges."""

from functools import cached_property

import torch
from torch import Tensor, segment_reduce

from pyro_nmm import compiled
from pyro_nmm.arguments import (
    Array,
    Device,
    as_edge_index,
    as_expected,
    check_integers,
    check_mask,
    check_range,
    out_of_range,
)
from pyro_nmm.caching import LastCall, derived


class Neighborhood:
    r"""The neighbourhoods :math:`n(i) = \{ j : (j, i) \in E \} \cup \{ i \}` of a graph's nodes.

    With ``num_sources`` the sources are no nodes but places that many nodes may share. Edges then
    go from sources to nodes, without self-loops, and ``alpha`` has a row per source.

    Edges are stored row after row (CSR): row ``r`` belongs to node ``nodes[r]`` and owns the edges
    ``ptr[r]:ptr[r + 1]``, in ascending order of their source. Everything *per edge* in this
    library, such as attention ``logits``, is in this order: edge ``e`` goes from ``source[e]`` to
    ``target[e]``. Duplicate edges are merged and each node gets its self-loop once.

    >>> hood = Neighborhood(torch.tensor([[0, 1, 1], [1, 0, 2]]), num_nodes=4)
    >>> hood
    Neighborhood(num_nodes=4, num_rows=4, num_edges=7)
    >>> hood.source[hood.ptr[2]:hood.ptr[3]]  # the neighbours of node 2
    tensor([1, 2])
    >>> Neighborhood(torch.tensor([[0, 0, 1], [0, 1, 1]]), num_nodes=2, num_sources=3)
    Neighborhood(num_nodes=2, num_sources=3, num_rows=2, num_edges=3)

    Cost: :math:`O(E \log E)` to build, :math:`O(E)` to store.

    :param Tensor edge_index: ``(2, num_edges)`` integers as in PyG: sources :math:`j`, then targets
        :math:`i`. An undirected graph lists both directions. An array or a nested list will do.
    :param int num_nodes: ``N``.
    :param int num_sources: ``M``; every node needs an edge from one. Default: nodes are sources.
    :raises ValueError: for ids out of range, an ``edge_index`` of another shape or type, and a node
        without a source; in methods for wrong shapes and sizes.
    """

    num_nodes: int  #: number of nodes ``N`` of the graph, the range of ``nodes``
    num_rows: int  #: number of rows: nodes whose neighbours are stored
    num_edges: int  #: number of edges, self-loops included
    nodes: Tensor  #: ``(num_rows,)`` node id of every row
    ptr: Tensor  #: ``(num_rows + 1,)`` first edge of every row
    source: Tensor  #: ``(num_edges,)`` source :math:`j` that an edge comes from
    within: Tensor  #: ``(num_edges,)`` index of the edge in the rows it was taken from

    # Neighbourhoods are kept and shared: made inside of inference mode, they serve training too.
    @torch.inference_mode(False)
    def __init__(self, edge_index: Array, num_nodes: int, num_sources: int | None = None) -> None:
        from torch_geometric.utils import coalesce, cumsum

        edges = as_edge_index(edge_index, num_nodes, num_sources)
        num_nodes, num_sources = int(num_nodes), num_sources and int(num_sources)
        nodes = torch.arange(num_nodes, device=edges.device)
        if num_sources is None:
            edges = torch.cat([edges, nodes.expand(2, -1)], dim=1)
        ids = max(num_nodes, num_sources or 0)
        source, target = coalesce(edges, num_nodes=ids, sort_by_row=False)
        degree = torch.bincount(target, minlength=num_nodes)
        if not degree.all():
            empty = (degree == 0).nonzero()[:, 0]
            raise ValueError(
                f"edge_index has no edge into node {int(empty[0])} ({len(empty)} such nodes): with "
                f"num_sources there are no self-loops, so give every node a source"
            )
        self._fill(num_nodes, nodes, cumsum(degree), source, None, num_sources)

    def _fill(
        self,
        num_nodes: int,
        nodes: Tensor,
        ptr: Tensor,
        source: Tensor,
        edge: Tensor | None,
        num_sources: int | None,
    ) -> "Neighborhood":
        self.num_nodes, self.nodes, self.ptr, self.source = num_nodes, nodes, ptr, source
        self._own_sources = num_sources
        self.num_rows, self.num_edges = len(nodes), len(source)
        self._edge = edge
        self._last_rows, self._last_pairs = LastCall(), LastCall()
        self.last_edges = LastCall()  # to choices, which chains tell
        self.last_keys, self.last_labels = LastCall(), LastCall()
        return self

    def __getstate__(self) -> dict:
        # What was derived inside a transform of torch.func cannot be saved.
        own = vars(self).items()
        return {
            k: v for k, v in own if not isinstance(getattr(type(self), k, None), cached_property)
        }

    @classmethod
    @torch.inference_mode(False)
    def of_rows(
        cls,
        num_nodes: int,
        nodes: Tensor,
        ptr: Tensor,
        source: Tensor,
        edge: Tensor | None = None,
        num_sources: int | None = None,
    ) -> "Neighborhood":
        """From its attributes, unchecked: rows must hold their sources in ascending order."""
        return cls.__new__(cls)._fill(num_nodes, nodes, ptr, source, edge, num_sources)

    @classmethod
    @torch.inference_mode(False)
    def grid(
        cls, height: int, width: int, radius: int = 1, device: Device | None = None
    ) -> "Neighborhood":
        r"""Pixels of a ``height x width`` image in row-major order, each with the square window of
        side ``2 radius + 1`` around it, clipped at the border.

        >>> Neighborhood.grid(3, 3).ptr.diff().view(3, 3)
        tensor([[4, 6, 4],
                [6, 9, 6],
                [4, 6, 4]])
        """
        from torch_geometric.utils import cumsum

        check_integers(1, height=height, width=width)
        check_integers(0, radius=radius)
        step = torch.arange(-radius, radius + 1, device=device)
        down, right = torch.meshgrid(step, step, indexing="ij")
        pixel = torch.arange(height * width, device=device)
        y = pixel.div(width, rounding_mode="floor")[:, None] + down.flatten()
        x = (pixel % width)[:, None] + right.flatten()
        inside = (y >= 0) & (y < height) & (x >= 0) & (x < width)
        return cls.of_rows(height * width, pixel, cumsum(inside.sum(1)), (y * width + x)[inside])

    @derived
    def row(self) -> Tensor:
        """``(num_edges,)`` row that an edge belongs to."""
        return torch.repeat_interleave(self.ptr.diff(), output_size=self.num_edges)

    @derived
    def edge(self) -> Tensor:
        """``(num_edges,)`` index of the edge in the whole graph's edges."""
        if self._edge is not None:
            return self._edge
        return torch.arange(self.num_edges, device=self.device)

    @property
    def target(self) -> Tensor:
        """``(num_edges,)`` node id :math:`i` that an edge goes to."""
        return self.nodes[self.row]

    @property
    def device(self) -> torch.device:
        return self.source.device

    @torch.inference_mode(False)
    def to(self, device: Device) -> "Neighborhood":
        """The same neighbourhoods on another device."""
        nodes, ptr, source = (x.to(device) for x in (self.nodes, self.ptr, self.source))
        edge = None if self._edge is None else self._edge.to(device)
        hood = self.of_rows(self.num_nodes, nodes, ptr, source, edge, self._own_sources)
        if hasattr(self, "within"):
            hood.within = self.within.to(device)
        return hood

    @property
    def bipartite(self) -> bool:
        """Whether the sources are no nodes."""
        return self._own_sources is not None

    @property
    def num_sources(self) -> int:
        """The number of sources ``M``, the range of ``source``; ``N`` if they are nodes."""
        return self.num_nodes if self._own_sources is None else self._own_sources

    @torch.inference_mode(False)
    def take(self, rows: Tensor, num_edges: int | None = None) -> "Neighborhood":
        """Some rows ``(R,)``, in that order, at a cost linear in their edges."""
        from torch_geometric.utils import cumsum

        rows = as_expected("rows", rows, ("R",), kind="integers", like=self).long()
        if self.device.type == "cpu":  # a GPU would wait for the check
            check_range("rows", rows, self.num_rows, "row")
        nodes, degree = self.nodes.index_select(0, rows), self.ptr[rows + 1] - self.ptr[rows]
        ptr = cumsum(degree)
        if num_edges is not None and self.device.type == "cpu" and num_edges != ptr[-1]:
            raise ValueError(f"num_edges must be {int(ptr[-1])}, of rows, got {num_edges}")
        num_edges = int(ptr[-1]) if num_edges is None else num_edges
        edges = (self.ptr[rows] - ptr[:-1]).repeat_interleave(degree, output_size=num_edges)
        edges += torch.arange(num_edges, device=self.device)
        source = self.source.index_select(0, edges)
        edge = edges if self._edge is None else self._edge.index_select(0, edges)
        hood = self.of_rows(self.num_nodes, nodes, ptr, source, edge, self._own_sources)
        hood.within = edges
        return hood

    def restrict(self, observed: Tensor | None) -> "Neighborhood":
        """The rows of the observed nodes, in ascending order. Leaving out the rows of unobserved
        nodes is exact marginalisation of their labels. The last mask's rows are kept.

        :param Tensor observed: ``(num_nodes,)`` boolean mask, or ``None`` for all nodes.
        """
        if observed is None:
            return self

        def rows() -> "Neighborhood":
            check_mask(observed, self.num_nodes, self.device)
            return self.take(observed[self.nodes].nonzero()[:, 0])

        return self._last_rows.get((observed,), rows)

    def log_softmax(self, logits: Tensor) -> Tensor:
        r"""``(..., num_edges)``: :math:`\log L_{ij}`, over each row. NaN goes through, as below."""
        _, shifted, total = self.shifted_sum(logits)
        return shifted - total.log().index_select(-1, self.row)

    def logsumexp(self, logits: Tensor) -> Tensor:
        """``(..., num_rows)``: the logarithm of the sum of ``exp(logits)`` over each row."""
        top, _, total = self.shifted_sum(logits)
        return top + total.log()

    def _of_edges(self, name: str, values: Tensor) -> Tensor:
        """Values ``(..., num_edges)``. NaN goes through, because every step comes here."""
        return as_expected(name, values, ("...", self.num_edges), like=self)

    def shifted_sum(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The largest logit of each row, logits less this one, and the sum of their ``exp``."""
        logits = self._of_edges("logits", logits)
        columns, least = logits.detach().movedim(-1, 0), torch.finfo(logits.dtype).min
        top = segment_reduce(columns, "max", offsets=self.ptr, initial=least).movedim(0, -1)
        shifted = logits - top.index_select(-1, self.row)
        return top, shifted, self.sum(shifted.exp())

    def softmax(self, logits: Tensor) -> Tensor:
        r"""``(..., num_edges)``: :math:`L_{ij}`, the softmax of ``logits`` over each row."""
        from torch_geometric.utils import softmax

        return softmax(self._of_edges("logits", logits), self.row, num_nodes=self.num_rows, dim=-1)

    def sum(self, values: Tensor) -> Tensor:
        """``(..., num_rows)``: the sum of values ``(..., num_edges)`` over each row."""
        from torch_geometric.utils import scatter

        values = self._of_edges("values", values)
        return scatter(values, self.row, dim=-1, dim_size=self.num_rows, reduce="sum")

    def find(self, choices: Tensor) -> Tensor:
        """``(B, num_rows)``: edges to the nodes ``(B, num_rows)`` chosen; -1 if no neighbours."""
        shape = "B", self.num_rows
        choices = as_expected("choices", choices, shape, kind="integers", like=self)
        if compiled.runs_on(self.device):
            from pyro_nmm.compiled.loops import find

            return find(self, choices)
        return self._at(choices + self._keys[1])

    @derived
    def _keys(self) -> tuple[Tensor, Tensor]:
        # Ascending numbers of edges and of rows. What is no source must not lead to another row.
        first = torch.arange(self.num_rows, device=self.device) << 32
        return first.index_select(0, self.row) + self.source, first

    def _at(self, wanted: Tensor) -> Tensor:
        keys = self._keys[0]
        wanted = wanted.contiguous()  # torch warns of another layout
        edges = torch.searchsorted(keys[1:], wanted, right=True)  # the last one before the next
        return edges.masked_fill(keys[edges] != wanted, -1)

    def common_neighbors(self, pairs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        r"""The sources that both rows of a pair of row numbers ``(2, P)`` have: the number of the
        pair, and the edges of its first and of its second row. The last answer is kept. Cost:
        :math:`O(E)`, and :math:`O(\log E)` for each edge of the smaller row.
        """
        pairs = as_expected("pairs", pairs, (2, "P"), kind="integers", like=self)
        return self._last_pairs.get((pairs,), lambda: self._common_neighbors(pairs.long()))

    def _common_neighbors(self, pairs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        # Once for the answer that is kept, so that steps do not wait for it.
        if (bad := out_of_range(pairs, self.num_rows)) is not None:
            raise ValueError(f"pairs must hold row numbers in 0..{self.num_rows - 1}, got {bad}")
        degree = self.ptr.diff()
        swap = degree[pairs[0]] > degree[pairs[1]]
        small, large = pairs.flip(0).where(swap, pairs)
        near = self.take(small)
        common = edges_between(self, near.source, large[near.row])
        hit = common >= 0
        pair, edge, other = near.row[hit], near.within[hit], common[hit]
        return pair, other.where(swap[pair], edge), edge.where(swap[pair], other)

    def components(self) -> Tensor:
        """``(num_rows,)`` numbers, equal if a chain of shared neighbours connects two rows. Labels
        of different components are independent. Cost: :math:`O(E \\log N)`, once.
        """
        return self._components

    @derived
    def _components(self) -> Tensor:
        from torch_geometric.utils import scatter

        label, old = torch.arange(self.num_rows, device=self.device), None
        while old is None or not torch.equal(label, old):
            old = label
            least = scatter(label[self.row], self.source, dim_size=self.num_sources, reduce="min")
            least = scatter(least[self.source], self.row, dim_size=self.num_rows, reduce="min")
            # A smaller number goes to the row that the old one names, too, and so to all with it.
            label = least.scatter_reduce(0, old, least, "amin")
            label = label[label]
        return label

    def __repr__(self) -> str:
        sources = f"num_sources={self.num_sources}, " if self.bipartite else ""
        rows = f"num_rows={self.num_rows}, num_edges={self.num_edges}"
        return f"{type(self).__name__}(num_nodes={self.num_nodes}, {sources}{rows})"


def edges_between(hood: Neighborhood, source: Tensor, row: Tensor) -> Tensor:
    """``(K,)``: the edges from sources to rows ``(K,)``, -1 if none."""
    return hood._at((row << 32) + source)


def compact(rows: Neighborhood) -> tuple[Neighborhood, Tensor]:
    """The rows with their sources numbered from zero, and ``(M,)`` these sources, ascending."""
    sources, place = rows.source.unique(return_inverse=True)
    arguments = rows.num_nodes, rows.nodes, rows.ptr, place, rows.edge
    return Neighborhood.of_rows(*arguments, num_sources=len(sources)), sources
