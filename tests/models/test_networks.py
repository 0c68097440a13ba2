# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Networks as the parameters of an NMM."""

from functools import partial

import networkx as nx
import pyro
import pytest
import torch
from graphs import to_hood
from pyro import poutine
from pyro.infer import SVI, Predictive, TraceGraph_ELBO
from pyro.optim import Adam
from runs import fit, pair
from torch import nn
from torch_geometric.nn import GAT, GCN

from pyro_nmm import Neighborhood
from pyro_nmm.guides import AmortizedNMM
from pyro_nmm.models import NMMNetwork
from pyro_nmm.models.networks import attention_scores


def data():
    hood = to_hood(nx.ladder_graph(6))
    y = (torch.arange(12) % 6 >= 3).long()
    train = torch.arange(12) % 3 != 0
    x = torch.eye(12)
    edge_index = torch.stack([hood.source, hood.target])
    return hood, x, edge_index, y.where(train, -1), train


class Linear(nn.Module):
    """A backbone that ignores the graph and counts its calls."""

    def __init__(self, width):
        super().__init__()
        self.layer, self.calls = nn.Linear(12, width), 0

    def forward(self, x, edge_index):
        self.calls += 1
        return nn.functional.dropout(self.layer(x), 0.5, self.training)


@pytest.mark.parametrize(
    ("link", "formula"),
    [
        ("softplus", lambda u: (1 + u.exp()).log()),
        ("square", lambda u: u**2),
        ("exp", lambda u: u.exp()),
    ],
)
def test_formula_of_the_paper(link, formula):
    hood, x, edge_index, _, _ = data()
    labels, attention = Linear(2), Linear(3)
    network = NMMNetwork(labels, attention, num_classes=2, link=link, floor=0.3, gamma=0.6).eval()
    torch.nn.init.constant_(network.omega, 1.7)
    alpha, logits = network(hood, x, edge_index)
    u, v = labels(x, edge_index), attention(x, edge_index)
    torch.testing.assert_close(alpha, formula(u) + 0.3)
    for e in range(hood.num_edges):
        i, j = hood.target[e], hood.source[e]
        cosine = v[i] @ v[j] / (v[i].norm() * v[j].norm())
        torch.testing.assert_close(logits[e], 1.7**2 * cosine + 0.6 * (i == j))


def test_one_shared_backbone():
    hood, x, edge_index, _, _ = data()
    shared = Linear(2 + 5).eval()
    alpha, logits = NMMNetwork(shared, num_classes=2)(hood, x, edge_index)
    assert shared.calls == 1
    u, v = shared(x, edge_index).split([2, 5], -1)
    torch.testing.assert_close(alpha, u.exp() + 1)
    one = torch.ones(())
    torch.testing.assert_close(logits, attention_scores(hood, v, one, 0 * one))


@pytest.mark.parametrize("vectorized", [True, False])
def test_network_runs_once_a_particle_pass(vectorized):
    """Model and guide see one dropout mask: their costs differ by the bound alone."""
    hood, x, edge_index, y, train = data()
    network = NMMNetwork(Linear(2), Linear(3), num_classes=2)
    program = AmortizedNMM(hood, network)
    elbo = TraceGraph_ELBO(3, vectorize_particles=vectorized, max_plate_nesting=0)
    svi = SVI(program.model, program.guide, Adam({"lr": 0.01}), elbo)
    for step in range(1, 4):
        svi.step(x, edge_index, y=y, observed=train)
        assert network.labels.calls == step * (1 if vectorized else 3)


def test_model_alone_runs_the_network_and_forgets_old_weights():
    hood, x, edge_index, y, train = data()
    network = NMMNetwork(Linear(2), Linear(3), num_classes=2)
    program = AmortizedNMM(hood, network).eval()
    program.guide(x, edge_index, y=y, observed=train)
    with torch.no_grad():
        network.labels.layer.bias += 1  # an optimiser's step
    program.model(x, edge_index)
    assert network.labels.calls == 2
    program.guide(x, edge_index, y=y, observed=train)
    program.model(x + 1, edge_index)  # other inputs
    assert network.labels.calls == 4
    draws = Predictive(partial(program.model, x, edge_index), num_samples=5)()
    assert draws["y"].shape == (5, 12)


@pytest.mark.slow
def test_all_parameters_learn():
    hood, x, edge_index, y, train = data()
    network = NMMNetwork(GCN(12, 16, 2, 2, dropout=0.5), GAT(12, 16, 1), num_classes=2)
    network.gamma = nn.Parameter(network.gamma)
    before = {k: v.clone() for k, v in network.state_dict().items()}
    program = AmortizedNMM(hood, network)
    elbo = TraceGraph_ELBO(num_particles=4, vectorize_particles=True)
    svi = SVI(program.model, program.guide, Adam({"lr": 0.02}), elbo)
    losses = [svi.step(x, edge_index, y=y, observed=train) for _ in range(80)]
    assert sum(losses[-10:]) < sum(losses[:10]) - 10
    for name, value in network.state_dict().items():
        assert not torch.equal(value, before[name]), name
    assert program.training
    post = program.mixture(x, edge_index).condition(y, train, num_samples=32)
    assert program.training
    truth = (torch.arange(12) % 6 >= 3).long()
    assert (post.predict() == truth).double().mean() > 0.8
    names = set(pyro.get_param_store().keys())
    assert "nmm$$$omega" in names


def test_a_second_network_of_the_same_name_is_refused():
    """Pyro would hand the optimiser the first one's parameters, silently."""
    hood, x, edge_index, y, train = data()
    first, second = (
        AmortizedNMM(hood, NMMNetwork(Linear(2), Linear(3), num_classes=2)) for _ in range(2)
    )
    poutine.trace(first.guide)(x, edge_index, y=y, observed=train)
    with pytest.raises(ValueError, match=r"update_module_params=True.*name="):
        second.guide(x, edge_index, y=y, observed=train)
    pyro.clear_param_store()
    second.guide(x, edge_index, y=y, observed=train)


@pytest.mark.parametrize(("backbones", "options", "message"), [
    ((2,), {"link": "relu"}, "link must be one of"),
    ((2,), {"floor": 0.0}, "floor must be positive"),
    ((3, 3), {}, "labels must return shape"),
    ((2,), {}, r"num_classes \+ H"),
])  # fmt: skip
def test_refused(backbones, options, message):
    hood, x, edge_index, _, _ = data()
    with pytest.raises(ValueError, match=message):
        NMMNetwork(*map(Linear, backbones), num_classes=2, **options)(hood, x, edge_index)


def test_exponential_link_ends():
    """Beyond a million nothing changes, and infinity would be no number a step later."""
    hood = Neighborhood(torch.tensor([[0, 1], [1, 0]]), num_nodes=2)
    backbone = torch.nn.Linear(1, 3, bias=False)
    network = NMMNetwork(backbone, torch.nn.Linear(1, 2), num_classes=3, link="exp", floor=0.1)
    with torch.no_grad():
        backbone.weight.copy_(torch.tensor([[-2.0], [3.0], [500.0]]))
    alpha, _ = network(hood, torch.ones(2, 1))
    expected = torch.tensor([-2.0, 3.0, 15.0]).exp() + 0.1
    torch.testing.assert_close(alpha, expected.expand(2, 3))


def test_weight_decay_is_of_matrices():
    """Biases and the like take the same first step without it."""
    found = []
    for decay in (0.0, 1000.0):
        torch.manual_seed(0)
        network = pair()
        for parameter in network.parameters():
            if parameter.dim() < 2:
                parameter.data.fill_(0.5)
        fit(network=lambda network=network: network, num_steps=1, weight_decay=decay)
        found.append([*network.parameters()])
    for plain, decayed in zip(*found, strict=True):
        assert torch.equal(plain, decayed) == (plain.dim() < 2)
