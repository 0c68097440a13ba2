# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The benchmark of node classification, in small."""

from importlib import import_module

import pytest
import torch


@pytest.fixture(autouse=True)
def as_a_user():
    torch.set_default_dtype(torch.float)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_benchmark_of_node_classification(tmp_path):
    """Its smallest size runs through all tasks, and a second run has nothing left to do."""
    benchmark = import_module("benchmarks.nodes.run")

    path = tmp_path / "results.jsonl"
    small = ["--smoke", "--results", str(path)]
    tasks = ["search", "accuracy", "pairs", "sizes", "deviations", "communities", *small]
    results = benchmark.main(tasks)
    lines = path.read_text().splitlines()
    assert len(lines) == len(results.rows) == 2 * 2 + 3 * (3 + 2 + 3 + 2) + 13 + 2 * 4
    assert len(benchmark.main(tasks).rows) == len(lines)
    pairs = {row["method"]: row for row in results.rows if row["task"] == "pairs"}
    for row in results.rows:
        if row["task"] == "pairs":
            known, base = row["on temperature"], pairs["backbone, temperature"]
            ours = row.get("conditional", row["own product"])
            assert known["mean"] == pytest.approx(ours - base["own product"], abs=1e-5)
            assert known["low"] <= known["mean"] <= known["high"]
        if row["task"] == "deviations":
            assert 0 < row["sequential"] < 1
    own = ["--settings-of", "NMM", "--searched", "NMM"]
    again = benchmark.main(["search", "accuracy", *own, *small]).rows
    assert len(again) == len(lines) + 2 + 10
    assert all(row["settings of"] == "NMM" for row in again[-10:])

    alone = tmp_path / "alone.jsonl"  # a method by itself draws what it draws among others
    tasks = ["pairs", "--smoke", "--methods", "NMM", "--results", str(alone)]
    for row in benchmark.main(tasks).rows:
        same = next(
            r for r in results.rows if r["task"] == "pairs" and r["method"] == row["method"]
        )
        assert same | {"fit seconds": row["fit seconds"]} == row


@pytest.mark.slow
def test_benchmark_of_repelling_labels(tmp_path):
    benchmark = import_module("benchmarks.nodes.repelling")
    path = tmp_path / "repelling.jsonl"
    tasks = ["graphs", "generated", "--smoke", "--results", str(path)]
    rows = benchmark.main(tasks).rows
    assert len(rows) == len(path.read_text().splitlines()) == 2 * len(benchmark.METHODS) + 1
    assert len(benchmark.main(tasks).rows) == len(rows)
    for row in rows[:-1]:
        assert row["joint"] < 0
        assert ("conditional" in row) == (row["method"] != "backbone")
    assert rows[-1].keys() >= {"truth", "plain", "relabelled", "independent"}
