# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Annotators with real errors: data, a small run, and tables."""

import pytest
import torch
from torch_geometric.data import Data
from torch_geometric.utils import grid

from benchmarks.crowds import data, run, tables
from benchmarks.shared.records import RESULTS, read


@pytest.fixture(autouse=True)
def as_a_user():
    torch.set_default_dtype(torch.float)


def small(root, seed):
    """Two halves of a grid, and four people who are right in three of four answers."""
    torch.manual_seed(seed)
    edge_index, places = grid(12, 12)
    y = (places[:, 0] >= 6).long()
    answers = torch.where(torch.rand(144, 4) < 0.25, 1 - y[:, None], y[:, None])
    x = torch.randn(144, 3) + y[:, None]
    test = torch.arange(144) % 12 == 0
    return Data(x=x, y=y, edge_index=edge_index, answers=answers.where(~test[:, None], -1),
                test=test)  # fmt: skip


def test_run(tmp_path, monkeypatch):
    methods = {name: run.METHODS[name] for name in ("majority", "label spreading", "Potts")}
    networks = {name: run.NETWORKS[name] for name in ("GCN, CrowdLayer", "GCN, EM: network")}
    monkeypatch.setattr(run, "METHODS", methods)
    monkeypatch.setattr(run, "NETWORKS", networks)
    monkeypatch.setitem(run.SETS, "music", small)
    monkeypatch.setattr(run, "SIMULATIONS", 2)
    monkeypatch.setattr(run, "SIMULATED", ["0.7 right, a third"])
    path = tmp_path / "crowds.jsonl"
    options = ["--sets", "music", "--seeds", "0", "--results", str(path)]
    options = ["answers", "simulated", "coverage", *options, "--data-root", str(tmp_path)]
    rows = run.main(options).rows
    assert len(rows) == 3 * (3 + 4 + 2 + 1) + 3 * 2
    assert len(run.main(options).rows) == len(rows)
    found = {row["method"]: row["answered"] for row in rows if row.get("kind") == "all"}
    assert found[run.OURS]["nll"] < found["majority"]["nll"]
    assert found[run.BEST]["nll"] < found[run.OURS]["nll"] + 1e-6
    for make in tables.TABLES:
        assert "|" in make({"crowds": rows})


@pytest.mark.filterwarnings("ignore:self.within_class_std_dev_")
def test_simulated_annotators():
    """Shares of nodes that are asked, and of answers that are right."""
    for kind, (right, share) in data.SIMULATED.items():
        found = data.answered("digits", kind, None, 0)
        there = found.answers >= 0
        assert abs(there.any(1).double().mean() - share) < 0.05
        assert abs((found.answers == found.y[:, None])[there].double().mean() - right) < 0.05
        assert found.all.all()


def test_controls_have_the_same_confusions():
    """Of every annotator, and no dependence of two who always agree."""
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(3000) % 3
    guess = torch.where(torch.rand(3000) < 0.4, torch.randint(3, (3000,)), y)
    answers = torch.stack([guess, guess], 1)
    found = data.independent(answers, y, generator)
    for column in found.T:
        for label in range(3):
            counts = column[y == label].bincount(minlength=3)
            assert counts.tolist() == guess[y == label].bincount(minlength=3).tolist()
    right = (guess == y).double().mean()
    agree = (found[:, 0] == found[:, 1]).double().mean()
    assert agree < right**2 + (1 - right) ** 2 + 0.03


@pytest.mark.filterwarnings("ignore:self.within_class_std_dev_")
def test_weak_classifiers_do_not_answer_about_what_they_learned():
    found = data.digits(None, 0)
    assert ((found.answers < 0).sum(0) == data.ROWS).all()
    right = torch.stack(
        [(column == found.y)[column >= 0].double().mean() for column in found.answers.T]
    )
    assert ((right > 0.35) & (right < 0.85)).all()


def test_stored_rows_are_shown():
    rows = read(RESULTS / "crowds.jsonl")
    shown = tables.crowds({"crowds": rows})
    answers = [row for row in rows if row["task"] == "answers"]
    methods = {row["method"] for row in rows if row["task"] == "simulated"}
    assert all(f"| {method} |" in tables.crowds_simulated({"crowds": rows}) for method in methods)
    parts = sum(("answered" in row) + ("test" in row) for row in answers)
    seeds = [int(line.split("|")[5]) for line in shown.split("\n")[2:]]
    assert sum(seeds) == parts
