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
    alpha = (scale * torch.randn(*batch, hood.num_sources, num_classes)).exp()
    return alpha, scale * torch.randn(*batch, hood.num_edges)


def star(leaves=4):
    return to_hood(nx.star_graph(leaves))


def house():
    return to_hood(nx.house_graph())


def two_triangles():
    """Two components."""
    return to_hood(nx.disjoint_union(nx.cycle_graph(3), nx.path_graph(2)))


def random_sources(num_nodes, num_sources, generator=None):
    """Every node reaches one source at least, and each of the others with probability .4."""
    reach = torch.rand(num_nodes, num_sources, generator=generator) < 0.4
    sure = torch.randint(num_sources, (num_nodes,), generator=generator)
    reach[torch.arange(num_nodes), sure] = True
    return Neighborhood(reach.nonzero().flip(1).T, num_nodes, num_sources)


def shared_sources():
    """Five nodes that take their labels from three places."""
    edges = [[0, 0, 1, 0, 2, 1, 2, 1], [0, 1, 1, 2, 2, 3, 3, 4]]
    return Neighborhood(torch.tensor(edges), num_nodes=5, num_sources=3)
