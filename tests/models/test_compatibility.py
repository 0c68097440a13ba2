# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""One matrix for all edges between nodes: counted, and learned."""

import networkx as nx
import pyro
import pytest
import torch
from graphs import house, shared_sources, to_hood
from torch_geometric.data import Data

from benchmarks.shared.backbones import mlp
from pyro_nmm import NeighborMixture
from pyro_nmm.guides import fit_nmm
from pyro_nmm.models import Compatibility, FreeNMM, NMMNetwork, compatibility


def test_counts_of_edges():
    """By a loop over edges, between observed nodes alone."""
    hood, y = house(), torch.tensor([0, 1, 2, 1, 0])
    observed = torch.tensor([True, True, False, True, True])
    counts = torch.zeros(3, 3)
    for j, i in zip(hood.source.tolist(), hood.target.tolist(), strict=True):
        if i != j and observed[i] and observed[j]:
            counts[y[j], y[i]] += 1
    share = torch.tensor([3.0, 3.0, 1.0]) / 7
    expected = (counts + share) / (counts.sum(1, keepdim=True) + 1)
    torch.testing.assert_close(compatibility(hood, y, observed, 3), expected)


def test_nodes_keep_their_own_label():
    hood = house()
    network = Compatibility(FreeNMM(hood, 3), 3)
    with torch.no_grad():
        network.scores.copy_(torch.eye(3).mul(0.7).add(0.1).log())
    relabel = network(hood)[2]
    own = hood.source == hood.target
    assert torch.equal(relabel[own], torch.eye(3).expand(5, 3, 3))
    expected = torch.tensor([0.8, 0.1, 0.1])
    torch.testing.assert_close(relabel[~own][:, 0], expected.expand(12, 3))
    with pytest.raises(ValueError, match="hood has sources that are no nodes"):
        network(shared_sources())


@pytest.mark.slow
def test_learns_that_neighbours_differ():
    """
    A bipartite graph, each side with a label of its own, and features that say nothing: known
    labels tell of their neighbours through the matrix, and of theirs in turn without it.
    """
    torch.manual_seed(0)
    graph = nx.bipartite.random_graph(200, 200, 0.02, seed=1)
    y = (torch.arange(400) >= 200).long()
    hood, part = to_hood(graph), torch.randperm(400)
    sizes = {"train_mask": part[:200], "val_mask": part[200:300], "test_mask": part[300:]}
    masks = {name: torch.isin(torch.arange(400), nodes) for name, nodes in sizes.items()}
    x, edges = torch.ones(400, 1, dtype=torch.float), torch.stack([hood.source, hood.target])
    data = Data(x=x, edge_index=edges, y=y, **masks)
    found = {}
    for relabels in (False, True):
        pyro.set_rng_seed(1)
        network = NMMNetwork(
            mlp(1, 2), mlp(1, 8, attention=True), num_classes=2, link="exp", floor=0.1
        )
        if relabels:
            network = Compatibility(network, 2)
        network = network.float()
        mix, _ = fit_nmm(network, data, hood, num_steps=200, lr=0.05)
        assert isinstance(mix, NeighborMixture)
        posterior = mix.condition(y, masks["train_mask"], num_samples=16)
        right = posterior.marginals().argmax(1)[masks["test_mask"]] == y[masks["test_mask"]]
        found[relabels] = right.double().mean()
    assert found[True] > 0.9 > 0.8 > found[False]
