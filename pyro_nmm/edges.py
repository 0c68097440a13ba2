# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Graphs as users have them: of PyG, SciPy, NetworkX, pandas, or edges alone."""

import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.utils import from_scipy_sparse_matrix, to_undirected

from pyro_nmm.arguments import as_tensor, check_edges
from pyro_nmm.neighborhood import Neighborhood

#: Names of the columns of a data frame of edges, as networkx.from_pandas_edgelist reads them.
ENDS = ["source", "target"]


def edges_of(graph: Any) -> tuple[Tensor, int | None]:
    """
    Pairs of a source and a target ``(2, E)``, and the number of nodes if the graph has one.

    :param graph: PyG's ``Data``; a sparse ``(N, N)`` matrix, each of whose stored entries is an
        edge in both directions, whatever its value; a NetworkX graph of the nodes ``0..N - 1``; a
        data frame with the columns ``source`` and ``target``; a neighborhood; or an edge_index.
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
        edges, size = _of_networkx(graph), len(graph)
    elif hasattr(graph, "columns"):
        if not set(ENDS) <= set(graph.columns):
            some = f"{list(graph.columns)[:8]}"
            cure = "rename two columns, or pass graph.to_numpy() if it holds an edge_index"
            raise ValueError(f"graph must have the columns source and target, got {some}: {cure}")
        edges = as_tensor("source and target of graph", graph[ENDS].to_numpy().T)
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


def _of_networkx(graph: Any) -> Tensor:
    strange = set(graph.nodes) ^ set(range(len(graph)))
    if strange:
        cure = "networkx.convert_node_labels_to_integers(graph) numbers them in their order"
        got = next((node for node in graph.nodes if node in strange), None)
        raise ValueError(f"graph must have the nodes 0..{len(graph) - 1}, got {got!r}: {cure}")
    edges = torch.tensor(list(graph.edges()), dtype=torch.long).reshape(-1, 2).T
    return edges if graph.is_directed() else torch.cat([edges, edges.flip(0)], 1)
