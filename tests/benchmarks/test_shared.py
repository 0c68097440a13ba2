# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Stored rows and the tables that are declared of them."""

import threading

import pytest

from benchmarks.shared import tables
from benchmarks.shared.records import Records, chosen, read


def rows():
    """Two graphs, three methods, seeds that not all have."""
    values = {"base": (1.0, 2.0, 3.0), "ours": (1.5, 2.4, 3.9), "other": (0.0,)}
    return [{"task": "fit", "graph": graph, "method": method, "seed": seed,
             "noise": 10 * (1 + seed), "test": {"score": shift + value}}
            for graph, shift in (("b", 0.0), ("a", 1.0))
            for method, found in values.items()
            for seed, value in enumerate(found)]  # fmt: skip


def test_differences_are_paired_and_have_a_spread():
    gaps = tables.Paired.of({0: 1.5, 1: 2.4, 2: 5.9, 3: 0.0}, {2: 5.0, 1: 2.0, 0: 1.0})
    assert gaps.text(2) == "+0.60 ± 0.26 (median +0.50, p = .059)"
    assert tables.Paired([2.0] * 5).text(1) == "+2.0 ± 0.0 (median +2.0)"
    assert tables.Paired([]).text(1) == ""
    assert tables.Paired([1 + 1e-3 * i for i in range(9)]).text(2).endswith("p < 1e-6)")
    assert tables.Paired([0.1, 0.11, 0.12]).mark() == " †"
    assert tables.Paired([0.1, 0.11, 0.12]).mark(-1) == " ‡"
    assert tables.Paired([0.1, -0.1, 0.05]).mark() == ""
    assert tables.centre_of([1.0, 2.0, 6.0], 1) == "3.0 (2.0)"


def test_lines_are_in_order_and_differences_within_a_graph():
    found = tables.frame([*rows(), {"task": "other"}], task="fit")
    found["graph"] = tables.ordered(found.graph, None)
    found["model"] = tables.ordered(found.method, {"ours": "NMM", "base": "Base"})
    cells = {"seeds": tables.count, "score": tables.spread("score", 1), ("score", "minus Base"):
             tables.against("base", "score", 2, form=tables.Paired.brief)}  # fmt: skip
    lines = tables.table(found, ["graph", "model"], cells).splitlines()
    assert lines[0] == "| graph | model | seeds | score | minus Base |"
    assert lines[2] == "| a | NMM | 3 | 3.6 ± 1.2 | +0.60 ± 0.26 (p = .059) |"
    assert lines[3] == "| a | Base | 3 | 3.0 ± 1.0 |  |"
    assert lines[5].startswith("| b | NMM | 3 | 2.6")
    assert len(lines) == 8
    assert tables.table(found[:0], ["method"], {}) == "Nothing has been measured yet."


def test_differences_over_cells_have_a_range_and_are_counted():
    found = tables.frame(rows())
    cells = {
        "cells": tables.number_of("graph"),
        "minus": tables.over(["graph"], "base", "score", "+.1f"),
    }
    cells |= {"noise": tables.over(["graph"], "base", "noise", "+.0f")}
    cells |= {"better, worse": tables.clear(["graph"], "base", "score")}
    lines = tables.table(found, ["method"], cells).splitlines()
    assert lines[2] == "| base | 2 |  |  |  |"
    assert lines[3] == "| ours | 2 | +0.6 (+0.6 to +0.6) | +0 (+0 to +0) | 0, 0 of 2 |"
    assert lines[4] == "| other | 2 | -1.0 (-1.0 to -1.0) | +0 (+0 to +0) | 0, 0 of 2 |"
    sure = [{"method": name, "graph": "a", "seed": seed, "score": shift + 0.1 * seed * (name > "a")}
            for name, shift in (("a", 0), ("b", 1), ("c", -1)) for seed in range(3)]  # fmt: skip
    marks = {"more": tables.clear(["graph"], "a", "score"),
             "less": tables.clear(["graph"], "a", "score", better=-1)}  # fmt: skip
    lines = tables.table(tables.frame(sure), ["method"], marks).splitlines()
    assert lines[2:] == ["| b | 1, 0 of 1 | 0, 1 of 1 |", "| c | 0, 1 of 1 | 1, 0 of 1 |"]
    assert tables.range_of([], ".1f") == ""
    assert tables.range_of([0.25], ".1f", 100) == "25.0"


def test_records_know_what_is_missing(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"seed": 0, "method": "a"}\n{"seed": 1, "meth')
    records = Records(path)  # a line that was cut short is dropped
    assert path.read_text().endswith('"a"}\n')
    missing = list(records.missing(method=["a", "b"], seed=range(2), share=None))
    assert missing == [{"method": "a", "seed": 1}, {"method": "b", "seed": 0},
                       {"method": "b", "seed": 1}]  # fmt: skip
    records.add(method="b", seed=0, curve=[1.0])
    assert read(path)[-1] == {"method": "b", "seed": 0, "curve": [1.0]}
    with path.open("a") as file:  # another process is killed
        file.write('{"seed": 1, "met')
    records.add(seed=2)
    assert [row["seed"] for row in Records(path).rows] == [0, 0, 2]


def test_a_file_is_opened_while_another_process_appends(tmp_path):
    """A line that is not finished yet is not taken for one that was cut short."""
    fcntl = pytest.importorskip("fcntl")
    path = tmp_path / "rows.jsonl"
    Records(path).add(seed=0)
    with path.open("ab", buffering=0) as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        other.write(b'{"seed": 1')
        thread = threading.Thread(target=Records, args=(path,))
        thread.start()
        thread.join(0.1)
        other.write(b"}\n")
    thread.join()
    assert [row["seed"] for row in Records(path).rows] == [0, 1]


def test_settings_of_a_search():
    common = {"task": "search", "graph": "a"}
    found = [common | {"trial": trial, "settings": {"lr": trial}, "score": score}
             for trial, score in ((0, 1.0), (0, 3.0), (1, 2.5), (1, 2.0))]  # fmt: skip

    def mean(trial):
        return sum(row["score"] for row in trial) / len(trial)

    assert chosen(found, mean, 2, graph="a") == {"lr": 1}
    with pytest.raises(ValueError, match="search of a has not been finished"):
        chosen(found, mean, 3, graph="a")
