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
GRAPH = nx.Graph(ONE_WAY.T.tolist())
MATRIX = csr_matrix((np.array([0.0, -1.0, 2.0]), ONE_WAY.numpy()), (4, 4))


def changed(value):
    found = MATRIX.copy()
    found.data[1] = value
    return found


@pytest.mark.parametrize(
    ("graph", "size"),
    [
        (MATRIX, 4),
        (MATRIX.tolil(), 4),
        (Data(edge_index=EDGES, num_nodes=4), 4),
        (Data(np.ones((4, 2)), EDGES.numpy()), 4),
        (Neighborhood(EDGES, 4), 4),
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
        (changed(np.nan), r"graph holds NaN or infinity: each stored entry is an edge"),
        (MATRIX[:2], r"graph must have shape \(N, N\), got \(2, 4\)"),
        (np.eye(4), r"graph must have shape \(2, num_edges\), .*dense_to_sparse.*, got \(4, 4\)"),
        (EDGES.T, r"shape \(2, num_edges\), sources and targets .*, got \(6, 2\)"),
        (GRAPH, r"graph must hold pairs of node ids, got Graph .*as_neighborhood"),
        (pd.DataFrame(EDGES.T.numpy()), r"shape \(2, num_edges\), sources and .*, got \(6, 2\)"),
        (Data(num_nodes=4), "graph has no edge_index"),
        (HeteroData(), "graph must be .* got .*HeteroData"),
        (sources.grid(2, 2, stride=1), "graph must hold edges between all of its nodes"),
        (sources.hops(EDGES, 4), "graph must be a tensor, an array or a nested list .*tuple"),
    ],
)
def test_what_is_refused(graph, match):
    with pytest.raises(ValueError, match=match):
        edges_of(graph)
