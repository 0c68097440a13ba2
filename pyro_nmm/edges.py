# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Graphs and values of edges as users have them, from PyG, SciPy or arrays."""

from collections import Counter
from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyro_nmm.arguments import Array, as_edge_index, as_edges, as_expected, expect_all
from pyro_nmm.model_arguments import check_all_rows
from pyro_nmm.neighborhood import Neighborhood, edges_between


def edges_of(graph: Any) -> tuple[Tensor, int | None]:
    """Pairs of a source and a target ``(2, E)``, and the number of nodes if the graph has one.

    :param graph: PyG's ``Data``; a sparse ``(N, N)`` matrix, each of whose stored entries is an
        edge in both directions, whatever its value; a neighborhood; or an edge_index.
    """
    from torch_geometric.data import Data

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
    return as_edges("graph", graph), None


def as_neighborhood(graph: Any, names: Any = None) -> Neighborhood:
    r"""The neighbourhoods of a graph of another package, with nodes in the order of the data.

    ======================================  ====================================================
    ``graph``                               its edges
    ======================================  ====================================================
    ``geopandas.GeoDataFrame``              rows whose geometries touch (queen contiguity)
    ``libpysal`` ``graph.Graph``, ``W``     neighbours whose label a node may take
    ``networkx`` graph                      both directions, or from source to target if directed
    SciPy's sparse matrix ``(N, N)``        stored entries, in both directions
    PyG's ``Data``, edge_index ``(2, E)``   from source to target
    ======================================  ====================================================

    .. math::

        n(i) = \{ j : (j, i) \in E \} \cup \{ i \}

    >>> import networkx as nx
    >>> borders = nx.Graph([("Bern", "Jura"), ("Bern", "Vaud"), ("Vaud", "Wallis")])
    >>> hood = as_neighborhood(borders, names=["Bern", "Jura", "Vaud", "Wallis"])
    >>> hood.source[hood.ptr[2] : hood.ptr[3]]  # the neighbours of Vaud
    tensor([0, 2, 3])

    :param graph: of ``N`` nodes. Weights are not read: they are ``logits``, by
        :func:`edge_values`.
    :param names: the name of each of the ``N`` rows of the data, such as ``table.index``. It is
        needed if nodes have names other than 0, 1, ...
    :raises ValueError: for names that repeat, that the graph lacks, or that the data lack. Cost:
        :math:`O(E \log E)`.
    """
    own, pairs = _named(graph)
    if own is None:
        edges, number = edges_of(graph)
        if names is not None:
            cure = "of a table of named edges make a graph, by networkx.from_pandas_edgelist"
            raise ValueError(f"names must be left out: this graph has numbers, not names; {cure}")
        return Neighborhood(edges, int(edges.max()) + 1 if number is None else number)
    rows = [*range(len(own))] if names is None else [*names]
    place = {name: number for number, name in enumerate(rows)}
    if len(place) < len(rows) or len({*own}) < len(own):
        twice = Counter(rows if len(place) < len(rows) else own).most_common(1)[0][0]
        raise ValueError(f"names must be different, got {twice!r} twice")
    lost, more = [n for n in own if n not in place], [*place.keys() - {*own}]
    # Nodes of NetworkX have no order of their own.
    moved = [n for n, row in zip(own, rows, strict=False) if n != row]
    if names is None and (lost or (moved and not hasattr(graph, "is_directed"))):
        name, cure = (lost or moved)[0], "give names=, the name of each row of your data"
        raise ValueError(f"graph has nodes with names, such as {name!r}: {cure}, like table.index")
    if lost or more:
        where, name = ("names lack", lost[0]) if lost else ("graph lacks", more[0])
        raise ValueError(f"{where} {name!r}: give one name for each node of the graph or subgraph")
    edges = torch.tensor([[place[j], place[i]] for j, i in pairs]).view(-1, 2).T
    return Neighborhood(edges, len(rows))


def _named(graph: Any) -> tuple[list | None, Iterable[tuple]]:
    """Names of nodes, and pairs of the names of a source and a target."""
    if hasattr(graph, "sindex"):  # geopandas
        _check_areas(graph)
        names = graph.index.tolist()
        ends = graph.sindex.query(graph.geometry, predicate="intersects")
        return names, [(names[j], names[i]) for j, i in ends.T.tolist()]
    if hasattr(graph, "id_order"):  # W of libpysal
        return [*graph.id_order], [(j, i) for i, near in graph.neighbors.items() for j in near]
    if hasattr(graph, "unique_ids"):  # Graph of libpysal
        return graph.unique_ids.tolist(), [(j, i) for i, j in graph.adjacency.index]
    if hasattr(graph, "is_directed") and hasattr(graph, "adj"):  # networkx
        return [*graph.nodes], graph.to_directed(as_view=True).edges()
    return None, ()


def _check_areas(table: Any) -> None:
    """Refuse rows without a geometry, and points, which touch nothing."""
    bad = table.geometry.isna() | table.geometry.is_empty
    if bad.any():
        name, cure = table.index[bad][0], "leave out rows that are None or empty"
        raise ValueError(f"graph has no geometry at {name!r}: {cure}")
    if len(table) and table.geom_type.isin(["Point", "MultiPoint"]).all():
        cure = "give libpysal.graph.Graph.build_knn(table, k=6) and names=table.index"
        raise ValueError(f"graph has points, which touch nothing: {cure}")


def _of_sparse(graph: Any) -> Tensor:
    from torch_geometric.utils import from_scipy_sparse_matrix, to_undirected

    if graph.ndim != 2 or graph.shape[0] != graph.shape[1]:
        raise ValueError(f"graph must have shape (N, N), got {tuple(graph.shape)}")
    if not np.isfinite(graph.data).all():
        cure = "each stored entry is an edge, so leave out entries that are none"
        raise ValueError(f"graph holds NaN or infinity: {cure}")
    return to_undirected(from_scipy_sparse_matrix(graph)[0].long(), num_nodes=graph.shape[0])


def edge_values(
    hood: Neighborhood, edge_index: Array, values: Array, *, fill_value: float | None = None
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
    :return: ``(..., num_edges)``, with the gradient of the values. Cost: :math:`O(E \log E)`.
    :raises ValueError: if ``edge_index`` and ``hood`` have different edges, for an edge that
        ``edge_index`` lists twice, and for wrong values.
    """
    check_all_rows(hood)
    num_sources = hood.num_sources if hood.bipartite else None
    edge_index = as_edge_index(edge_index, hood.num_nodes, num_sources, like=hood)
    shape = "...", edge_index.shape[1]
    values = as_expected("values", values, shape, like=hood, note="one per edge")
    expect_all("values", values, values < torch.inf, "not be NaN or +inf")
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
        (count > 1, "lists the edge {} twice: merge them by PyG's coalesce"),
    ):
        if wrong.any():
            edge = [int(end[wrong][0]) for end in (hood.source, hood.target)]
            raise ValueError(f"edge_index {error.format(edge)}")
    ordered = values.new_zeros(*values.shape[:-1], hood.num_edges).index_copy(-1, place, values)
    fill = 0 if fill_value is None else fill_value
    return torch.where(lost, fill if isinstance(fill, Integral) else float(fill), ordered)
