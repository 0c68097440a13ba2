# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Induced subgraphs, and the bound of each graph of a batch."""

import pytest
import torch
from bounds import near
from graphs import house, parameters, shared_sources, star, two_triangles
from torch_geometric.data import Batch, Data
from torch_geometric.utils import scatter, subgraph

from pyro_nmm import Neighborhood, NeighborMixture

GRAPHS = [[[0, 1, 1, 2], [1, 0, 2, 1]], [[0], [1]], [[0, 1, 2], [1, 2, 0]]]


def joined():
    """A PyG batch of three graphs, and an NMM over all its nodes."""
    sizes = 3, 2, 3
    data = [
        Data(edge_index=torch.tensor(edges), num_nodes=size)
        for edges, size in zip(GRAPHS, sizes, strict=True)
    ]
    batch = Batch.from_data_list(data)
    hood = Neighborhood(batch.edge_index, batch.num_nodes)
    return batch, NeighborMixture(hood, *parameters(hood, 2))


def alone(mix, nodes):
    part = mix.hood.subgraph(nodes)
    ids = nodes.nonzero()[:, 0] if nodes.dtype == torch.bool else nodes.sort().values
    return NeighborMixture(part, mix.alpha[ids], mix.logits[part.within])


def test_bound_of_each_graph(kernels):
    """10,000 samples notice a likelihood that is off by a tenth."""
    batch, mix = joined()
    y = torch.randint(2, (8,))
    q = mix.choices(y)
    samples = scatter(q.log_terms(q.sample((10_000,))), batch.batch[q.order], -1)
    assert samples.shape == (10_000, 3)
    for number in range(3):
        nodes = batch.batch == number
        near(samples[:, number].exp(), alone(mix, nodes).log_prob(y[nodes]).exp())


@pytest.mark.parametrize("graph", [house, star, two_triangles])
@pytest.mark.parametrize("kind", ["mask", "ids"])
def test_subgraph_is_that_of_pyg(graph, kind):
    hood, mask = graph(), torch.tensor([True, False, True, True, False])
    nodes = mask if kind == "mask" else torch.tensor([3, 0, 2])
    values = torch.randn(2, hood.num_edges)
    part = hood.subgraph(nodes)
    edges = torch.stack([hood.source, hood.target])
    wanted, kept = subgraph(mask, edges, values.T, relabel_nodes=True, num_nodes=5)
    assert torch.equal(torch.stack([part.source, part.target]), wanted)
    torch.testing.assert_close(values[:, part.within], kept.T)
    assert (part.num_nodes, part.num_rows, part.num_sources) == (3, 3, 3)
    again = Neighborhood(wanted, 3)
    assert torch.equal(again.source, part.source)
    assert torch.equal(again.ptr, part.ptr)
    assert torch.equal(part.edge, torch.arange(part.num_edges))


def test_subgraph_keeps_places():
    hood = shared_sources()
    mix, nodes = NeighborMixture(hood, *parameters(hood, 2)), torch.tensor([1, 3, 4])
    part = hood.subgraph(nodes)
    assert (part.num_nodes, part.num_sources) == (3, 3)
    own, y = NeighborMixture(part, mix.alpha, mix.logits[part.within]), torch.tensor([0, 1, 1])
    torch.testing.assert_close(own.log_prob(y), mix.log_marginal(nodes, y))
