# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Graphs and values of edges as users have them, from PyG, SciPy or arrays."""

from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.utils import from_scipy_sparse_matrix, scatter, to_undirected

from pyro_nmm.arguments import as_edge_index, as_edges, as_expected, expect_all
from pyro_nmm.model_arguments import check_all_rows
from pyro_nmm.neighborhood import Neighborhood, edges_between


def edges_of(graph: Any) -> tuple[Tensor, int | None]:
    """Pairs of a source and a target ``(2, E)``, and the number of nodes if the graph has one.

    :param graph: PyG's ``Data``; a sparse ``(N, N)`` matrix, each of whose stored entries is an
        edge in both directions, whatever its value; a neighborhood; or an edge_index.
    """
    if isinstance(graph, Neighborhood):
        if graph.bipartite or graph.num_rows != graph.num_nodes:
            raise ValueError(f"graph must hold edges between all of its nodes, got {graph}")
        return torch.stack([graph.source, graph.target]), graph.num_nodes
    if isinstance(graph, Data):
        if graph.edge_index is None:
            cure = "to_edge_index of torch_geometric.utils makes one of adj_t.t()"
            raise ValueError(f"graph has no edge_index: {cure}")
        return as_edges("graph.edge_index", graph.edge_index), graph.num_nodes
    if hasattr(graph, "tocoo"):
        return _of_sparse(graph.tocoo()), graph.shape[0]
    if isinstance(graph, tuple):
        cure = "some functions of pyro_nmm.sources return a pair, of which it is the first"
        raise ValueError(f"graph must be one object, got a tuple: {cure}")
    return as_edges("graph", graph), None


def _of_sparse(graph: Any) -> Tensor:
    if graph.ndim != 2 or graph.shape[0] != graph.shape[1]:
        raise ValueError(f"graph must have shape (N, N), got {tuple(graph.shape)}")
    if not np.isfinite(graph.data).all():
        cure = "each stored entry is an edge, so leave out entries that are none"
        raise ValueError(f"graph holds NaN or infinity: {cure}")
    return to_undirected(from_scipy_sparse_matrix(graph)[0].long(), num_nodes=graph.shape[0])


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
    count = torch.bincount(place, minlength=hood.num_edges)
    lost, loop = count == 0, (hood.source == hood.target) & (not hood.bipartite)
    for wrong, error in (
        (lost & ~loop, "lacks the edge {}, which hood has: of another graph?"),
        (lost & (fill_value is None), "lacks the self-loop {}: give fill_value, as logits 0.0"),
        ((count > 1) & (reduce is None), "lists the edge {} twice: give reduce, such as 'sum'"),
    ):
        if wrong.any():
            edge = [int(end[wrong][0]) for end in (hood.source, hood.target)]
            raise ValueError(f"edge_index {error.format(edge)}")
    ordered = scatter(values, place, -1, hood.num_edges, reduce or "sum")
    fill = 0 if fill_value is None else fill_value
    return torch.where(lost, fill if isinstance(fill, Integral) else float(fill), ordered)
