# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Heterophilous graphs: a small run, and tables whose differences are paired by split."""

import numpy as np
import pytest
import torch

from benchmarks.nodes import heterophilous, run, tables
from benchmarks.on_top import data
from benchmarks.shared.records import RESULTS, read


@pytest.fixture
def folder(tmp_path):
    """A cycle of sixty nodes with alternating labels, as the real graphs are stored."""
    y, split = torch.arange(60) % 2, torch.rand(1, 60)
    masks = {"train_masks": split < 0.5, "val_masks": (split >= 0.5) & (split < 0.7)}
    masks |= {"test_masks": split >= 0.7}
    edges = torch.stack([torch.arange(60), torch.arange(1, 61) % 60], 1)
    rows = {"node_features": torch.randn(60, 3), "node_labels": y, "edges": edges}
    (tmp_path / "heterophilous").mkdir()
    np.savez(tmp_path / "heterophilous" / "cycle.npz", **rows | masks)
    return tmp_path


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Sparse (CSR|invariant):UserWarning")
def test_both_tasks_run_on_a_small_graph(folder, monkeypatch):
    torch.set_default_dtype(torch.float)
    path = folder / "rows.jsonl"
    monkeypatch.setattr(data, "HETEROPHILOUS", ["cycle"])
    monkeypatch.setitem(heterophilous.SETTINGS, "num_epochs", 2)
    monkeypatch.setattr(heterophilous, "NUM_NODES", 20)
    small = ["--datasets", "cycle", "--backbones", "mlp", "gcn", "--num-splits", "1"]
    arguments = ["graphs", "generated", *small, "--data-root", str(folder), "--results", str(path)]
    rows = run.main(arguments).rows
    assert len(rows) == len(read(path)) == 2 * len(heterophilous.METHODS) + 1
    assert len(run.main(arguments).rows) == len(rows)
    for row in rows[:-1]:
        assert row["joint"] < 0
        assert ("conditional" in row) == (row["method"] != "backbone")
    assert rows[-1].keys() >= {"truth", "plain", "relabelled", "independent"}

    # A sparse matrix in place of messages changes no prediction.
    monkeypatch.setattr(heterophilous, "MANY_EDGES", 0)
    arguments[-1] = str(folder / "sparse.jsonl")
    for row, other in zip(rows[:-1], run.main(arguments).rows, strict=False):
        assert row["joint"] == pytest.approx(other["joint"], abs=1e-3)


def test_relabelling_is_compared_with_plain_edges_split_by_split():
    row = {"task": "graphs", "dataset": "texas", "backbone": "mlp", "own product": -2.0}
    rows = [
        row | {"method": method, "split": split, "joint": joint + 0.02 * split * joint,
               "test": {"accuracy": 0.8, "nll": -joint}}
        for method, joint in (("NMM", -0.9), ("NMM, relabelled", -0.6), ("other", -0.1))
        for split in range(4)
    ]  # fmt: skip
    text = tables.heterophilous({"repelling": rows}).splitlines()[2:]
    plain, relabelled, other = (line.split(" | ") for line in text)
    assert (plain[2:4], other[2:4]) == (["NMM", "plain"], ["other", "plain"])
    assert relabelled[2:4] == ["NMM", "relabelled"]
    assert relabelled[7].startswith("-0.300 ± 0.000")
    assert relabelled[9] == "+0.309 ± 0.008 †"
    generated = [{"task": "generated", "seed": s, "truth": -0.5 - s, "plain": -0.7 - s,
                  "relabelled": -0.6 - s, "independent": -0.8 - s} for s in range(3)]  # fmt: skip
    found = tables.heterophilous_generated({"repelling": generated}).splitlines()
    assert found[3].endswith("| -0.100 ± 0.000 |")


def test_every_stored_row_is_in_a_table():
    rows = read(RESULTS / "repelling.jsonl")
    text = tables.heterophilous({"repelling": rows})
    kinds = {"backbone": "temperature scaling", "stacked": "StackedNMM"}
    for row in rows[::6]:
        if row["task"] == "graphs":
            model, _, edges = row["method"].partition(", ")
            edges = "" if model == "backbone" else edges or "plain"
            line = row["dataset"], row["backbone"].upper(), kinds.get(model, model), edges, "10"
            assert f"| {' | '.join(line)} |" in text
