# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Posteriors of posteriors, of labels that nothing can show, and parts of graphs that move."""

import networkx as nx
import pytest
import torch
from graphs import parameters, to_hood

from pyro_nmm import Neighborhood, NeighborMixture


def mixture(graph, num_classes=2, relabel=None):
    hood = to_hood(graph)
    return NeighborMixture(hood, *parameters(hood, num_classes), relabel)


def test_labels_that_are_known_already():
    """They change nothing, and ``num_samples`` draws components as ever."""
    mix, y = mixture(nx.path_graph(3)), torch.tensor([1, 0, 0])
    known = torch.tensor([True, False, False])
    for posterior in (mix.condition(y, known), mix.condition(y, known, num_samples=4)):
        assert posterior.condition(y, known) is posterior
        drawn = posterior.condition(y, known, num_samples=5000)
        assert len(drawn.components) == 5000
        torch.testing.assert_close(drawn.marginals(), posterior.marginals(), atol=0.05, rtol=0)


def test_unequal_weights_stay_known():
    """Components whose weights once changed are reweighted by later labels, unless told not to."""
    mix, y = mixture(nx.path_graph(4)), torch.ones(4, dtype=torch.long)
    last = torch.arange(4) == 3
    first = mix.condition(y, ~last, 50, weighted=True)
    second = first.condition(y, last, weighted=False)
    assert second.components.log_weights.unique().numel() > 1
    assert second.weighted
    assert not first.condition(y, last, num_samples=9, weighted=False).weighted


def test_more_components_are_no_larger_sum():
    """A sum over borrowed labels is taken in blocks of components."""
    hood = Neighborhood.grid(5, 5)
    relabel = torch.rand(hood.num_edges, 3, 3).softmax(-1)
    mix = NeighborMixture(hood, *parameters(hood, 3), relabel)
    y, nodes = torch.randint(3, (25,)), torch.tensor([1, 3, 5, 15])
    known = torch.arange(25) % 2 == 0
    torch.manual_seed(0)
    many = mix.condition(y, known, num_samples=400)
    found = many.log_marginal(nodes, y[nodes])
    few = mix.condition(y, known, num_samples=40).log_marginal(nodes, y[nodes])
    assert abs(found - few) < 0.3


@pytest.mark.parametrize("num_samples", [None, 4])
def test_a_label_that_no_edge_shows(num_samples):
    graph = nx.path_graph(3)
    hood = to_hood(graph)
    shown = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.5, 0.5, 0.0]])
    mix = mixture(graph, 3, shown.expand(hood.num_edges, 3, 3))
    y, known = torch.tensor([2, 0, 1]), torch.tensor([True, False, False])
    with pytest.raises(ValueError, match="rules out every label of node 0"):
        mix.condition(y, known, num_samples)


def test_a_part_keeps_its_edges_on_another_device(device):
    part = Neighborhood.grid(3, 3).subgraph(torch.tensor([0, 1, 2]))
    assert torch.equal(part.to(device).within.cpu(), part.within)


@pytest.mark.parametrize("kind", ["path", "random"])
def test_components_take_few_rounds(kind, monkeypatch):
    """Logarithmically many, however the nodes of a long path are numbered."""
    size = 2000
    place = torch.randperm(size)
    if kind == "path":  # ascending from both ends inwards
        place = torch.cat([torch.arange(0, size, 2), torch.arange(1, size, 2).flip(0)])
    edges = torch.stack([place[:-1], place[1:]])
    hood = Neighborhood(torch.cat([edges, edges.flip(0)], 1), size)
    part, rounds = hood.restrict(torch.rand(size) < 0.9), []
    equal = torch.equal

    def counted(*pair):
        rounds.append(pair)
        return equal(*pair)

    monkeypatch.setattr(torch, "equal", counted)
    for each in (hood, part):
        rounds.clear()
        label = each.components()
        assert len(rounds) < 20
        monkeypatch.undo()
        graph = nx.Graph()
        graph.add_nodes_from(("row", row) for row in range(each.num_rows))
        pairs = zip(each.row.tolist(), each.source.tolist(), strict=True)
        graph.add_edges_from((("row", row), ("source", source)) for row, source in pairs)
        whole = [
            [n for kind, n in part if kind == "row"] for part in nx.connected_components(graph)
        ]
        for rows in filter(None, whole):
            assert len(label[rows].unique()) == 1
        assert len(label.unique()) == sum(map(bool, whole))
        monkeypatch.setattr(torch, "equal", counted)
