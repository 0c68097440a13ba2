# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The bound of each graph of a batch, against PyG's induced subgraphs."""

import torch
from bounds import near
from graphs import parameters
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
    edges = torch.stack([mix.hood.source, mix.hood.target])
    edges, logits = subgraph(nodes, edges, mix.logits, relabel_nodes=True)
    return NeighborMixture(Neighborhood(edges, int(nodes.sum())), mix.alpha[nodes], logits)


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
