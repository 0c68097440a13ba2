# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Graphs of other libraries, as ``graph=`` takes them."""

import networkx as nx
import numpy as np
import pandas as pd
import pytest
import torch
from scipy.sparse import csr_matrix
from torch_geometric.data import Data, HeteroData

from pyro_nmm import Neighborhood, sources
from pyro_nmm.edges import edges_of

ONE_WAY = torch.tensor([[0, 1, 3], [1, 2, 0]])
EDGES = torch.cat([ONE_WAY, ONE_WAY.flip(0)], 1)
GRAPH = nx.Graph()
GRAPH.add_nodes_from([3, 0, 1, 2])  # rows are named by ids, whatever the order of the nodes
GRAPH.add_edges_from(ONE_WAY.T.tolist())
MATRIX = csr_matrix((np.array([0.0, -1.0, 2.0]), ONE_WAY.numpy()), (4, 4))


def changed(value):
    found = MATRIX.copy()
    found.data[1] = value
    return found


@pytest.mark.parametrize(
    ("graph", "size"),
    [
        (GRAPH, 4),
        (nx.MultiGraph(GRAPH), 4),
        (MATRIX, 4),
        (MATRIX.tolil(), 4),
        (Data(edge_index=EDGES, num_nodes=4), 4),
        (Data(np.ones((4, 2)), EDGES.numpy()), 4),
        (Neighborhood(EDGES, 4), 4),
        (pd.DataFrame({"weight": 1.0, "source": EDGES[0], "target": EDGES[1]}), None),
        (EDGES, None),
        (EDGES.tolist(), None),
    ],
)
def test_the_same_edges(graph, size):
    """Stored zeros and negative numbers are edges."""
    edges, found = edges_of(graph)
    assert found == size
    assert torch.equal(Neighborhood(edges, 4).source, Neighborhood(EDGES, 4).source)


@pytest.mark.parametrize(
    ("graph", "match"),
    [
        (changed(np.nan), r"graph holds nan at \(1, 2\): each stored entry is an edge"),
        (MATRIX[:2], r"graph must have shape \(N, N\), got \(2, 4\)"),
        (np.eye(4), r"got \(4, 4\): pass scipy.sparse.csr_array\(graph\)"),
        (EDGES.T, r"graph must have shape \(2, E\), got \(6, 2\): pass its transpose"),
        (nx.relabel_nodes(GRAPH, {0: "a"}), "nodes 0..3, .* got 'a': networkx.relabel_nodes"),
        (nx.relabel_nodes(GRAPH, {0: 4}), "nodes 0..3, .* got 4: networkx.relabel_nodes"),
        (pd.DataFrame(EDGES.T.numpy()), r"columns source and target, got \[0, 1\]"),
        (
            pd.DataFrame({"source": ["a"], "target": ["b"]}),
            "source and target of graph, rows or names in the index",
        ),
        (Data(num_nodes=4), "graph has no edge_index"),
        (HeteroData(), "graph must be PyG's Data, .* got .*HeteroData"),
        (sources.grid(2, 2, stride=1), "graph must hold edges between all of its nodes"),
        (sources.hops(EDGES, 4), "return a pair, of which it is the first"),
    ],
)
def test_what_is_refused(graph, match):
    with pytest.raises(ValueError, match=match):
        edges_of(graph)


NAMES = ["d", "a", "c", "b"]  # of rows
NAMED = nx.relabel_nodes(GRAPH, dict(enumerate(NAMES)))
BOTH = pd.DataFrame({"source": EDGES[0], "target": EDGES[1]})


def rows(index):
    return pd.DataFrame({"x": range(4)}, index=index)


def by_row(graph, data):
    edges, size = edges_of(graph, data)
    assert size in (None, 4)
    return Neighborhood(edges, 4).source.tolist()


@pytest.mark.parametrize(
    "index",
    [NAMES, [7, 3, 9, 5], [1, 2, 3, 4], [(0, 0), (1, 0), (0, 1), (1, 1)]],
)
def test_names_in_an_index(index):
    """Nodes are rows of their names, whatever the order of the graph's nodes."""
    wanted = Neighborhood(EDGES, 4).source.tolist()
    names = dict(enumerate(index))
    graph = nx.relabel_nodes(GRAPH, names)
    data = rows(pd.Index(index, tupleize_cols=False))
    assert by_row(graph, data) == wanted
    assert by_row(graph.to_directed(), data["x"]) == wanted
    listed = pd.DataFrame([[names[i], names[j]] for i, j in EDGES.T.tolist()], columns=[*BOTH])
    assert by_row(listed, data) == wanted
    if index != [1, 2, 3, 4]:  # 1, 2 and 3 may be rows
        graph.remove_node(names[3])  # a row without edges is no node of many graphs
        rest = EDGES[:, (EDGES != 3).all(0)]
        assert by_row(graph, data) == Neighborhood(rest, 4).source.tolist()


def test_cure_of_names():
    """The error's cure gives the edges between rows, without an index and with any."""
    numbers = {name: row for row, name in enumerate(NAMES)}
    for data in (None, np.zeros(4), NAMES, rows(range(4)), rows([*"wxyz"]), rows([*"aabc"])):
        with pytest.raises(ValueError, match=r"relabel_nodes\(graph, {name: row}\) with the row"):
            edges_of(NAMED, data)
        cured = nx.relabel_nodes(NAMED, numbers)
        assert by_row(cured, data) == Neighborhood(EDGES, 4).source.tolist()


@pytest.mark.parametrize(
    ("graph", "index"), [(GRAPH, [2, 0, 1, 3]), (BOTH, [2, 0, 1, 3]), (BOTH[:2], [1, 0, 2, 5])]
)
def test_rows_or_names(graph, index):
    """Numbers that are rows and other rows' names are refused, until the index is the rows'."""
    with pytest.raises(ValueError, match=r"a row number and the index of row .*reset_index\(drop"):
        edges_of(graph, rows(index))
    edges = edges_of(graph, rows(index).reset_index(drop=True))[0]
    assert torch.equal(edges, edges_of(graph)[0])
