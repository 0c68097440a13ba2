# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The benchmark of tables with few labels, in small."""

import numpy as np
import pytest
import torch
from sklearn.datasets import make_blobs

from benchmarks.tabular import citation, data, run, scale, tables
from pyro_nmm.datasets import digits, random_split


@pytest.fixture
def small(monkeypatch, tmp_path):
    """Two tables of three clouds of rows, and rows of one classifier's scores."""
    torch.set_default_dtype(torch.float)

    def drawn(seed):
        for name, spread in {"near": 1.0, "far": 6.0}.items():
            rows, labels = make_blobs(240, 4, centers=3, cluster_std=spread, random_state=seed)
            yield name, (rows, labels, np.arange(60), np.arange(60, 240))

    monkeypatch.setattr(run, "keel", drawn)
    kinds = {"logistic regression": data.KINDS["logistic regression"]}
    monkeypatch.setattr(run, "KINDS", kinds)
    monkeypatch.setattr(run, "ALONE", ())
    return lambda *more: run.main(
        [
            "tables",
            "--seeds",
            "0",
            "--classifiers",
            *kinds,
            *more,
            "--results",
            str(tmp_path / "rows.jsonl"),
        ]
    )


@pytest.mark.slow
def test_all_methods_on_small_tables(small):
    rows = small().rows
    assert len(rows) == len(small().rows) == 2 * len(run.METHODS)
    found = {(row["table"], row["method"]): row for row in rows}
    for row in rows:
        assert row["nll"] >= 0
        assert 0 <= row["ece"] <= 1
    for method in run.METHODS:
        assert found["near", method]["accuracy"] > 0.9, method
    assert found["near", run.OURS]["agreement"] > 0.9 > found["far", run.OURS]["agreement"]
    shown = tables.methods_on_tables({"tabular": rows})
    assert shown.count("\n") == len(run.METHODS) + 1
    assert "| far | " in tables.each_table({"tabular": rows})


@pytest.mark.slow
def test_new_rows_lose_little(small, tmp_path, monkeypatch):
    monkeypatch.setattr(scale, "keel", run.keel)
    monkeypatch.setattr(scale, "KINDS", run.KINDS)
    path = str(tmp_path / "new.jsonl")
    rows = run.main(["new_rows", "--seeds", "0", "--results", path]).rows
    assert [row["rows"] for row in rows] == ["fitted", "new"] * 2
    near = [row["accuracy"] for row in rows if row["table"] == "near"]
    assert min(near) > 0.9
    assert abs(near[0] - near[1]) < 0.05
    assert "| new | 2 | " in tables.rows_after_the_fit({"tabular": rows})


@pytest.mark.slow
def test_cost_of_a_small_table():
    row = scale.one_size(2000, "exact")
    assert row["accuracy"] > 0.5
    assert min(row["seconds"].values()) >= 0
    shown = tables.cost_by_rows({"tabular": [row | {"task": "size", "number": 2000,
                                                    "neighbors": "exact"}]})  # fmt: skip
    assert "| exact | 2000 | " in shown


@pytest.mark.slow
def test_folds_on_a_graph(tmp_path, monkeypatch):
    """On the digits, where the network of all labels is better than the one of half of them."""
    torch.set_default_dtype(torch.float)
    split = random_split(digits(), train=0.03, val=0.1, test=0.5, seed=0)
    monkeypatch.setattr(citation, "planetoid", lambda name, root: split)
    options = ["--graphs", "cora", "--backbones", "gcn", "--splits", "0", "--results"]
    rows = run.main(["folds", *options, str(tmp_path / "rows.jsonl")]).rows
    nll = {row["method"]: row["nll"] for row in rows}
    assert nll["StackedNMM, five folds"] < nll["temperature, five folds"] < nll["temperature"]
    assert nll["StackedNMM, five folds"] < nll["StackedNMM"]
    assert "| Cora | gcn | StackedNMM, five folds | 1 | " in tables.folds_or_held_out(
        {"tabular": rows}
    )


def test_retrained_networks_have_not_seen_their_fold(monkeypatch):
    split = random_split(digits(), train=0.03, val=0.1, test=0.5, seed=0)
    seen = []

    def taught(module, optimizer, inputs, num):
        seen.append(inputs[2])
        yield torch.zeros(1797, 10)

    monkeypatch.setattr(citation, "epochs", taught)
    parts, _, folds = citation.retrained("gcn", split, 0)
    known = split.train_mask | split.val_mask
    assert parts.shape == (5, 1797, 10)
    assert torch.equal(folds >= 0, known)
    for fold, mask in enumerate(seen[:5]):
        assert torch.equal(mask, known & (folds != fold))
    assert torch.equal(seen[5], known)


def test_folds_hold_out_every_label_once():
    rows, labels = make_blobs(90, 2, centers=3, random_state=0)
    make = lambda: data.KINDS["logistic regression"](0)  # noqa: E731
    table = data.Table(rows, labels, np.arange(45), np.arange(45, 90), make)
    assert np.bincount(table.folds[:45]).tolist() == [9] * 5
    assert (table.folds[45:] == -1).all()
    scores, y = table.held_out(table.parts)
    assert torch.equal(y, torch.from_numpy(labels[:45]))
    rest = (table.folds >= 0) & (table.folds != table.folds[3])
    fit = make().fit(rows[rest], labels[rest])
    expected = data.log_probs(fit.predict_proba(rows[3:4]))[0]
    torch.testing.assert_close(scores[3], expected)


def test_calibration_is_that_of_scikit_learn():
    """One temperature for all folds lies within the range of those that each fold would have."""
    rows, labels = make_blobs(300, 2, centers=2, cluster_std=5.0, random_state=0)
    make = lambda: data.KINDS["logistic regression"](0)  # noqa: E731
    table = data.Table(rows, labels, np.arange(100), np.arange(100, 300), make)
    ours = run.scaled(table.parts, data.log_probs(table.whole), table)
    theirs = torch.from_numpy(run.calibrated("temperature", table))
    assert (ours - theirs).abs().max() < 0.15
    assert (ours.argmax(1) == theirs.argmax(1)).double().mean() > 0.95
