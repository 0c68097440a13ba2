# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The benchmarks of speed, batches and bounds, in small."""

import time
from importlib import import_module

import pytest
import torch


@pytest.fixture(autouse=True)
def as_a_user():
    torch.set_default_dtype(torch.float)


@pytest.mark.slow
def test_benchmark_of_batches(tmp_path, monkeypatch):
    benchmark = import_module("benchmarks.scale.batches")
    path = tmp_path / "batches.jsonl"
    tasks = ["training", "bound", "throughput", "--smoke", "--results", str(path)]
    monkeypatch.setattr(benchmark, "processes", lambda key, root, n: time.sleep(n / 1000))
    rows = benchmark.main(tasks).rows
    assert len(rows) == len(path.read_text().splitlines()) == 3 + 3 + 2
    assert len(benchmark.main(tasks).rows) == len(rows)
    parts = {row["way"]: row for row in rows if row["task"] == "bound"}
    for row in parts.values():
        assert row["bound"] < row["estimate"] + 0.01
    assert parts["random"]["estimate"] < parts["clusters"]["estimate"]
    tables = import_module("benchmarks.scale.batches_tables").tables(rows)
    for name in ("batch training", "batch bounds", "batch throughput"):
        assert tables[name].count("\n") > 1


@pytest.mark.slow
def test_smaller_benchmarks(tmp_path):
    epochs, tightness = (
        import_module("benchmarks.scale.epochs"),
        import_module("benchmarks.scale.tightness"),
    )
    assert len(epochs.main(["--smoke", "--results", str(tmp_path / "epochs.json")])) == 3
    output = tmp_path / "bound.png"
    for row in tightness.main(["--smoke", "--output", str(output)]):
        assert row["pair bound"] < row["pair exact"] + 0.01
        assert row["test bound"] < row["test estimate"] + 0.01
    assert output.stat().st_size > 10_000
