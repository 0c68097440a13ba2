# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Draws, steps and epochs that benchmarks time, on small graphs."""

import pytest
import torch
from graphs import parameters

from benchmarks.scale import run, speed
from pyro_nmm import Neighborhood, OrderedConditional


@pytest.fixture(autouse=True)
def as_a_user():
    torch.set_default_dtype(torch.float)


def test_loop_over_nodes_draws_from_the_same_distribution():
    """How often each source is chosen, in standard errors."""
    hood = Neighborhood(torch.tensor([[0, 1, 2, 2], [1, 2, 0, 1]]), 3)
    alpha, logits = parameters(hood, 2)
    y, number = torch.tensor([0, 1, 0]), 1000
    loops = [speed.draw_in_a_loop(hood, alpha, logits, y).bincount(minlength=3)
             for _ in range(number)]  # fmt: skip
    q = OrderedConditional(hood, alpha, logits, y)
    draws = [q.sample().bincount(minlength=3) for _ in range(number)]
    gap = torch.stack(loops).double() - torch.stack(draws)
    assert (gap.mean(0).abs() < 4 * gap.std(0) / number**0.5).all()


def test_run(tmp_path, monkeypatch):
    monkeypatch.setattr(speed, "MEDIUM", (150, 300, 3))
    monkeypatch.setattr(speed, "PUBMED", (150, 300, 3))
    monkeypatch.setattr(speed, "in_a_process", lambda threads, function, *args: function(*args))
    path = tmp_path / "speed.jsonl"
    command = ["draw", "step", "evidence", "growth", "--samples", "2", "--repeats", "1"]
    command += ["--sizes", "1000", "--results", str(path)]
    rows = run.main(command).rows
    assert len(run.main(command).rows) == len(rows)
    tasks = [row["task"] for row in rows]
    assert [tasks.count(task) for task in ("step", "evidence", "growth")] == [9, 3, 1]
    assert {row["code"] for row in rows if row["task"] == "draw"} >= {"loop", "sweeps"}
    for row in rows:
        found = row["seconds"]
        assert min(found.values() if isinstance(found, dict) else [found]) > 0
        assert row["device"] == "cpu"
    assert 0 <= rows[-1]["above"] <= rows[-1]["peak"]


def test_device(tmp_path):
    """Every query runs; without a GPU on the processor alone."""
    command = ["device", "--sizes", "200", "--repeats", "1", "--results", str(tmp_path / "d.jsonl")]
    rows = run.main(command).rows
    assert len(rows) == len(run.main(command).rows) == 11
    places = {"cpu", "cuda"} if torch.cuda.is_available() else {"cpu"}
    for row in rows:
        assert row["seconds"].keys() == places
        assert min(row["seconds"].values()) > 0


@pytest.mark.slow
def test_epochs(tmp_path):
    command = ["epochs", "--datasets", "digits", "--repeats", "1"]
    rows = run.main([*command, "--results", str(tmp_path / "epochs.jsonl")]).rows
    assert [row["backbone"] for row in rows] == ["gcn", "gat", "appnp"]
    for row in rows:
        assert row["ms"]["networks"] > 0
        assert len(row["ratios"]) == 3


@pytest.mark.slow
def test_tightness(tmp_path):
    path = tmp_path / "tightness.jsonl"
    command = ["tightness", "--datasets", "digits", "--num-epochs", "10", "--results", str(path)]
    rows = run.main(command).rows
    assert [row["epoch"] for row in rows] == [0, 10]
    for row in rows:
        assert row["pair bound"] < row["pair exact"] + 0.01
        assert row["test bound"] < row["test estimate"] + 0.01
    assert len(run.main(command).rows) == 2
