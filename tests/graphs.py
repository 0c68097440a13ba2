# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Graphs for the tests."""

import itertools

import networkx as nx
import torch

from pyro_nmm import Neighborhood


def labellings(num_nodes, num_classes=2):
    """``(C^N, N)``: every labelling of some nodes."""
    return torch.tensor(list(itertools.product(range(num_classes), repeat=num_nodes)))


def to_hood(graph, directed=False, generator=None):
    """A networkx graph, or one random orientation of each of its edges."""
    edges = torch.tensor(list(graph.edges), dtype=torch.long).view(-1, 2).T
    if directed:
        flip = torch.rand(edges.shape[1], generator=generator) < 0.5
        edges = torch.where(flip, edges.flip(0), edges)
    else:
        edges = torch.cat([edges, edges.flip(0)], 1)
    return Neighborhood(edges, graph.number_of_nodes())


def connected_graphs(max_nodes=5):
    """Every connected graph with at most ``max_nodes`` nodes, up to isomorphism."""
    for graph in nx.graph_atlas_g():
        if 0 < len(graph) <= max_nodes and nx.is_connected(graph):
            yield graph


def parameters(hood, num_classes, batch=(), scale=1.5):
    """Random alpha and logits."""
    alpha = (scale * torch.randn(*batch, hood.num_nodes, num_classes)).exp()
    return alpha, scale * torch.randn(*batch, hood.num_edges)


def star(leaves=4):
    return to_hood(nx.star_graph(leaves))


def house():
    return to_hood(nx.house_graph())


def two_triangles():
    """Two components."""
    return to_hood(nx.disjoint_union(nx.cycle_graph(3), nx.path_graph(2)))
