# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Weights of a graph's edges in StackedNMM; and several graphs at once."""

import networkx as nx
import pytest
import torch
from graphs import to_hood
from hypothesis import given
from hypothesis import strategies as st
from torch_geometric.data import Batch, Data
from torch_geometric.utils import coalesce, to_dense_adj

from pyro_nmm import Neighborhood
from pyro_nmm.models import PooledScores, StackedNMM, edge_weights


def drawn(seed, size=9, edges=20):
    """A directed graph with loops and edges that are listed twice, and positive weights."""
    torch.manual_seed(seed)
    return torch.randint(size, (2, edges)), torch.rand(edges) + 0.1


def none(size):
    return torch.zeros(size, dtype=torch.bool)


@given(seed=st.integers(0, 2**16))
def test_weights_are_those_of_the_dense_matrix(seed):
    edge_index, weight = drawn(seed)
    hood = Neighborhood(edge_index, 9)
    dense = torch.zeros(9, 9)
    for source, target, value in zip(*edge_index.tolist(), weight.tolist(), strict=True):
        dense[source, target] += value
    found = edge_weights(hood, edge_index, weight)
    for source, target, value in zip(hood.source, hood.target, found, strict=True):
        others = torch.cat([dense[:target, target], dense[target + 1 :, target]])
        mean = others[others > 0].mean() if others.any() else torch.tensor(1.0)
        expected = dense[source, target] if dense[source, target] > 0 else mean
        torch.testing.assert_close(value, expected)
    # As PyG adds the weights of edges that are listed twice.
    merged = to_dense_adj(*coalesce(edge_index, weight)[:1], edge_attr=None, max_num_nodes=9)
    assert ((merged[0] > 0) == (dense > 0)).all()


def problem():
    """Cliques that share a label, joined by as many edges that say nothing."""
    torch.manual_seed(0)
    inside = torch.tensor(list(nx.connected_caveman_graph(60, 5).to_directed().edges)).T
    across = torch.randint(300, (2, inside.shape[1]))
    y = torch.randint(3, (60,)).repeat_interleave(5)
    scores = torch.nn.functional.one_hot(y, 3) + 1.5 * torch.randn(300, 3)
    parts = torch.randperm(300).split([30, 60, 210])
    sets = [none(300).scatter(0, part, True) for part in parts]
    weight = torch.cat([torch.ones(inside.shape[1]), torch.full((across.shape[1],), 0.01)])
    return torch.cat([inside, across], 1), weight, scores, y, *sets


@pytest.mark.slow
def test_fit_and_update_use_weights():
    edge_index, weight, scores, y, train, held_out, test = problem()
    hood = Neighborhood(edge_index, 300)
    found = {}
    for name, value in (("none", None), ("equal", torch.full_like(weight, 7.0)), ("told", weight)):
        given_weight = value if value is None else edge_weights(hood, edge_index, value)
        # Edges that are listed twice weigh twice as much, unless all are set alike.
        given_weight = torch.full_like(given_weight, 7.0) if name == "equal" else given_weight
        torch.manual_seed(0)
        more = {"edge_weight": given_weight}
        stacked = StackedNMM(3).fit(hood, scores, y, train, held_out, num_steps=60, **more)
        stacked.update(hood, scores, y, train, held_out, num_steps=20, **more)
        posterior = stacked.posterior(hood, scores, y, train, new=held_out, **more)
        found[name] = posterior.marginals()[test, y[test]].log().mean().item()
    assert found["equal"] == pytest.approx(found["none"], abs=1e-6)
    assert found["told"] > found["none"] + 0.05


def test_several_graphs_are_one():
    """A graph's marginals are its own, whatever graphs are beside it."""
    graphs = [nx.cycle_graph(5), nx.path_graph(4)]
    data = [Data(edge_index=torch.stack([to_hood(graph).source, to_hood(graph).target]),
                 num_nodes=len(graph)) for graph in graphs]  # fmt: skip
    both = Batch.from_data_list(data)
    scores, y = torch.randn(9, 3), torch.full((9,), -1)
    stacked = StackedNMM(3)
    stacked.gamma.data.fill_(0.4)
    hood = Neighborhood(both.edge_index, both.num_nodes)
    found = stacked.mixture(hood, scores, y, none(9)).marginals().split([5, 4])
    for graph, own, marginals in zip(graphs, scores.split([5, 4]), found, strict=True):
        alone = stacked.mixture(to_hood(graph), own, y[: len(own)], none(len(own)))
        torch.testing.assert_close(alone.marginals(), marginals)


def test_bad_input():
    edge_index, weight = drawn(0)
    hood = Neighborhood(edge_index, 9)
    with pytest.raises(ValueError, match=r"edge_weight must have shape \(20,\)"):
        edge_weights(hood, edge_index, weight[:3])
    for bad in (-weight, 0 * weight, weight / 0, weight.long()):
        with pytest.raises(ValueError, match="finite positive floating-point"):
            edge_weights(hood, edge_index, bad)
    other = torch.tensor([[0, 3], [3, 0]])
    for first, second in ((edge_index, other), (other, edge_index)):
        with pytest.raises(ValueError, match="of another graph"):
            edge_weights(Neighborhood(first, 9), second, torch.ones(second.shape[1]))
    scores, y, known = torch.randn(9, 3), torch.zeros(9).long(), torch.arange(9) < 3
    right = edge_weights(hood, edge_index, weight)
    for bad, message in ((weight, r"edge_weight must have shape \(\d+,\)"), (-right, "positive")):
        with pytest.raises(ValueError, match=message):
            StackedNMM(3).mixture(hood, scores, y, known, bad)
        with pytest.raises(ValueError, match=message):
            StackedNMM(3).fit(hood, scores, y, known, ~known, edge_weight=bad)
    stacked = StackedNMM(3)
    as_array, expected = (stacked(hood, scores, y, known, w) for w in (right.numpy(), right))
    torch.testing.assert_close(as_array, expected)
    assert PooledScores(3).terms(hood, scores, y, known, right).isfinite().all()
