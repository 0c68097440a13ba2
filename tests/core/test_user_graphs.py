# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Graphs of other libraries, as ``graph=`` takes them."""

import networkx as nx
import numpy as np
import pandas as pd
import pytest
import torch
from scipy.sparse import coo_array, csr_matrix
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
        (GRAPH.to_directed(), 4),
        (nx.MultiGraph(GRAPH), 4),
        (MATRIX, 4),
        (MATRIX.tolil(), 4),
        (coo_array(MATRIX), 4),
        (Data(edge_index=EDGES, num_nodes=4), 4),
        (Data(edge_index=EDGES.numpy(), num_nodes=4), 4),
        (Data(np.ones((4, 2)), EDGES.numpy()), 4),
        (Neighborhood(EDGES, 4), 4),
        (pd.DataFrame({"weight": 1.0, "source": EDGES[0], "target": EDGES[1]}), None),
        (EDGES, None),
        (EDGES.int(), None),
        (EDGES.tolist(), None),
        (EDGES.numpy()[::-1], None),
        (EDGES.numpy().astype(object), None),
        (EDGES.numpy().astype(">i4"), None),
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
        (changed(np.inf), "graph holds inf at"),
        (MATRIX[:2], r"graph must have shape \(N, N\), got \(2, 4\)"),
        (np.eye(4), r"got \(4, 4\): pass scipy.sparse.csr_array\(graph\)"),
        (EDGES.T, r"graph must have shape \(2, E\), got \(6, 2\): pass its transpose"),
        (torch.eye(4).to_sparse(), "graph must hold pairs of node ids, got a sparse matrix"),
        (EDGES.double(), "graph must hold integers"),
        (nx.relabel_nodes(GRAPH, {0: "a"}), "nodes 0..3, got 'a': networkx.convert_node_labels"),
        (pd.DataFrame(EDGES.T.numpy()), r"columns source and target, got \[0, 1\]"),
        (pd.DataFrame({"source": ["a"], "target": ["b"]}), "source and target of graph must be"),
        (Data(num_nodes=4), "graph has no edge_index"),
        (HeteroData(), "graph must be PyG's Data, .* got .*HeteroData"),
        (sources.grid(2, 2, stride=1), "graph must hold edges between all of its nodes"),
        (sources.hops(EDGES, 4), "return a pair, of which it is the first"),
    ],
)
def test_what_is_refused(graph, match):
    with pytest.raises(ValueError, match=match):
        edges_of(graph)
