# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The benchmark of tables with few labels, in small."""

import numpy as np
import pytest
import torch
from sklearn.datasets import make_blobs

from benchmarks.tabular import data, run, tables


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
        ["tables", "--seeds", "0", *more, "--results", str(tmp_path / "rows.jsonl")]
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
