# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Tables and figures of speed and batches: no stored row is hidden, differences are paired."""

import json
from functools import cache

import pytest

from benchmarks.scale import tables
from benchmarks.shared.records import RESULTS, read

NAMES = (
    "gradient_variance",
    "samples",
    "speed",
    "device",
    "large",
    "epochs",
    "tightness",
    "batches",
)
FILES = {name: read(RESULTS / f"{name}.jsonl") for name in NAMES}


class Watched(dict):
    """Files, and the names of those that were read."""

    def __init__(self, files):
        super().__init__(files)
        self.names = set()

    def __getitem__(self, name):
        self.names.add(name)
        return super().__getitem__(name)


@cache
def read_by(maker):
    files = Watched(FILES)
    maker(files)
    return files.names


def makers(name):
    """Tables of a file."""
    return [maker for maker in tables.TABLES if name in read_by(maker)]


def ends(rows):
    """The first and the last of rows that differ by numbers alone."""
    found = {}
    for row in rows:
        key = {k: v for k, v in row.items() if isinstance(v, str)}
        found.setdefault(json.dumps(key, sort_keys=True), []).append(row)
    return [row for part in found.values() for row in (part[0], part[-1])]


@pytest.mark.parametrize("name", NAMES)
def test_every_row_is_shown(name):
    whole = {maker: maker(FILES) for maker in makers(name)}
    for row in ends(FILES[name]):
        left = FILES | {name: [other for other in FILES[name] if other is not row]}
        assert any(maker(left) != text for maker, text in whole.items()), row


@pytest.mark.parametrize(
    ("name", "task", "field"),
    [
        ("speed", "draw", "code"),
        ("speed", "step", "estimator"),
        ("speed", "scale", "name"),
        ("device", "device", "query"),
        ("gradient_variance", None, "estimator"),
    ],
)
def test_rows_under_new_names_appear(name, task, field):
    row = next(row for row in FILES[name] if row.get("task") == task)
    more = FILES | {name: [*FILES[name], row | {field: "another one"}]}
    assert any("another one" in maker(more) for maker in makers(name))


def lines(text):
    return [line.strip("| ").split(" | ") for line in text.splitlines()]


def test_batches_are_compared_with_the_whole_graph():
    """Three seeds, of which random batches lose .01 nats and 1 point, and clusters gain."""
    row = {"task": "training", "dataset": "cora", "epochs": 10, "steps": 70}
    rows = [
        row | {"way": way, "seed": seed, "joint": -0.7 + gap,
               "test": {"accuracy": 0.8 + gap + seed * gap / 10}} | size
        for way, size, gap in (("whole graph", {}, 0.0), ("random", {"batch_size": 20}, -0.01),
                               ("clusters", {"batch_size": 20}, 0.01))
        for seed in range(3)
    ]  # fmt: skip
    _, _, whole, random, clusters = lines(tables.batch_training({"batches": rows}))
    assert [line[1] for line in (whole, random, clusters)] == [
        "whole graph", "random, 20", "cluster-wise, 20"
    ]  # fmt: skip
    assert whole[4] == ""
    assert random[4] == "-1.1 ± 0.1 ‡"
    assert clusters[4] == "+1.1 ± 0.1 †"
    assert random[6].startswith("-0.010 ± 0.000")


def test_ratios():
    rows = [{"task": "throughput", "dataset": "cora", "processes": number, "repeat": 0,
             "seconds": seconds} for number, seconds in ((1, 2.0), (2, 1.6))]  # fmt: skip
    assert lines(tables.batch_throughput({"batches": rows}))[-1][-1] == "1.25"
    row = {"task": "evidence", "nodes": 19_717, "edges": 108_269, "classes": 7, "particles": 4,
           "estimator": "no_score", "seconds": {"observed": 0.02, "evidence": 0.05}}  # fmt: skip
    found = lines(tables.evidence_steps({"speed": [row]}))[-1]
    assert found == ["no_score", "19,717", "108,269", "7", "4", "20.0", "50.0", "2.50"]


def test_growth_is_told_by_exponents():
    """A query that takes a hundred times as long on ten times as many edges is quadratic."""
    row = {"task": "scale", "query": "sample", "name": "sample", "classes": 2, "above": 0}
    rows = [row | {"nodes": size, "edges": size, "seconds": size**2 / 1e4, "peak": 1e9}
            for size in (1000, 100)]  # fmt: skip
    first, second = lines(tables.scale({"speed": rows}))[2:]
    assert (first[5], second[5]) == ("", "2.00")


def test_figures(tmp_path):
    for make in tables.FIGURES.values():
        make(FILES).savefig(tmp_path / "figure.png")
        assert (tmp_path / "figure.png").stat().st_size > 10_000
