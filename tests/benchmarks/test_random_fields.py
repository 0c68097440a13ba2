# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The benchmark of random fields, in small, and its tables of stored rows."""

import json

import pytest
import torch

from benchmarks.random_fields import run, tables
from benchmarks.random_fields.fields import kac_ward, plain_ising
from benchmarks.shared.records import RESULTS, read
from pyro_nmm.models import grid_edges, ising

TASKS = ["strips", "letter", "plain", "amortized", "scaling", "deviations"]


@pytest.mark.slow
def test_small_runs(tmp_path):
    """Rows of all tasks, once; divergences are positive, and bounds are above them."""
    torch.set_default_dtype(torch.float)
    arguments = [*TASKS, "--num-steps", "4", "--num-samples", "2", "--num-seeds", "1"]
    arguments += ["--height", "3", "--size", "8", "--sizes", "8", "--sweeps", "4"]
    arguments += ["--results", str(tmp_path / "fields.jsonl")]
    rows = run.main(arguments).rows
    assert len(rows) == 3 + 1 + 3 + 1 + 1 + 6
    assert len(run.main(arguments).rows) == len(rows)
    for row in rows:
        if row["task"] == "strips":
            assert row["mean field"] > 0
            assert row["NMM bound"] > row["NMM"] - 4 * row["error"] > -8 * row["error"]
            assert 0 < row["marginals"]["NMM"] < 1
        if row["task"] == "plain":
            assert row["log Z"] == pytest.approx(kac_ward(8, 8, row["coupling"]))
            assert min(row[name] + row["log Z"] for name in ("mean field", "NMM", "NMM-CNN")) > 0
    files = {"fields": rows, "deviations": [row for row in rows if row["task"] == "fields"]}
    shown = [make(files) for make in (tables.strips, tables.large, tables.amortized)]
    shown += [make(files) for make in (tables.scaling, tables.field_deviations)]
    assert all(text.startswith("| ") for text in shown)


def test_log_z_of_kac_and_ward():
    for height, width, coupling in ((5, 4, 0.3), (1, 6, 0.5), (6, 1, 0.4), (7, 7, 0.9)):
        field = ising(grid_edges(height, width), coupling, torch.zeros(height * width).double())
        log_z = field.log_normalizer().item()
        assert abs(kac_ward(height, width, coupling) - log_z) < 1e-9


FILES = {path.stem: read(path) for path in RESULTS.glob("*.jsonl") if "fields" in path.stem}
FILES["deviations"] = read(RESULTS / "deviations.jsonl")


def shown(files):
    return [make(files) for make in tables.TABLES]


@pytest.mark.parametrize("name", FILES)
def test_every_row_is_shown(name):
    """Without the rows of any task, method, coupling or seed, a table changes."""
    fields = "task", "labels", "method", "coupling", "seed", "change", "size"
    whole, parts = shown(FILES), {}
    for row in FILES[name]:
        if row["task"] != "links":
            parts.setdefault(json.dumps([row.get(key) for key in fields]), []).append(row)
    for part in parts.values():
        rest = [row for row in FILES[name] if row not in part]
        assert shown(FILES | {name: rest}) != whole, part[0]
