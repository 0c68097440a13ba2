# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""What link prediction is compared with: Katz's index, VGAE and GraphSAGE."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F
from torch_geometric.data import Data
from torch_geometric.datasets import KarateClub
from torch_geometric.utils import to_dense_adj

from benchmarks.links import rivals
from benchmarks.links.protocol import Problem
from pyro_nmm.datasets import link_split
from pyro_nmm.sparse import identity


@pytest.fixture(autouse=True)
def as_a_user():
    torch.set_default_dtype(torch.float)
    torch.manual_seed(0)


def test_katz_counts_walks():
    """Against powers of the adjacency matrix."""
    edge_index = KarateClub()[0].edge_index
    graph = to_dense_adj(edge_index)[0].double()
    powers = torch.stack([graph.matrix_power(n) for n in range(1, 5)])
    pairs = torch.cartesian_prod(torch.arange(34), torch.arange(34)).T
    counts = rivals.walks(edge_index, 34, pairs, longest=4)
    assert torch.equal(counts, powers.flatten(1))
    whole = torch.linalg.inv(torch.eye(34).double() - 0.001 * graph) - torch.eye(34)
    index = rivals.katz_index(counts, 0.001)
    torch.testing.assert_close(index, whole.flatten(), rtol=1e-4, atol=1e-9)


def planted():
    """Four groups of 20, whose nodes are linked only with one another."""
    group = torch.arange(80) // 20
    low, high = torch.triu_indices(80, 80, 1)
    kept = (group[low] == group[high]) & (torch.rand(len(low)) < 0.4)
    edge_index = torch.stack([low[kept], high[kept]])
    return Problem(Data(x=identity(80), num_nodes=80), link_split(edge_index, 80, seed=0))


@pytest.mark.parametrize("rival", ["vgae", "sage"])
def test_planted_links_are_found(rival):
    problem, settings = planted(), {"hidden": 16, "dropout": 0.1}
    args = SimpleNamespace(num_steps=150)
    found = rivals.measure(args, problem, rival, settings, 1, ["val", "test"])
    # Of the false pairs one in four is within a group, where a link cannot be told from none.
    assert found["test"]["AUC"] > 80
    assert found["val"]["AP"] > 80
    assert found["step"] % 10 == 0
    last = rivals.measure(args, problem, rival, settings, 1, ["val"], every=150)
    assert last["step"] == 150
    assert last["val"]["AP"] <= found["val"]["AP"]


@pytest.mark.parametrize("make", rivals.NETWORKS.values())
def test_links_have_no_direction(make):
    problem = planted()
    network, x = make(80, hidden=16).eval(), problem.data.x
    pairs, train = problem.split.test, problem.split.train
    logits = network.logits(pairs, x, train)
    assert logits.shape == (pairs.shape[1],)
    torch.testing.assert_close(logits, network.logits(pairs.flip(0), x, train))


def test_vgae_has_its_authors_loss():
    """In expectation over the pairs that are drawn, against all pairs of a small graph."""
    edge_index = torch.tensor([[0, 1, 1, 2, 2, 3, 4, 5], [1, 0, 2, 1, 3, 2, 5, 4]])
    network, x = rivals.LinksVGAE(6, hidden=8, width=3).eval(), identity(6)
    with torch.no_grad():
        drawn = torch.stack([network.loss(x, edge_index) for _ in range(1500)])
        z = network.encode(x, edge_index)
        graph = to_dense_adj(edge_index)[0]
        free = 36 - graph.sum()
        cost = F.binary_cross_entropy_with_logits(
            z @ z.T, graph + torch.eye(6), pos_weight=free / graph.sum()
        )
        mean, log_scale = network.encoder(x, edge_index)
        normal = torch.distributions.Normal(mean, log_scale.exp())
        unit = torch.distributions.Normal(0.0, 1.0)
        divergence = torch.distributions.kl_divergence(normal, unit).sum() / 36
    exact = cost * 36 / (2 * free) + divergence
    assert abs(drawn.mean() - exact) < 4 * drawn.std() / len(drawn) ** 0.5


def test_graphsage_is_that_of_its_equations():
    """Means over neighbours beside the node itself, then a perceptron on products."""
    edge_index = KarateClub()[0].edge_index
    network, x = rivals.LinksSAGE(34, hidden=8, layers=2).eval(), torch.rand(34, 34)
    graph = to_dense_adj(edge_index)[0]
    h = network.first.network(x)
    for number, conv in enumerate(network.network.convs):
        near = graph @ h / graph.sum(1, keepdim=True)
        h = conv.lin_l(near) + conv.lin_r(h)
        h = h if number else h.relu()
    pairs = torch.randint(34, (2, 10))
    expected = network.score(h[pairs[0]] * h[pairs[1]])[:, 0]
    torch.testing.assert_close(network.logits(pairs, x, edge_index), expected)


def test_graphsage_does_not_see_what_it_is_asked(monkeypatch):
    train, seen = planted().split.train, []
    network = rivals.LinksSAGE(80, hidden=8)
    logits = network.logits

    def spied(pairs, x, edge_index):
        seen.append((pairs, edge_index))
        return logits(pairs, x, edge_index)

    monkeypatch.setattr(network, "logits", spied)
    network.loss(identity(80), train)
    (pairs, edges), known = seen[0], {tuple(p) for p in train.T.tolist()}
    asked, false = ({tuple(p) for p in part.T.tolist()} for part in pairs.chunk(2, 1))
    shown = {tuple(p) for p in edges.T.tolist()}
    assert not asked & shown
    assert asked | shown <= known
    assert len(shown) + 2 * len(asked) == len(known)
    assert not false & known
