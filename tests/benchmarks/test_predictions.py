# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Labels that node classification's benchmark predicts by each rule."""

import pytest
import torch
from graphs import house
from torch_geometric.data import Data

from benchmarks.nodes import fits, tables
from pyro_nmm import NeighborMixture


@pytest.fixture
def small():
    """A mixture of five nodes, whose neighbours matter, with one known label."""
    torch.manual_seed(3)
    hood = house()
    mix = NeighborMixture(hood, 0.3 * torch.rand(5, 3) + 0.05, torch.randn(hood.num_edges))
    known = torch.tensor([1, 0, 0, 0, 0]).bool()
    y = torch.tensor([2, 0, 1, 1, 0])
    return mix, Data(y=y, train_mask=known, test_mask=~known)


def test_the_joint_rule_finds_the_mode_of_a_small_graph(small):
    mix, data = small
    found = fits.labellings(mix, data, 0)
    assert list(found) == ["one by one", "sequential", "joint"]
    assert all(labels[0] == 2 for labels in found.values())
    nodes = torch.arange(1, 5)
    exact = mix.condition(data.y, data.train_mask)  # a sum over all choices
    assert torch.equal(found["joint"][nodes], exact.predict(nodes, method="joint"))
    ours = fits.log_prob(mix, found["joint"], data, 0, repeats=20)
    log_prob = exact.log_marginal(nodes, found["joint"][nodes])
    assert ours == pytest.approx(log_prob.item(), abs=0.05)


def test_true_labels_of_test_nodes_are_not_read(small):
    mix, data = small
    torch.manual_seed(1)
    found = fits.labellings(mix, data, 0)
    wrong = torch.full((5,), 2)
    other = Data(y=wrong, train_mask=data.train_mask, test_mask=data.test_mask)
    torch.manual_seed(1)
    again = fits.labellings(mix, other, 0)
    assert all(torch.equal(found[rule], again[rule]) for rule in found)


def test_predictions_are_scored(small):
    mix, data = small
    rows = fits.predictions(mix, data, 0)
    assert rows["one by one"]["changed"] == 0
    assert rows["joint"]["log prob"] >= rows["one by one"]["log prob"] - 0.01
    assert all(0 <= row["accuracy"] <= 1 for row in rows.values())
    assert len({row["of the true labels"] for row in rows.values()}) == 1


def test_rules_are_compared_seed_by_seed():
    """Three seeds of an NMM: labels in turn are right more often, labels jointly never."""
    gains = {"one by one": 0.0, "sequential": 0.05, "joint": 0.0}
    rows = [
        {"task": "predicted", "dataset": "cora", "backbone": "gcn", "method": "NMM", "seed": seed,
         "rules": {rule: {"accuracy": 0.8 + gain * (1 + seed / 500) + seed / 100,
                          "log prob": -0.5 + gain, "changed": 200 * gain,
                          "of the true labels": -0.7} for rule, gain in gains.items()}}
        for seed in range(3)
    ]  # fmt: skip
    line = tables.predicted({"nodes": rows}).splitlines()[2]
    assert "| Cora | GCN | NMM | 3 | 81.0 ± 1.0 | +5.01 ± 0.01 (median +5.01, p " in line
    assert "| 10.0 | +0.00 ± 0.00 (median +0.00) | 0.0 | -0.5000 ± 0.0000 | +0.0500" in line
