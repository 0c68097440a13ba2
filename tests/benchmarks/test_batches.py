# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Mini-batches against the whole graph, in small."""

import pytest
import torch

from benchmarks.scale import run, training


@pytest.mark.slow
def test_benchmark_of_batches(tmp_path, monkeypatch):
    torch.set_default_dtype(torch.float)
    settings = {"lr": 0.02, "weight_decay": 5e-4, "dropout": 0.5, "floor": 0.1, "gamma": 2.0}
    monkeypatch.setattr(training, "chosen", lambda rows, **key: settings)
    # Two processes that start within two seconds, with half a second an epoch.
    monkeypatch.setattr(
        training, "timed", lambda function, key, root, number: (None, 2 + number / 2)
    )
    command = ["--datasets", "digits", "--num-epochs", "2", "--num-seeds", "1"]
    command += ["--results", str(tmp_path / "batches.jsonl")]
    rows = run.main(["training", "--batch-sizes", "30", *command]).rows
    rows = run.main(["bound", "throughput", "--batch-sizes", "600", *command]).rows
    assert len(rows) == 3 + 3 + 2
    again = run.main(["bound", "throughput", "--batch-sizes", "600", *command]).rows
    assert len(again) == len(rows)
    assert [row["steps"] for row in rows[:3]] == [2, 6, 6]
    parts = {row["way"]: row for row in rows if row["task"] == "bound"}
    for row in parts.values():
        assert row["bound"] < row["estimate"] + 0.01
    # Clusters hold neighbours, so that a sum over them loses less of their correlation.
    assert parts["random"]["estimate"] < parts["clusters"]["estimate"]
    assert [row["seconds"] for row in rows[-2:]] == [0.5, 0.5]
