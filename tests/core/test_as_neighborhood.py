# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""``as_neighborhood`` of graphs of other packages, by the packages themselves."""

import networkx as nx
import numpy as np
import pytest
import scipy.sparse
import torch
from torch_geometric.data import Data

from pyro_nmm import Neighborhood, as_neighborhood

NAMES = ["Zug", "Bern", "Uri", "Jura"]  # rows of the data
PAIRS = [("Bern", "Zug"), ("Uri", "Bern"), ("Uri", "Zug")]
EDGES = torch.tensor([[1, 0, 2, 1, 2, 0], [0, 1, 1, 2, 0, 2]])


def same(hood, edges=EDGES):
    other = Neighborhood(edges, 4)
    assert torch.equal(hood.source, other.source)
    assert torch.equal(hood.ptr, other.ptr)


def squares():
    """Four places, three of them around one corner, and one alone; rows in an order of theirs."""
    geopandas = pytest.importorskip("geopandas")
    box = pytest.importorskip("shapely.geometry").box
    places = {
        "Uri": box(0, 0, 1, 1),
        "Jura": box(5, 5, 6, 6),
        "Zug": box(1, 1, 2, 2),
        "Bern": box(0, 1, 1, 2),
    }
    return geopandas.GeoDataFrame(geometry=[*places.values()], index=[*places])


def test_networkx():
    graph = nx.Graph(PAIRS)
    graph.add_node("Jura")
    same(as_neighborhood(graph, NAMES))
    numbered = nx.relabel_nodes(graph, {name: k for k, name in enumerate(NAMES)})
    same(as_neighborhood(numbered))
    directed = nx.DiGraph(PAIRS)
    directed.add_node("Jura")
    same(as_neighborhood(directed, np.array(NAMES)), torch.tensor([[1, 2, 2], [0, 1, 0]]))
    several = nx.MultiGraph([*PAIRS, PAIRS[0]])
    several.add_node("Jura")
    same(as_neighborhood(several, NAMES))


def test_geopandas():
    same(as_neighborhood(squares(), NAMES))
    same(as_neighborhood(squares().loc[NAMES].reset_index(drop=True)))


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # of an island
def test_libpysal():
    graph = pytest.importorskip("libpysal.graph").Graph
    weights = pytest.importorskip("libpysal.weights")
    same(as_neighborhood(graph.build_contiguity(squares(), rook=False), NAMES))
    same(as_neighborhood(weights.Queen.from_dataframe(squares(), use_index=True), NAMES))
    directed = weights.W({"Zug": ["Bern"], "Bern": [], "Uri": [], "Jura": []})
    same(as_neighborhood(directed, NAMES), torch.tensor([[1], [0]]))


def test_graphs_without_names():
    matrix = scipy.sparse.coo_array((np.ones(3), ([0, 1, 0], [1, 2, 2])), shape=(4, 4))
    same(as_neighborhood(matrix))
    same(as_neighborhood(Data(edge_index=EDGES, num_nodes=4)))
    assert as_neighborhood(EDGES).num_nodes == 3
    with pytest.raises(ValueError, match="names must be left out"):
        as_neighborhood(matrix, NAMES)


@pytest.mark.parametrize(
    ("names", "error"),
    [
        (None, "graph has nodes with names, such as 'Bern': give names="),
        (NAMES[:3], "names lack 'Jura'"),
        ([*NAMES, "Wallis"], "graph lacks 'Wallis'"),
        ([*NAMES, "Zug"], "names must be different, got 'Zug' twice"),
    ],
)
def test_names_that_do_not_match(names, error):
    graph = nx.Graph(PAIRS)
    graph.add_node("Jura")
    with pytest.raises(ValueError, match=error):
        as_neighborhood(graph, names)


def test_rows_in_another_order_than_their_numbers():
    table = squares().loc[NAMES].reset_index(drop=True)
    moved = table.loc[[2, 0, 1, 3]]
    same(as_neighborhood(moved, [0, 1, 2, 3]))
    with pytest.raises(ValueError, match="graph has nodes with names, such as 2: give names="):
        as_neighborhood(moved)
    graph = nx.Graph([(1, 0), (2, 1), (2, 0)])
    graph.add_node(3)
    same(as_neighborhood(graph))


def test_rows_that_touch_nothing():
    table = squares()
    with pytest.raises(ValueError, match=r"points, which touch nothing: give .*build_knn"):
        as_neighborhood(table.set_geometry(table.centroid), NAMES)
    table.loc["Uri", "geometry"] = None
    with pytest.raises(ValueError, match=r"graph has no geometry at .Uri.: leave out rows"):
        as_neighborhood(table, NAMES)


def test_rows_with_names_need_them():
    for names, error in (
        (None, "'Uri': give names="),
        (NAMES[:3], "'Jura'"),
        ([*NAMES, "x"], "'x'"),
    ):
        with pytest.raises(ValueError, match=error):
            as_neighborhood(squares(), names)
