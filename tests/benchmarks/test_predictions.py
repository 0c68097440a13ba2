# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Labels that node classification's benchmark predicts by each rule, and what is said of them."""

from importlib import import_module

import pytest
import torch
from graphs import house
from torch_geometric.data import Data

from pyro_nmm import NeighborMixture


@pytest.fixture(scope="module")
def rules():
    return import_module("benchmarks.nodes.predictions")


@pytest.fixture
def small():
    """A mixture of five nodes, whose neighbours matter, with one known label."""
    torch.manual_seed(3)
    hood = house()
    mix = NeighborMixture(hood, 0.3 * torch.rand(5, 3) + 0.05, torch.randn(hood.num_edges))
    known = torch.tensor([1, 0, 0, 0, 0]).bool()
    y = torch.tensor([2, 0, 1, 1, 0])
    return mix, Data(y=y, train_mask=known, test_mask=~known)


def test_the_joint_rule_finds_the_mode_of_a_small_graph(rules, small):
    mix, data = small
    found = rules.labellings(mix, data, 0)
    assert list(found) == ["one by one", "sequential", "joint"]
    assert all(labels[0] == 2 for labels in found.values())
    nodes = torch.arange(1, 5)
    exact = mix.condition(data.y, data.train_mask)  # a sum over all choices
    assert torch.equal(found["joint"][nodes], exact.predict(nodes, method="joint"))
    ours = rules.log_prob(mix, found["joint"], data, 0, repeats=20)
    log_prob = exact.log_marginal(nodes, found["joint"][nodes])
    assert ours == pytest.approx(log_prob.item(), abs=0.05)


def test_true_labels_of_test_nodes_are_not_read(rules, small):
    mix, data = small
    torch.manual_seed(1)
    found = rules.labellings(mix, data, 0)
    wrong = torch.full((5,), 2)
    other = Data(y=wrong, train_mask=data.train_mask, test_mask=data.test_mask)
    torch.manual_seed(1)
    again = rules.labellings(mix, other, 0)
    assert all(torch.equal(found[rule], again[rule]) for rule in found)


def test_predictions_are_scored(rules, small):
    mix, data = small
    rows = rules.predictions(mix, data, 0)
    assert rows["one by one"]["changed"] == 0
    assert rows["joint"]["log prob"] >= rows["one by one"]["log prob"] - 0.01
    assert all(0 <= row["accuracy"] <= 1 for row in rows.values())
    assert len({row["of the true labels"] for row in rows.values()}) == 1


def rows_of(gain):
    """Three seeds of an NMM; labels in turn are right more often by ``gain``, jointly never."""
    return [
        {"task": "predicted", "dataset": "cora", "backbone": "gcn", "method": "NMM", "seed": seed,
         "rules": {rule: {"accuracy": 0.8 + more + seed / 100, "log prob": -0.5 + more,
                          "changed": 10 * int(more > 0), "of the true labels": -0.7}
                   for rule, more in (("one by one", 0), ("sequential", gain + seed / 1e4),
                                      ("joint", 0.0))}}
        for seed in range(3)
    ]  # fmt: skip


def test_rules_are_compared_seed_by_seed():
    tables = import_module("benchmarks.nodes.predictions_tables").tables
    found = tables(rows_of(0.05))
    line = found["predicted"].splitlines()[2]
    assert "| Cora | NMM-GCN | 3 | 81.0 ± 1.0 | +5.01 ± 0.01 (median +5.01, p " in line
    text = " ".join(found["predicted claim"].split())
    assert "10.0 to 10.0 test labels change (means over seeds, 1 mixtures)" in text
    assert "significantly in 1: Cora, NMM-GCN +5.01, p < .001" in text
    assert "Predicted jointly, 0.0 to 0.0 test labels change" in text
    assert "significantly in 0, and" in text
    assert "Nothing" in tables([])["predicted claim"]
