# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Rivals of StackedNMM that are written here, against their equations."""

import itertools

import networkx as nx
import torch
from graphs import house, to_hood
from torch.nn import functional as F
from torch_geometric.data import Data
from torch_geometric.nn import GCN

from benchmarks.on_top import rivals
from pyro_nmm.models import temperature_scaling


def test_belief_propagation_is_exact_on_trees(monkeypatch):
    torch.manual_seed(0)
    tree = nx.random_labeled_tree(6, seed=1)
    probs, y = torch.rand(6, 3).softmax(-1), torch.tensor([0, 2, 0, 0, 0, 0])
    known = torch.tensor([0, 1, 0, 0, 0, 0]).bool()
    log_scale, coupling = torch.tensor(0.3), torch.tensor(0.7)
    every = torch.tensor(list(itertools.product(range(3), repeat=6)))
    own = (log_scale.exp() * probs.log()).log_softmax(-1)
    weight = own.gather(1, every.T).sum(0)
    for i, j in tree.edges:
        weight = weight + F.softplus(coupling) * (every[:, i] == every[:, j])
    weight = weight.masked_fill(every[:, 1] != 2, -torch.inf).softmax(0)
    exact = torch.einsum("s,snk->nk", weight, F.one_hot(every, 3).to(weight))

    def of_parameters(marginals, *args, **options):
        return marginals(log_scale, coupling, steps=60), 0.0

    monkeypatch.setattr(rivals, "by_likelihood", of_parameters)
    found = rivals.potts(Data(hood=to_hood(tree), y=y, train_mask=known), probs)
    torch.testing.assert_close(found, exact, rtol=0, atol=1e-4)


def test_gats_follows_its_equations():
    torch.manual_seed(0)
    hood, logits = house(), torch.randn(5, 3)
    known = torch.tensor([1, 0, 0, 0, 0]).bool()
    data = Data(hood=hood, logits=logits, train_mask=known, graph="cora", backbone="gcn")
    layer = rivals.GATS(data, heads=2)
    layer.coefficient.data.fill_(0.4)
    layer.of_near.data.copy_(torch.tensor([1.3, 0.8]))
    rows = [hood.source[hood.ptr[i] : hood.ptr[i + 1]].tolist() for i in range(5)]
    near = [1.3 if i == 0 else 0.8 if 0 in rows[i] else 1.0 for i in range(5)]
    sure = logits.softmax(-1).amax(-1)
    for i in range(5):
        weights, temperatures, gap = [], [], 0.0
        for j in rows[i]:
            x = logits[j]
            ranked = ((x - x.min()) / (x.max() - x.min())).sort().values
            temperatures.append(layer.ranks.weight @ ranked * near[j])
            weights.append(F.leaky_relu(logits[i] @ logits[j] / near[i] / near[j], 0.2))
            gap = gap + sure[i] - sure[j]
        mean = torch.stack(weights).softmax(0) @ torch.stack(temperatures)
        found = F.softplus(mean + 0.4 * gap / len(rows[i])).mean() + 1
        torch.testing.assert_close(layer(logits)[i], logits[i] / found)


def test_calibrations_of_few_parameters():
    torch.manual_seed(0)
    logits, held = 2 * torch.randn(200, 3), torch.rand(200) < 0.8
    y = torch.distributions.Categorical(logits=logits / 3 + torch.tensor([1.0, 0, 0])).sample()
    data = Data(y=y, logits=logits, val_mask=held, hood=to_hood(nx.cycle_graph(200)))
    expected = (logits / temperature_scaling(logits, y, held)).softmax(-1)
    torch.testing.assert_close(rivals.temperature(data), expected, rtol=0, atol=1e-3)
    vector, shrunk, scaled, three = (
        F.nll_loss(rival(data)[held].log(), y[held])
        for rival in (
            rivals.vector,
            rivals.shrunk_vector,
            rivals.temperature,
            rivals.three_numbers,
        )
    )
    assert vector <= shrunk <= scaled  # the fewer the limits, the better the fit
    assert three < scaled + 1e-4


def test_gmnn_learns_from_its_neighbours(monkeypatch):
    """It is accurate where features are noisy and neighbours share their label."""
    torch.manual_seed(0)
    hood = to_hood(nx.connected_caveman_graph(20, 6))
    y = torch.arange(20).repeat_interleave(6) % 3
    order = torch.randperm(120)
    masks = {name: torch.zeros(120).bool() for name in ("train_mask", "val_mask")}
    masks["train_mask"][order[:15]], masks["val_mask"][order[15:30]] = True, True
    edges = torch.stack([hood.source, hood.target])
    data = Data(x=F.one_hot(y, 3) + 1.5 * torch.randn(120, 3), edge_index=edges, y=y, **masks)
    data.logits, data.backbone, made = torch.zeros(120, 3), "gcn", []

    def make(kind, width, num_classes):
        made.append(GCN(width, 16, 2, num_classes))
        return made[-1]

    monkeypatch.setattr(rivals, "network", make)
    probs = rivals.gmnn(data, num_epochs=60)
    assert [each.in_channels for each in made] == [3, 3] * 2
    assert (probs.argmax(-1) == y)[order[30:]].double().mean() > 0.8
