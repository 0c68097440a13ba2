# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The benchmark of StackedNMM on top of trained classifiers, in small."""

import pickle
from collections import Counter
from functools import partial

import networkx as nx
import numpy as np
import pytest
import torch
from graphs import to_hood
from torch.nn import functional as F
from torch_geometric.data import Data

from benchmarks.on_top import data, rivals, run, tables
from benchmarks.shared.records import RESULTS, read

SMALL = ["--graphs", "digits", "--backbones", "gcn", "--num-folds", "1"]


@pytest.fixture
def small(monkeypatch, tmp_path):
    """Run tasks on a graph of 24 cliques, most nodes of which share a label."""
    torch.set_default_dtype(torch.float)
    hood = to_hood(nx.connected_caveman_graph(24, 10))
    y = torch.arange(24).repeat_interleave(10) % 3
    y = torch.where(torch.rand(240) < 0.2, torch.randint(3, (240,)), y)
    edges, x = torch.stack([hood.source, hood.target]), F.one_hot(y, 3) + torch.randn(240, 3)
    graph = Data(x=x, edge_index=edges, y=y)
    for module in (data, run):
        monkeypatch.setattr(module, "graph", lambda name, root: (graph, hood))
    monkeypatch.setattr(data, "NUM_EPOCHS", 3)
    return lambda *tasks: run.main([*tasks, *SMALL, "--results", str(tmp_path / "rows.jsonl")])


@pytest.mark.slow
def test_methods_on_splits(small, tmp_path):
    methods = ["raw", "GATS", "CaGCN", "C&S", "Potts on C&S", "the pool alone", "StackedNMM"]
    tasks = ["splits", "edges", "--methods", *methods, "--splits", "100"]
    rows = small(*tasks).rows
    assert len(rows) == len((tmp_path / "rows.jsonl").read_text().splitlines()) == 2 * 7
    assert len(small(*tasks).rows) == len(rows)
    by_name = {row["method"]: row for row in rows if row["task"] == "splits"}
    assert by_name.keys() == set(methods)
    for name in methods[1:]:
        assert by_name[name]["test"]["nll"] < by_name["raw"]["test"]["nll"]
    assert by_name["StackedNMM"]["joint"] > -by_name["StackedNMM"]["test"]["nll"]
    pairs = {row["method"]: row["all"] for row in rows if row["task"] == "edges"}
    assert pairs["StackedNMM"]["nll"] < pairs["raw"]["nll"]
    assert pairs["raw"]["nll"] == pytest.approx(-by_name["raw"]["own product"], abs=1e-4)


@pytest.mark.slow
def test_labels_counts_weights_and_priors(small, monkeypatch):
    monkeypatch.setattr(run, "SIZES", [5])
    monkeypatch.setattr(run, "SHARES", [0.0, 0.5])
    tasks = ["labels", "counts", "weights", "priors", "--splits", "100"]
    rows = small(*tasks).rows
    number = Counter(row["task"] for row in rows)
    assert number == {"labels": 2 * 5, "counts": 1, "weights": 2, "priors": 2}
    assert len(small(*tasks).rows) == len(rows)
    of = {task: [row for row in rows if row["task"] == task] for task in number}
    for name in ("joint", "own product", "temperature"):
        assert 0 <= of["counts"][0][name]["width"] <= 5
    nll = {(row["share"], row["method"]): row["test"]["nll"] for row in of["labels"]}
    for method in ("C&S", "label propagation", run.UPDATED):
        assert nll[0.5, method] < nll[0.0, method]
    assert [row["method"] for row in of["weights"]] == ["none", "by distance"]
    assert of["weights"][0]["test"] != of["weights"][1]["test"]
    for row in of["weights"]:
        assert row["joint"] > -row["test"]["nll"] - 0.01


@pytest.mark.slow
def test_questions(small, monkeypatch):
    monkeypatch.setattr(run, "QUESTIONS", 2)
    monkeypatch.setattr(run, "SHOWN", [0, 2])
    monkeypatch.setattr(data, "NUM_OPEN", 10)
    rows = small("questions", "--splits", "0").rows
    assert len(rows) == 2 * len(run.RULES)
    first = rows[0]["curve"]
    assert first.keys() == {"0", "2"}
    for row in rows[1:3]:  # all rules begin alike, and entropy agrees with itself
        assert row["curve"]["0"] == first["0"]
    assert rows[1]["alike"] == pytest.approx(1)


def test_no_new_label_recalibrates_itself():
    y, seen = torch.randint(2, (30,)), []
    new, known = torch.arange(30) < 20, torch.arange(30) > 24

    def make(given):
        seen.append(given)
        return torch.full((30, 2), 0.5)

    rivals.by_folds(make, Data(y=y, train_mask=known, val_mask=new))
    whole, *folds = seen
    assert torch.equal(whole, known | new)
    left_out = torch.stack([(known | new) & ~given for given in folds])
    assert torch.equal(left_out.sum(0), new.long())


def test_drawn_splits_are_like_the_published_ones():
    y = torch.arange(10).repeat_interleave(40)
    folds, test = data.drawn(y, seed=7)
    assert [len(fold) for fold in folds] == [20, 20, 20]
    assert all((y[fold].bincount(minlength=10) == 2).all() for fold in folds)
    every = torch.cat([*folds, test])
    assert torch.equal(every.sort().values, torch.arange(400))


def test_training_stops_when_no_loss_is_equalled():
    """Kept is the last epoch at which both losses are the least so far."""
    losses = [(0.5, 0.9), (0.4, 0.8), (0.4, 0.85), (0.4, 0.8), (0.6, 0.7), (0.6, 0.9), (0.6, 0.9)]
    seen = iter(range(7))
    assert data.stopped_early(seen, losses.__getitem__, patience=1) == 3
    assert next(seen) == 6  # the rest was not trained
    assert data.stopped_early(iter(range(7)), losses.__getitem__, patience=3) == 3


class Harmful:
    def __reduce__(self):
        return print, ("this must not run",)


class Pointer:
    """Bytes that NumPy would take for the address of an object."""

    def __reduce__(self):
        return np.ndarray, ((1,), np.dtype(object), bytes(8))


def test_published_splits_run_no_code(tmp_path, capsys):
    """Folds of equal and of different sizes are read; a pickle of anything else is refused."""
    path = tmp_path / "split.npz"
    equal = np.arange(6).reshape(3, 2)
    different = np.array([np.arange(2), np.arange(2, 4), np.arange(4, 5)], dtype=object)
    for stored in (equal, different):
        np.savez(path, k_fold_indices=stored, test_indices=np.array([7, 8]))
        folds, test = data.published(path)
        assert [fold.tolist() for fold in folds] == [fold.tolist() for fold in stored]
        assert test.tolist() == [7, 8]
    harmful = np.array([Harmful(), None, None], dtype=object)
    np.savez(path, k_fold_indices=harmful, test_indices=np.array([7]))
    with pytest.raises(pickle.UnpicklingError, match="print is no part of an array"):
        data.published(path)
    np.savez(path, k_fold_indices=np.array([Pointer(), None], object), test_indices=np.array([7]))
    with pytest.raises(IndexError):
        data.published(path)
    assert capsys.readouterr().out == ""


def test_sets_grow_within_a_component(monkeypatch):
    monkeypatch.setattr(data, "NUM_SETS", 7)
    hood, inside = to_hood(nx.path_graph(9)), torch.arange(9) != 4
    grown = partial(data.grown, hood, inside, seed=0)
    sets = grown(3)
    assert sets.shape == (7, 3)
    assert inside[sets].all()
    assert (sets.sort().values.diff() == 1).all()
    assert len(grown(5)) == 0


def test_summary_of_counts():
    draws = torch.arange(101)[:, None].expand(-1, 2)
    found = run.summary(draws, torch.tensor([50, 99]))
    assert found["coverage"] == 0.5
    assert found["width"] == 90
    apart = (draws[:, None] - draws).abs().double().mean((0, 1)) / 2
    expected = (draws - torch.tensor([50, 99])).abs().double().mean(0) - apart
    assert found["CRPS"] == pytest.approx(expected.mean().item())


SHOWN = {
    "splits": lambda files: tables.calibration(files) + tables.heterophilous_methods(files),
    "edges": tables.edge_scores,
    "labels": tables.new_labels,
    "counts": tables.counts_in_sets,
    "questions": tables.twenty_questions,
    "weights": tables.weights_of_edges,
    "priors": tables.calibration_priors,
}


@pytest.mark.parametrize("task", SHOWN)
def test_every_stored_row_is_shown(task, monkeypatch):
    monkeypatch.setattr(tables.Paired, "p", 1.0)  # for speed
    names = ("dataset", "backbone", "method", "share", "size", "communities")
    cells = {}
    for row in read(RESULTS / "calibration.jsonl"):
        if row["task"] == task and row.get("split", 0) in (0, 100, 200):  # not all, for speed
            cells.setdefault((row["dataset"], row["backbone"]), []).append(row)
    assert cells
    for rows in cells.values():
        whole = SHOWN[task]({"calibration": rows})
        for key in {tuple(row.get(name) for name in names) for row in rows}:
            left = [row for row in rows if tuple(row.get(name) for name in names) != key]
            assert SHOWN[task]({"calibration": left}) != whole, key


def runs(lead):
    """Fifteen runs of StackedNMM, a rival that is worse by ``lead``, and one that is as good."""
    noise = torch.linspace(-0.01, 0.01, 15).tolist()
    methods = {"GATS": [0.5 + lead + x for x in noise], "C&S": [0.501 - x for x in noise]}
    methods["StackedNMM"] = [0.5] * 15
    row = {"task": "splits", "dataset": "cora", "backbone": "gcn", "joint": -0.4, "pairs": -0.9}
    row |= {"fit seconds": 1.0}
    return [
        row | {"method": method, "split": number // 3, "fold": number % 3,
               "test": {"accuracy": 0.8, "nll": nll, "brier": nll, "ece": nll}}
        for method, each in methods.items() for number, nll in enumerate(each)
    ]  # fmt: skip


def test_differences_are_paired_and_marked():
    lines = tables.calibration({"calibration": runs(0.02)}).splitlines()[2:]
    found = {line.split(" | ")[2]: line.split(" | ")[6] for line in lines}
    assert found["GATS"] == "-0.020 ± 0.006 †"
    assert found["C&S"] == "-0.001 ± 0.006"
    assert found["StackedNMM"] == ""
    worse = tables.calibration({"calibration": runs(-0.02)})
    assert "+0.020 ± 0.006 ‡" in worse


def test_missed_cells():
    """A rival with a better mean is named, and the cell counts as missed."""
    line = tables.missed_cells({"calibration": runs(-0.02)}).splitlines()[-1]
    assert "| +0.0200 (GATS) | +0.0200 (GATS) | +0.020 (GATS) |" in line
    assert line.endswith("| NLL, Brier, ECE |")


def test_tables_without_rows():
    assert {make({"calibration": []}) for make in tables.TABLES} == {
        "Nothing has been measured yet."
    }
