# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The benchmark of random fields, in small, and its tables of stored rows."""

import pytest
import torch

from benchmarks.random_fields import fields, methods, run, tables
from benchmarks.random_fields.fields import kac_ward
from benchmarks.shared.records import RESULTS, pick, read
from benchmarks.shared.tables import Paired
from pyro_nmm.models import grid_edges, ising

TASKS = ["strips", "letter", "plain", "amortized", "scaling", "deviations"]


@pytest.fixture
def small(monkeypatch):
    """Fields of a few pixels, and fits of a few steps."""
    torch.set_default_dtype(torch.float)
    monkeypatch.setattr(fields, "STRIPS", {2: (2, 12), 4: (2, 8), 8: (2, 5)})
    monkeypatch.setattr(fields, "COUPLINGS", fields.COUPLINGS | {2: [0.4]})
    monkeypatch.setattr(fields, "SEEDS", range(1))
    monkeypatch.setattr(fields, "SIZE", 6)
    monkeypatch.setattr(run, "STEPS", dict.fromkeys(run.STEPS, 4))
    monkeypatch.setattr(run, "SIZES", [8])
    monkeypatch.setattr(methods, "STARTS", 1)
    return monkeypatch


@pytest.mark.slow
def test_small_runs(tmp_path, small):
    """Rows of all tasks, once; divergences are positive, and bounds are above them."""
    small.setattr(methods, "NARROW", {labels: [] for labels in methods.NARROW})
    small.setattr(methods, "LARGE", [])
    arguments = [*TASKS, "--results", str(tmp_path / "fields.jsonl")]

    def measured():
        return run.main(arguments).rows + read(tmp_path / "deviations.jsonl")

    rows = measured()
    assert [row["task"] for row in rows] == [*TASKS[:-1], "fields", "fields"]
    assert len(measured()) == len(rows)
    for row in rows:
        if row["task"] == "strips":
            assert row["mean field"] > 0
            assert row["NMM bound"] > row["NMM"] - 4 * row["error"] > -8 * row["error"]
            assert 0 < row["marginals"]["NMM"] < 1
        if row["task"] == "plain":
            assert row["log Z"] == pytest.approx(kac_ward(6, 6, row["coupling"]))
            assert min(row[name] + row["log Z"] for name in ("mean field", "NMM", "NMM-CNN")) > 0
    files = {"fields": rows, "deviations": [row for row in rows if row["task"] == "fields"]}
    shown = [make(files) for make in (tables.strips, tables.large, tables.amortized)]
    shown += [make(files) for make in (tables.scaling, tables.field_deviations)]
    assert all(text.startswith("| ") for text in shown)


RIVALS = {
    "strips": ["NMM, 5 x 5, 2 steps", "NMM of half, row by row, 2 steps", "Bethe"],
    "plain": ["mean field", "chains", "NMM of half, 2 steps", "Bethe"],
    "letter": ["VAN, 3 steps", "windows 5 x 5, 4 given"],
}
POTTS = ["NMM, 2 steps", "tree-reweighted", "windows 3 x 3, 3 given"]


@pytest.mark.slow
@pytest.mark.parametrize("task", RIVALS)
def test_small_runs_of_rivals(task, tmp_path, small):
    """A row for each field and method, once. No divergence and no upper bound is negative."""
    exact = fields.noisy_letter(0)[0].log_normalizer().item()
    (tmp_path / "fields.jsonl").write_text(f'{{"task": "letter", "seed": 0, "log Z": {exact}}}\n')
    small.setattr(methods, "NARROW", {2: RIVALS["strips"], 4: POTTS, 8: POTTS})
    small.setattr(methods, "LARGE", RIVALS[task])
    found = []
    for _ in range(2):
        run.main([task, "--results", str(tmp_path / "fields.jsonl")])
        found.append(read(tmp_path / "fields_compared.jsonl"))
    rows = found[0]
    assert [row["method"] for row in rows] == RIVALS[task] + 6 * POTTS * (task == "strips")
    assert len(found[1]) == len(rows)
    for row in rows:
        if row["method"] == "tree-reweighted":
            assert row["log Z error"] > -1e-3
        elif row["method"] != "Bethe":
            assert -5 * row.get("error", 0.0) - 1e-3 < row["KL"] < 100


def test_log_z_of_kac_and_ward():
    for height, width, coupling in ((5, 4, 0.3), (1, 6, 0.5), (6, 1, 0.4), (7, 7, 0.9)):
        field = ising(grid_edges(height, width), coupling, torch.zeros(height * width).double())
        log_z = field.log_normalizer().item()
        assert abs(kac_ward(height, width, coupling) - log_z) < 1e-9


TABLES = {
    "fields": (tables.strips, tables.large, tables.amortized, tables.scaling),
    "fields_compared": (tables.field_rivals, tables.log_z_rivals, tables.large_rivals),
    "deviations": (tables.field_deviations,),
}


@pytest.mark.parametrize("name", TABLES)
def test_every_row_is_shown(name, monkeypatch):
    """Without the rows of a task, a method, a coupling or a size, a table changes."""
    monkeypatch.setattr(Paired, "p", 1.0)  # for speed
    files = {file: read(RESULTS / f"{file}.jsonl") for file in ("fields", "fields_compared")}
    files["deviations"] = pick(read(RESULTS / "deviations.jsonl"), task="fields")

    def shown(rows):
        return [make(files | {name: rows}) for make in TABLES[name]]

    keys = {(row["task"], row.get("labels")): None for row in files[name]}
    for task, labels in keys:
        among = pick(files[name], task=task, labels=labels)
        whole, parts = shown(among), {}
        for row in among:
            key = tuple(map(row.get, ("method", "coupling", "change", "size")))
            parts.setdefault(key, []).append(row)
        for part in parts.values():
            assert shown([row for row in among if row not in part]) != whole, part[0]


def test_differences_are_paired_and_other_names_appear():
    """On two fields whose NMM of all pixels is 1 and 2 nats behind a rival that is new."""
    row = {"task": "strips", "labels": 2, "coupling": 0.4, "seconds": 1.0}
    kl = {"NMM, 2000 steps": (3.0, 6.0), "another one": (2.0, 4.0), "a third": (4.0,)}
    rows = [
        row | {"method": method, "seed": seed, "KL": value}
        for method, values in kl.items()
        for seed, value in enumerate(values)
    ]
    lines = tables.field_rivals({"fields_compared": rows}).splitlines()[2:]
    assert lines == [
        "| 2 | NMM, 2000 steps | 4.50 (2) |  |  | 1.0 |",
        "| 2 | a third | 4.00 (1) | +1.00 | 0 of 1 | 1.0 |",
        "| 2 | another one | 3.00 (2) | -1.50 ± 0.71 (median -1.50) | 2 of 2 | 1.0 |",
    ]
