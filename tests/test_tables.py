# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""No row of the results is hidden: take it away, and a table changes; add one, and it appears."""

import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import comparison  # noqa: E402
import denoise_tables  # noqa: E402
import deviation_tables  # noqa: E402
import link_tables  # noqa: E402
import mrf_tables  # noqa: E402

sys.path.remove(str(BENCHMARKS))

FILES = {"link_prediction": link_tables, "mrf": mrf_tables, "denoising": denoise_tables}


def table(head, rows, left=1):
    """All cells, also of rows that report.py would leave out."""
    return "\n".join(" | ".join(row) for row in rows)


def shown(name, rows):
    if name == "deviations":
        stored = deviation_tables.stored(BENCHMARKS / "results")
        return deviation_tables.from_paper(stored | {name: rows}, table)
    return "\n".join(FILES[name].tables(rows, table).values())


def ends(rows):
    """The first and the last of the rows that differ by image, split or trial alone."""
    found = {}
    for number, row in enumerate(rows):
        names = {k: v for k, v in row.items() if isinstance(v, str) or k in ("split", "coupling")}
        if row["task"] in ("train", "test"):
            names |= {"settings": row["settings"], "seed": row["seed"]}
        key = {k: v for k, v in names.items() if k != "image"}
        found.setdefault(json.dumps(key, sort_keys=True), []).append(number)
    return sorted({number for part in found.values() for number in (part[0], part[-1])})


@pytest.mark.parametrize("name", [*FILES, "deviations"])
def test_every_row_is_shown(name, monkeypatch):
    monkeypatch.setattr(comparison, "p_value", lambda pairs: "")  # for speed
    rows = mrf_tables.load(BENCHMARKS / "results" / f"{name}.jsonl")
    assert rows
    whole = shown(name, rows)
    for number in ends(rows):
        row = rows[number]
        if name != "deviations" or row.get("change") != "":
            left = rows[:number] + rows[number + 1 :]
            assert shown(name, left) != whole, row


@pytest.mark.parametrize(
    ("name", "task", "field"),
    [
        ("denoising", "test", "method"),
        ("denoising", "test", "dataset"),
        ("denoising", "train", "method"),
        ("link_prediction", "compare", "dataset"),
        ("link_prediction", "compare", "guide"),
        ("link_prediction", "search", "guide"),
        ("link_prediction", "search", "dataset"),
        ("link_prediction", "memberships", "dataset"),
        ("link_prediction", "cost", "dataset"),
        ("link_prediction", "reproduce", "dataset"),
        ("deviations", "links", "change"),
        ("deviations", "fields", "change"),
    ],
)
def test_rows_under_new_names_appear(name, task, field):
    """Nothing is looked up in a list of what is known."""
    rows = mrf_tables.load(BENCHMARKS / "results" / f"{name}.jsonl")
    row = next(r for r in rows if r["task"] == task and r.get(field) != "")
    assert "another one" in shown(name, [*rows, row | {field: "another one"}])


def test_new_seeds_and_settings_appear():
    rows = mrf_tables.load(BENCHMARKS / "results" / "denoising.jsonl")
    row = next(r for r in rows if r["task"] == "test")
    whole = shown("denoising", rows)
    assert shown("denoising", [*rows, row | {"seed": 77}]) != whole
    other = row | {"settings": row["settings"] | {"num_steps": 123}}
    assert "123 steps" in shown("denoising", [*rows, other])


def test_changes_of_nodes_are_read_as_they_come():
    scores = [{"accuracy": 0.80, "nll": 0.6}, {"accuracy": 0.82, "nll": 0.5}]
    base = {"task": "deviations", "dataset": "cora", "backbone": "gcn", "method": "NMM"}
    rows = [
        base | {"change": change, "seed": seed, "test": {k: v + gap for k, v in score.items()},
                "sequential": score["accuracy"] - 0.01}
        for change, gap in (("none", 0.0), ("something new", 0.02))
        for seed, score in enumerate(scores)
    ]  # fmt: skip
    lines = [list(part) for part in deviation_tables.nodes(rows)]
    assert [part[1] for part in lines] == ["prediction", "something new"]
    assert lines[0][-1] == "accuracy -1.0 ± 0.0 (median -1.0)"
    assert lines[1][4:] == [
        "2 seeds",
        "accuracy +2.0 ± 0.0 (median +2.0); NLL +0.020 ± 0.000 (median +0.020)",
    ]


def test_differences_are_paired_and_have_a_spread():
    pairs = [(1.0, 1.5), (2.0, 2.4), (5.0, 5.9)]
    assert comparison.difference(pairs, 2) == "+0.60 ± 0.26 (median +0.50, p = .059)"
    assert comparison.difference([(1.0, 3.0)] * 5, 1) == "+2.0 ± 0.0 (median +2.0)"
    assert comparison.difference(pairs[:1], 1) == "+0.5"
    assert comparison.difference([], 1) == ""
    assert comparison.difference([(0.0, 1 + 1e-3 * i) for i in range(9)], 2).endswith("p < 1e-6)")
    assert comparison.centre([1.0, 2.0, 6.0], 1) == "3.0 (2.0)"
