# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""A batch's loss is that of its seeds in the whole graph."""

import networkx as nx
import pyro
import pytest
import torch
from documents import load
from pyro import poutine
from pyro.infer import Trace_ELBO
from torch_geometric.data import Data
from torch_geometric.nn import GraphSAGE
from torch_geometric.utils import index_to_mask

from pyro_nmm import Neighborhood, NeighborMixture
from pyro_nmm.guides import AmortizedNMM
from pyro_nmm.models import NMMNetwork

CLASSES, SEEDS = 3, torch.tensor([41, 7, 0, 30])
EXAMPLE = load("examples/distributed.py")


def graph(num_nodes=60):
    """Directed, with hubs, a duplicate edge and a self-loop; two hops do not reach all nodes."""
    both = torch.tensor(list(nx.barabasi_albert_graph(num_nodes, 2, seed=0).edges)).T
    flip = torch.rand(both.shape[1]) < 0.5
    edges = torch.where(flip, both, both.flip(0))
    edges = torch.cat([edges, edges[:, :9].flip(0), edges[:, :1], torch.tensor([[3], [3]])], 1)
    x, y = torch.randn(num_nodes, 5), torch.randint(CLASSES, (num_nodes,))
    return Data(x=x, edge_index=edges, y=y, edge_weight=torch.rand(edges.shape[1]), name="kept")


class Sage(NMMNetwork):
    """Takes the example's inputs, and no weights."""

    def __init__(self):
        labels, attention = GraphSAGE(5, 8, 2, out_channels=CLASSES), GraphSAGE(5, 4, 1)
        super().__init__(labels, attention, num_classes=CLASSES, floor=0.1)

    def forward(self, hood, x, edge_index, *_):
        return super().forward(hood, x, edge_index)


def exact(network, data, nodes):
    """The log-probability of the labels of a few nodes, summed over all their choices."""
    hood = Neighborhood(data.edge_index, data.num_nodes)
    mix = NeighborMixture(hood, *network(hood, data.x, data.edge_index))
    return mix.log_marginal(nodes, data.y[nodes])


def gradient(loss, network):
    network.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in network.parameters() if p.grad is not None])


@pytest.mark.parametrize("num_hops", [1, 3])
def test_hops_by_loops(num_hops):
    """Seeds first, without draws; attributes go with their nodes and edges."""
    data, state = graph(), torch.get_rng_state()
    near = [set(SEEDS.tolist())]
    for _ in range(num_hops):
        near.append(near[-1] | {j for j, i in data.edge_index.T.tolist() if i in near[-1]})
    batch = EXAMPLE.seed_batch(data, SEEDS, num_hops)
    assert torch.equal(torch.get_rng_state(), state)
    assert batch.n_id.tolist() == SEEDS.tolist() + sorted(near[-1] - near[0])
    edges = [e for e, i in enumerate(data.edge_index[1].tolist()) if i in near[-2]]
    assert batch.e_id.tolist() == edges
    assert torch.equal(batch.n_id[batch.edge_index], data.edge_index[:, batch.e_id])
    assert torch.equal(batch.x, data.x[batch.n_id])
    assert torch.equal(batch.edge_weight, data.edge_weight[batch.e_id])
    assert (batch.batch_size, batch.name, data.num_nodes) == (4, "kept", 60)


def test_a_batch_is_exact():
    data, network = graph(), Sage()
    whole, of_seeds = exact(network, data, SEEDS), torch.arange(4)
    torch.testing.assert_close(exact(network, EXAMPLE.seed_batch(data, SEEDS, 3), of_seeds), whole)
    # The network's own hops count: a source at the border has an alpha of its features alone.
    assert abs(exact(network, EXAMPLE.seed_batch(data, SEEDS, 2), of_seeds) - whole) > 1e-3


def test_loss_and_gradient_are_those_of_the_whole_graph():
    """Draw by draw, if the graph has the seeds first, too: rows then have one order of edges."""
    data, network = graph(), Sage()
    nodes = torch.cat([SEEDS, (~index_to_mask(SEEDS, 60)).nonzero()[:, 0]])
    edges, seeds = nodes.argsort()[data.edge_index], torch.arange(len(SEEDS))
    data = Data(x=data.x[nodes], edge_index=edges, y=data.y[nodes], edge_weight=data.edge_weight)
    program = AmortizedNMM(Neighborhood(data.edge_index, data.num_nodes), network)
    model, guide = (poutine.scale(part, 1 / 4) for part in (program.model, program.guide))
    elbo = Trace_ELBO(4, max_plate_nesting=0, vectorize_particles=True)
    pyro.set_rng_seed(1)
    known = {"y": data.y, "observed": index_to_mask(seeds, 60)}
    whole = elbo.differentiable_loss(model, guide, data.x, data.edge_index, **known)
    wanted = gradient(whole, network)
    pyro.set_rng_seed(1)
    loss = EXAMPLE.SeedLoss(network, 4)(EXAMPLE.seed_batch(data, seeds, 3), total=4)
    torch.testing.assert_close(loss, whole)
    torch.testing.assert_close(gradient(loss, network), wanted)


def test_a_batch_without_seeds():
    """It adds nothing, but every parameter has a gradient, for which other processes wait."""
    network, batch = Sage(), EXAMPLE.seed_batch(graph(), SEEDS[:0], 3)
    value = EXAMPLE.SeedLoss(network, 4)(batch, total=2)
    assert value == 0
    assert torch.equal(
        gradient(value, network), torch.zeros(sum(map(torch.numel, network.parameters())))
    )
