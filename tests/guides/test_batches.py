# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""A batch's loss is that of its seeds in the whole graph, and one that is cut is refused."""

import copy
import warnings
from collections import Counter

import networkx as nx
import pyro
import pytest
import torch
from pyro import poutine
from pyro.infer import Trace_ELBO
from pyro.nn import PyroModule, PyroSample
from scipy.stats import chisquare
from torch_geometric.data import Data
from torch_geometric.loader import NeighborLoader
from torch_geometric.nn import GCN, GraphSAGE
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.typing import WITH_PYG_LIB, WITH_TORCH_SPARSE
from torch_geometric.utils import k_hop_subgraph

from pyro_nmm import Neighborhood, NeighborMixture
from pyro_nmm.datasets import seed_batch, with_in_degree
from pyro_nmm.guides import AmortizedNMM, SeedLoss
from pyro_nmm.models import Compatibility, NMMNetwork
from pyro_nmm.models.backbones import gcn

CLASSES, SEEDS = 3, torch.tensor([41, 7, 0, 30])


def graph(num_nodes=60):
    """Directed, with hubs, a duplicate edge and a self-loop; two hops do not reach all nodes."""
    both = torch.tensor(list(nx.barabasi_albert_graph(num_nodes, 2, seed=0).edges)).T
    flip = torch.rand(both.shape[1]) < 0.5
    edges = torch.where(flip, both, both.flip(0))
    edges = torch.cat([edges, edges[:, :9].flip(0), edges[:, :1], torch.tensor([[3], [3]])], 1)
    x, y = torch.randn(num_nodes, 5), torch.randint(CLASSES, (num_nodes,))
    return with_in_degree(Data(x=x, edge_index=edges, y=y, name="kept"))


def sage(**options):
    labels = GraphSAGE(5, 8, 2, out_channels=CLASSES, **options)
    return NMMNetwork(labels, GraphSAGE(5, 4, 1, **options), num_classes=CLASSES, floor=0.1)


def gcns(**options):
    labels = GCN(5, 8, 2, out_channels=CLASSES, **options)
    return NMMNetwork(labels, GCN(5, 4, 1, **options), num_classes=CLASSES, floor=0.1)


def weighted(data):
    """The remedy for degrees that end at a batch's rim."""
    data = copy.copy(data)
    data.edge_index, data.edge_weight = gcn_norm(
        data.edge_index, num_nodes=data.num_nodes, dtype=data.x.dtype
    )
    return data


def exact(network, data, nodes, inputs=("x", "edge_index")):
    """The log-probability of the labels of a few nodes, summed over all their choices."""
    hood = Neighborhood(data.edge_index, data.num_nodes)
    mix = NeighborMixture(hood, *network(hood, *(data[name] for name in inputs)))
    return mix.log_marginal(nodes, data.y[nodes])


def of_batch(network, data, num_hops, **options):
    return exact(network, seed_batch(data, SEEDS, num_hops), torch.arange(4), **options)


def gradient(loss, network):
    network.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in network.parameters() if p.grad is not None])


def test_entries_of_a_batch():
    """Seeds come first, and attributes go with their nodes and edges."""
    data = graph()
    data.edge_attr = torch.arange(data.num_edges)
    batch = seed_batch(data, SEEDS, num_hops=2)
    assert batch.num_nodes == len(batch.n_id) < 60
    assert torch.equal(batch.n_id[:4], SEEDS)
    assert batch.batch_size == 4
    assert torch.equal(batch.n_id[batch.edge_index], data.edge_index[:, batch.e_id])
    for name in ("x", "y", "in_degree"):
        assert torch.equal(batch[name], data[name][batch.n_id])
    assert torch.equal(batch.edge_attr, batch.e_id)
    assert batch.name == "kept"
    assert data.num_nodes == 60  # what was given is as it was


@pytest.mark.parametrize("num_hops", [1, 2, 3, 5])
def test_whole_hops_are_those_of_pyg(num_hops):
    """Nodes and edges in their order, without draws."""
    for seed in range(20):
        torch.manual_seed(seed)
        data = Data(edge_index=torch.randint(40, (2, 50)), num_nodes=40)
        seeds, state = torch.randperm(40)[:5], torch.get_rng_state()
        near, inner = (
            k_hop_subgraph(seeds, number, data.edge_index, num_nodes=40)[0]
            for number in (num_hops, num_hops - 1)
        )
        others = near[~torch.isin(near, seeds)]
        inside = torch.isin(data.edge_index[1], inner)
        batch = seed_batch(data, seeds, num_hops)
        assert torch.equal(torch.get_rng_state(), state)
        assert torch.equal(batch.n_id, torch.cat([seeds, others]))
        assert torch.equal(batch.e_id, inside.nonzero()[:, 0])
        more = seed_batch(data, seeds, num_hops, num_neighbors=50)  # more than there are
        assert torch.equal(more.n_id, batch.n_id)
        assert torch.equal(more.e_id, batch.e_id)


def test_sampled_hops():
    """All edges into seeds, few into others, and the loss is that of a graph with these alone."""
    data, network = graph(), sage()
    degree = torch.bincount(data.edge_index[1], minlength=60)
    for seed in range(20):
        torch.manual_seed(seed)
        batch = seed_batch(data, SEEDS, 3, num_neighbors=2)
        torch.manual_seed(seed)
        again = seed_batch(data, SEEDS, 3, num_neighbors=2)
        assert torch.equal(again.e_id, batch.e_id)
        assert torch.equal(batch.n_id[batch.edge_index], data.edge_index[:, batch.e_id])
        found = torch.bincount(batch.edge_index[1], minlength=batch.num_nodes)
        whole = degree[batch.n_id]
        assert torch.equal(found[:4], whole[:4])
        assert (found[4:] <= 2).all()
        near = seed_batch(batch, torch.arange(4), 2).n_id  # whose edges were drawn
        near = near[near >= 4]
        assert torch.equal(found[near], whole[near].clamp(max=2))
        hood = Neighborhood(batch.edge_index, batch.num_nodes)
        assert torch.equal(hood.ptr.diff()[:4] - 1, data.in_degree[SEEDS])
    assert SeedLoss(network)(batch).isfinite()  # in-degrees of the seeds are whole
    wide = seed_batch(data, SEEDS, 3).num_edges
    assert batch.num_edges < wide - 10


@pytest.mark.slow
def test_samples_are_uniform():
    """Every set of three of the six edges into a node is as likely, for two nodes at once."""
    torch.manual_seed(0)
    star = torch.stack([torch.arange(3, 9), torch.full((6,), 1)])
    other = torch.stack([torch.arange(3, 9), torch.full((6,), 2)])
    edges = torch.cat([star, other, torch.tensor([[1, 2], [0, 0]])], 1)[:, torch.randperm(14)]
    data = Data(edge_index=edges, num_nodes=9)
    seen = [Counter(), Counter()]
    for _ in range(4000):
        batch = seed_batch(data, torch.tensor([0]), 2, num_neighbors=3)
        source, target = edges[:, batch.e_id]
        for node, counter in zip((1, 2), seen, strict=True):
            counter[tuple(sorted(source[target == node].tolist()))] += 1
    for counter in seen:
        assert len(counter) == 20
        assert set(map(len, counter)) == {3}
        assert chisquare(list(counter.values())).pvalue > 1e-3


@pytest.mark.skipif(not (WITH_PYG_LIB or WITH_TORCH_SPARSE), reason="needs pyg-lib")
def test_batch_is_that_of_neighbor_loader():
    data = graph()
    ours = seed_batch(data, SEEDS, num_hops=3)
    theirs = NeighborLoader(data, [-1] * 3, input_nodes=SEEDS, batch_size=4)(SEEDS)
    assert theirs.batch_size == 4
    assert torch.equal(theirs.n_id[:4], SEEDS)
    assert set(theirs.n_id.tolist()) == set(ours.n_id.tolist())
    assert sorted(theirs.e_id.tolist()) == ours.e_id.tolist()


def test_a_batch_is_exact():
    data, network = graph(), sage()
    torch.testing.assert_close(of_batch(network, data, 3), exact(network, data, SEEDS))
    # The network's own hops count: a source at the rim has an alpha of its features alone.
    assert abs(of_batch(network, data, 2) - exact(network, data, SEEDS)) > 1e-3


def test_degrees_at_the_rim():
    """GCN needs weights of the whole graph, or one hop more."""
    data, network, plain = graph(), gcns(normalize=False), gcns()
    plain.load_state_dict(network.state_dict())
    whole = exact(plain, data, SEEDS)
    assert abs(of_batch(plain, data, 3) - whole) > 1e-4
    torch.testing.assert_close(of_batch(plain, data, 4), whole)
    names = {"inputs": ("x", "edge_index", "edge_weight")}
    torch.testing.assert_close(of_batch(network, weighted(data), 3, **names), whole)


@pytest.mark.parametrize("estimator", ["reward_to_go", "one_step_credit"])
def test_loss_and_gradient_are_those_of_fit_nmm(estimator):
    """Draw by draw: of nodes in the order of the graph the batch makes the same draws."""
    data, network = graph(), sage()
    hood = Neighborhood(data.edge_index, data.num_nodes)
    mask = torch.zeros(60, dtype=torch.bool).index_fill(0, SEEDS, True)
    program = AmortizedNMM(hood, network, estimator=estimator)
    pair = [poutine.scale(part, 1 / 4) for part in (program.model, program.guide)]
    pyro.set_rng_seed(1)
    network.zero_grad()
    elbo = Trace_ELBO(4, max_plate_nesting=0, vectorize_particles=True)
    wanted = elbo.loss_and_grads(*pair, data.x, data.edge_index, y=data.y, observed=mask)
    grads = torch.cat([p.grad.flatten() for p in network.parameters() if p.grad is not None])
    loss = SeedLoss(network, estimator=estimator)
    around = seed_batch(data, SEEDS, 3).n_id.sort().values
    batch = seed_batch(data, around, 1).subgraph(torch.arange(len(around)))
    for given, seeds in ((data, mask), (data, SEEDS), (batch, mask[around])):
        pyro.set_rng_seed(1)
        found = loss(given, seeds)
        assert found.item() == pytest.approx(wanted, rel=1e-10)
        torch.testing.assert_close(gradient(found, network), grads)
    pyro.set_rng_seed(1)
    assert loss(data, mask, total=8).item() == pytest.approx(wanted / 2)


def test_loss_of_a_batch_is_the_bound():
    data, network = graph(), sage()
    loss, batch = SeedLoss(network, num_particles=4000), seed_batch(data, SEEDS, 3)
    hood = Neighborhood(data.edge_index, 60)
    mask = torch.zeros(60, dtype=torch.bool).index_fill(0, SEEDS, True)
    mix = NeighborMixture(hood, *network(hood, data.x, data.edge_index))
    samples = torch.stack([mix.elbo(data.y, mask, 40).mean() for _ in range(100)])
    bound = torch.stack([-4 * loss(batch).detach() for _ in range(20)])
    error = (samples.var() / 100 + bound.var() / 20).sqrt()
    assert abs(bound.mean() - samples.mean()) < 4 * error


def test_cut_neighborhoods_are_refused():
    """And rightly so: the labels would have another likelihood."""
    data, network = graph(), sage()
    batch = seed_batch(data, SEEDS, 3)
    edge = (batch.edge_index[1] < 4).nonzero()[1]
    keep = torch.ones(batch.num_edges, dtype=torch.bool).index_fill(0, edge, False)
    batch = batch.edge_subgraph(keep)
    found = exact(network, batch, torch.arange(4))
    assert abs(found - exact(network, data, SEEDS)) > 1e-3
    loss = SeedLoss(network)
    with pytest.raises(ValueError, match=r"neighbours in the batch \(1 such seeds\): the fan-out"):
        loss(batch)
    # Cut farther away it is a matter of the network's.
    whole = seed_batch(data, SEEDS, 3)
    far = whole.edge_index[1] < len(seed_batch(data, SEEDS, 1).n_id)
    assert not far.all()
    loss(whole.edge_subgraph(far))


def test_what_cannot_be_seen_is_told_once():
    data, loss = graph(), SeedLoss(sage())
    batch = seed_batch(data, SEEDS, 3)
    del batch.in_degree
    with pytest.warns(UserWarning, match=r"with_in_degree\(data\)"):
        loss(batch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss(batch)


def test_batches_without_seeds():
    """They add nothing, but every parameter has a gradient, for which others wait."""
    data, network = graph(), sage()
    loss, none = SeedLoss(network), torch.tensor([], dtype=torch.long)
    batch = seed_batch(data, none, 3)
    assert batch.num_nodes == batch.batch_size == 0
    cases = [(batch, None), (data, none), (data, torch.zeros(60, dtype=torch.bool))]
    for given, seeds in cases:
        value = loss(given, seeds, total=2)
        assert value == 0
        assert len(gradient(value, network)) == sum(p.numel() for p in network.parameters())
        assert not gradient(loss(given, seeds), network).any()


def test_edges_that_relabel():
    data = graph()
    network = Compatibility(sage(), CLASSES)
    value = SeedLoss(network)(seed_batch(data, SEEDS, 3))
    assert gradient(value, network).isfinite().all()


class Random(PyroModule):
    def __init__(self):
        super().__init__()
        self.scale = PyroSample(pyro.distributions.LogNormal(0.0, 1.0))

    def forward(self, hood, x, edge_index):
        return self.scale * torch.ones(hood.num_nodes, CLASSES), torch.zeros(hood.num_edges)


def seed_loss(data, *seeds, network=sage, **options):
    SeedLoss(network(), **options)(data, *seeds)


def seeds_of(seeds=SEEDS, num_hops=2, change=lambda data: data, **options):
    return lambda data: seed_batch(change(data), seeds, num_hops, **options)


def sparse(data):
    data.x = data.x.to_sparse_csr()
    return data


REFUSED = {
    r"network\.labels\.network\.convs\.0 is cached": lambda data: SeedLoss(
        NMMNetwork(gcn(5, 3), gcn(5, 4, attention=True), num_classes=3)),
    "num_particles must be an integer of at": lambda data: SeedLoss(sage(), num_particles=0),
    "batch has no batch_size": seed_loss,
    "total must be positive": lambda data: SeedLoss(sage())(data, SEEDS, total=0),
    r"^seeds holds node id 60, but ids lie in 0\.\.59": lambda data: seed_loss(
        data, torch.tensor([60])),
    "network has a sample site 'scale'": lambda data: seed_loss(data, SEEDS, network=Random),
    "seeds must be distinct": seeds_of(torch.tensor([1, 1])),
    r"seeds holds node id -1, but ids lie in 0\.\.59": seeds_of(torch.tensor([-1])),
    "of a mask take": seeds_of(torch.ones(60, dtype=torch.bool)),
    "num_hops must be an integer of at least 1": seeds_of(num_hops=0),
    "num_neighbors must be an integer of at least 1, got 0": seeds_of(num_neighbors=0),
    r"num_neighbors must be .* at least 1, got 2\.0": seeds_of(num_neighbors=2.0),
    r"give data\.x\.to_dense\(\)": seeds_of(change=sparse),
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_refused(message):
    with pytest.raises(ValueError, match=message):
        REFUSED[message](graph())
