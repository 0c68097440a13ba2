# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The paper's schedule: consistency, early stopping, and weight decay of first layers."""

import pytest
import torch
from graphs import house
from pyro import poutine
from torch import nn
from torch_geometric.nn import MLP

from benchmarks.nodes import nmm_network
from benchmarks.shared.training import (
    Consistency,
    ConsistentNMM,
    best_epoch,
    decay_first,
    train_classifier,
    train_nmm,
)
from pyro_nmm import Neighborhood, NeighborMixture
from pyro_nmm.datasets import digits, random_split
from pyro_nmm.models import NMMNetwork


def test_consistency_by_hand():
    """Memory, sharpening and KL; the teacher is constant."""
    consistency = Consistency(2, 3, weight=2.0, temperature=0.5, memory=0.75, warmup=4)
    past = torch.zeros(2, 3)
    for call in range(1, 7):
        teacher, logits = torch.randn(2, 3).softmax(-1), torch.randn(2, 3, requires_grad=True)
        past = 0.75 * past + 0.25 * teacher
        target = past**2 / (past**2).sum(-1, keepdim=True)
        probs = logits.softmax(-1)
        kl = (target * (target.log() - probs.log())).sum(-1).mean()
        torch.testing.assert_close(consistency(probs, teacher), 2 * min(1, call / 4) * kl)


def test_consistency_is_a_factor_of_the_model():
    hood, x, y = house(), torch.eye(5), torch.tensor([0, 1, 0, 1, 1])
    observed = torch.tensor([True, True, False, False, True])
    network = NMMNetwork(MLP([5, 2]), MLP([5, 4]), num_classes=2)
    program = ConsistentNMM(hood, network, Consistency(5, 2, warmup=0))
    nodes = poutine.trace(program.model).get_trace(x, y=y, observed=observed).nodes
    teacher = program.consistency.past / (1 - 0.9)  # one call: the teacher itself
    marginals = NeighborMixture(hood, *network(hood, x)).marginals()
    penalty = Consistency(5, 2, warmup=0)(marginals, teacher)
    torch.testing.assert_close(nodes["consistency"]["fn"].log_factor, -3 * penalty)
    torch.testing.assert_close(teacher[observed], torch.eye(2)[y[observed]])


@pytest.mark.parametrize(("peak", "patience", "epochs"), [(4, 5, 9), (None, 3, 4)])
def test_early_stopping_returns_the_best_epoch(peak, patience, epochs):
    """Ended ``patience`` epochs after the best one; of equal ones the first."""
    module = nn.Linear(1, 1, bias=False)
    module.weight.data.zero_()

    def step(epoch):
        module.weight.data += 1

    def score():
        return (-abs(module.weight.item() - peak) if peak else 0.0,)

    assert len(best_epoch(module, range(100), step, score, patience)) == epochs
    assert module.weight.item() == (peak or 1)
    assert not module.training


def problem():
    torch.set_default_dtype(torch.float)
    data = random_split(digits(), 0.1, 0.1, 0.5, seed=0)
    torch.manual_seed(0)
    return data, Neighborhood(data.edge_index, data.num_nodes), nmm_network("gcn", data)


def test_weight_decay_reaches_first_layers_only():
    network = problem()[-1]
    decayed, rest = decay_first(network, 0.1)
    assert decayed["weight_decay"] == 0.1
    assert sorted(p.numel() for p in decayed["params"]) == [16, 64, 1024, 4096]
    assert any(p is network.omega for p in rest["params"])
    assert "weight_decay" not in rest
    total = sum(p.numel() for p in network.parameters())
    assert sum(p.numel() for g in (decayed, rest) for p in g["params"]) == total


@pytest.mark.slow
@pytest.mark.parametrize("agree", [False, True])
def test_training_learns(agree):
    data, hood, network = problem()
    penalty = [Consistency(data.num_nodes, 10) if agree else None for _ in range(2)]
    options = {"lr": 0.03, "num_epochs": 40, "criterion": "likelihood"}
    out, curve = train_classifier(network.labels, data, consistency=penalty[0], **options)
    assert (out.argmax(-1) == data.y)[data.test_mask].double().mean() > 0.9
    assert max(curve)[0] < 0 < max(curve)[1]  # likelihood first
    _, curve = train_nmm(network, data, hood, consistency=penalty[1], **options)
    assert max(curve)[1] > 0.9
