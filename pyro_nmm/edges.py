# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Graphs and values of edges as users have them, from PyG, SciPy, NetworkX, pandas or arrays."""

import copy
from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.utils import from_scipy_sparse_matrix, scatter, to_undirected

from pyro_nmm.arguments import as_edge_index, as_expected, as_tensor, check_edges, expect_all
from pyro_nmm.graph_arguments import check_all_rows
from pyro_nmm.neighborhood import Neighborhood, edges_between

#: Names of the columns of a data frame of edges, as networkx.from_pandas_edgelist reads them.
_ENDS = ["source", "target"]


def edges_of(graph: Any, rows: Any = None) -> tuple[Tensor, int | None]:
    """Pairs of a source and a target ``(2, E)``, and the number of nodes if the graph has one.

    :param graph: PyG's ``Data``; a sparse ``(N, N)`` matrix, each of whose stored entries is an
        edge in both directions, whatever its value; a neighborhood; an edge_index; or of row
        numbers, or names in the index of ``rows``, a NetworkX graph, or a data frame with the
        columns ``source`` and ``target``.
    """
    size = None
    if isinstance(graph, Neighborhood):
        if graph.bipartite or graph.num_rows != graph.num_nodes:
            raise ValueError(f"graph must hold edges between all of its nodes, got {graph}")
        return torch.stack([graph.source, graph.target]), graph.num_nodes
    if isinstance(graph, Data):
        if graph.edge_index is None:
            hint = ": to_edge_index of torch_geometric.utils makes one of adj_t.t()"
            raise ValueError(f"graph has no edge_index{hint if 'adj_t' in graph else ''}")
        graph = copy.copy(graph)
        edges = graph.edge_index = as_tensor("graph.edge_index", graph.edge_index)
        check_edges("graph.edge_index", edges)
        size = graph.num_nodes
    elif hasattr(graph, "tocoo"):
        edges, size = _of_sparse(graph), graph.shape[0]
    elif hasattr(graph, "is_directed") and hasattr(graph, "nodes"):
        edges, size = _of_networkx(graph, rows)
    elif hasattr(graph, "columns"):
        if not set(_ENDS) <= set(graph.columns):
            some = f"{list(graph.columns)[:8]}"
            cure = "rename two columns, or pass graph.to_numpy() if it holds an edge_index"
            raise ValueError(f"graph must have the columns source and target, got {some}: {cure}")
        edges = _of_frame(graph[_ENDS].to_numpy().T, rows)
    elif isinstance(graph, Tensor | np.ndarray | list):
        edges = as_tensor("graph", graph)
    else:
        must = "PyG's Data, an edge_index (2, E), a sparse matrix (N, N), a NetworkX graph, a data "
        must += "frame of edges or a Neighborhood"
        cure = ": some functions of pyro_nmm.sources return a pair, of which it is the first"
        got = f"{type(graph)}{cure * isinstance(graph, tuple)}"
        raise ValueError(f"graph must be {must}, got {got}")
    if edges.layout == torch.strided and edges.dim() == 2 and len(edges) != 2:
        cure = "pass its transpose"
        if len(edges) == edges.shape[1]:
            cure = "pass scipy.sparse.csr_array(graph) if it is an adjacency matrix"
        raise ValueError(f"graph must have shape (2, E), got {tuple(edges.shape)}: {cure}")
    check_edges("graph", edges)
    return edges.long(), size


def _of_sparse(graph: Any) -> Tensor:
    if graph.ndim != 2 or graph.shape[0] != graph.shape[1]:
        raise ValueError(f"graph must have shape (N, N), got {tuple(graph.shape)}")
    graph = graph.tocoo()
    wrong = np.flatnonzero(~np.isfinite(graph.data))
    if len(wrong):
        at = int(graph.row[wrong[0]]), int(graph.col[wrong[0]])
        cure = "each stored entry is an edge, so leave out entries that are none"
        raise ValueError(f"graph holds {graph.data[wrong[0]]} at {at}: {cure}")
    return to_undirected(from_scipy_sparse_matrix(graph)[0].long(), num_nodes=graph.shape[0])


def _of_networkx(graph: Any, rows: Any) -> tuple[Tensor, int]:
    place = _places(graph.nodes, rows) or {number: number for number in range(len(graph))}
    if strange := [node for node in graph.nodes if node not in place]:
        must = f"the nodes 0..{len(graph) - 1}, which are rows, or names in the index of a frame"
        cure = "networkx.relabel_nodes(graph, {name: row}) with the row of each name"
        raise ValueError(f"graph must have {must}, got {strange[0]!r}: {cure}")
    pairs = [(place[i], place[j]) for i, j in graph.to_directed().edges()]
    return torch.tensor(pairs, dtype=torch.long).reshape(-1, 2).T, len(place)


def _of_frame(ends: np.ndarray, rows: Any) -> Tensor:
    if place := _places(ends.ravel().tolist(), rows):
        return torch.tensor([[place[name] for name in side] for side in ends.tolist()])
    return as_tensor("source and target of graph, rows or names in the index of a frame,", ends)


def _places(nodes: Iterable, rows: Any) -> dict[Any, int]:
    """Row of each name in the index of ``rows``, if nodes are names there; else nothing."""
    index = getattr(rows, "index", ())
    place = {} if callable(index) else {name: row for row, name in enumerate(index)}
    moved = [node for node in nodes if place.get(node) != node]
    if not moved or not set(nodes) <= place.keys() or len(place) < len(index):
        return {}  # row numbers, or a name that none or several rows have
    if set(nodes) <= set(range(len(place))):
        got = f"node {moved[0]!r}, a row number and the index of row {place[moved[0]]}"
        cure = "number rows by .reset_index(drop=True), and nodes by networkx.relabel_nodes"
        raise ValueError(f"graph has {got}: {cure}(graph, {{name: row}})")
    return place


def edge_values(
    hood: Neighborhood,
    edge_index: Tensor,
    values: Tensor,
    *,
    fill_value: float | None = None,
    reduce: str | None = None,
) -> Tensor:
    r"""Values of edges in the order of ``hood``, as ``logits`` must be: by row, then by source.

    >>> edge_index = torch.tensor([[1, 0, 2, 1], [0, 1, 1, 2]])
    >>> hood = Neighborhood(edge_index, num_nodes=3)
    >>> edge_values(hood, edge_index, torch.tensor([1.0, 2.0, 3.0, 4.0]), fill_value=0.0)
    tensor([0., 1., 2., 0., 3., 4., 0.])

    Attention is a logarithm away from logits. PyG's ``GATConv`` returns it with self-loops:

    >>> from torch_geometric.nn import GATConv
    >>> _, attention = GATConv(3, 4)(torch.eye(3), edge_index, return_attention_weights=True)
    >>> edges, heads = attention  # heads: (E, 1)
    >>> edge_values(hood, edges, heads[:, 0]).log().shape
    torch.Size([7])

    :param Tensor edge_index: ``(2, E)``, of ``hood`` in any order, with or without self-loops.
    :param Tensor values: ``(..., E)``.
    :param float fill_value: for self-loops that ``edge_index`` lacks, an error without it. As a
        logit, 0 is neutral and ``-inf`` switches them off: isolated nodes then have no neighbour.
    :param str reduce: for edges that ``edge_index`` lists several times, as for PyG's ``scatter``:
        ``"sum"`` of attention or weights, ``"mean"``, ``"max"``. They are an error without it.
    :return: ``(..., num_edges)``, with the gradient of the values. Cost: :math:`O(E \log E)`.
    :raises ValueError: if ``edge_index`` has other edges than ``hood``.
    """
    check_all_rows(hood)
    num_sources = hood.num_sources if hood.bipartite else None
    edge_index = as_edge_index(edge_index, hood.num_nodes, num_sources, like=hood)
    shape = "...", edge_index.shape[1]
    values = as_expected("values", values, shape, like=hood, note="one per edge")
    expect_all("values", values, values < torch.inf, "not be NaN or +inf")
    if reduce not in (None, "sum", "mean", "max", "min", "mul"):
        raise ValueError(f"reduce must be 'sum', 'mean', 'max', 'min' or 'mul', got {reduce!r}")
    if fill_value is not None and not (isinstance(fill_value, Real) and fill_value == fill_value):
        raise ValueError(f"fill_value must be a number or -inf, got {fill_value!r}")
    place = edges_between(hood, *edge_index)
    if (place < 0).any():
        edge = edge_index[:, place < 0][:, 0].tolist()
        raise ValueError(f"edge_index has the edge {edge}, which hood lacks: of another graph?")
    count, ends = torch.bincount(place, minlength=hood.num_edges), (hood.source, hood.target)
    lost, loop = count == 0, (hood.source == hood.target) & (not hood.bipartite)
    if (lost & ~loop).any():
        edge = [int(end[lost & ~loop][0]) for end in ends]
        raise ValueError(f"edge_index lacks the edge {edge}, which hood has: of another graph?")
    if fill_value is None and lost.any():
        what = f"edge_index lacks the self-loop of node {int(hood.source[lost][0])}, which hood has"
        raise ValueError(f"{what}: give fill_value, as logits 0.0, or -inf for no self-loop")
    if reduce is None and (most := int(count.max())) > 1:
        edge = [int(end[count == most][0]) for end in ends]
        cure = "give reduce, 'sum' for attention or weights, 'mean' for logits"
        raise ValueError(f"edge_index lists the edge {edge} {most} times: {cure}")
    ordered = scatter(values, place, -1, hood.num_edges, reduce or "sum")
    if fill_value is None or isinstance(fill_value, Integral):
        return ordered.masked_fill(lost, fill_value or 0)
    return torch.where(lost, float(fill_value), ordered)
