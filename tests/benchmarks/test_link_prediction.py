# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The benchmark of link prediction: its tasks on a small graph, and its tables."""

import numpy as np
import pytest
import torch
from scipy.io import savemat
from torch_geometric.data import InMemoryDataset
from torch_geometric.datasets import KarateClub
from torch_geometric.utils import to_scipy_sparse_matrix

from benchmarks.links import protocol, run, tables
from benchmarks.shared.records import RESULTS, read
from benchmarks.shared.tables import Paired
from pyro_nmm.datasets import link_split

TASKS = ["reproduce", "search", "compare", "katz", "memberships", "cost", "attention"]
TASKS += ["deviations"]


@pytest.fixture(autouse=True)
def as_a_user():
    torch.set_default_dtype(torch.float)


def data_root(path):
    """The karate club as NIPS12, and with its features as Cora and the authors' splits of it."""
    data = KarateClub()[0]
    for name in ("nips12", "Cora/raw", "Cora/processed", "linkpred_splits/cora"):
        (path / name).mkdir(parents=True)
    savemat(path / "nips12/nips12.mat", {"B": to_scipy_sparse_matrix(data.edge_index).tocsc()})
    for name in ("x", "tx", "allx", "y", "ty", "ally", "graph", "test.index"):
        (path / f"Cora/raw/ind.cora.{name}").touch()
    InMemoryDataset.save([data], path / "Cora/processed/data.pt")
    for seed in range(2):
        names = ("train_edges", "val_edges", "val_edges_false", "test_edges", "test_edges_false")
        parts = (part.T.numpy() for part in link_split(data.edge_index, 34, seed))
        file = path / f"linkpred_splits/cora/split_{seed}.npz"
        np.savez(file, **dict(zip(names, parts, strict=True)))
    return path


@pytest.mark.slow
def test_benchmark_of_link_prediction(tmp_path):
    files = {name: tmp_path / f"{name}.jsonl" for name in ("links", "deviations")}
    argv = ["--num-searched", "1", "--num-splits", "1", "--num-steps", "2"]
    argv += ["--data-root", str(data_root(tmp_path / "data")), "--results", str(files["links"])]
    rows = run.main([*TASKS, *argv, "--datasets", "nips12"]).rows
    rows += run.main(["anchor", *argv, "--datasets", "cora"]).rows[len(rows) :]
    sizes = {"reproduce": 6, "search": 5 + 3 + 5 + 5, "compare": 4, "katz": 1}
    sizes |= {"memberships": 1, "cost": 1, "anchor": 1, "attention": 2}
    found = {name: read(path) for name, path in files.items()}
    assert found["links"] == rows
    assert {task: sum(row["task"] == task for row in rows) for task in sizes} == sizes
    assert len(found["deviations"]) == 1
    run.main([*TASKS, *argv, "--datasets", "nips12"])
    assert found == {name: read(path) for name, path in files.items()}

    for row in rows + found["deviations"]:
        seen = {"search": {"val"}, "attention": {"val"}, "reproduce": {"test"}, "katz": {"test"}}
        if row["task"] not in ("memberships", "cost"):
            assert {"val", "test"} & row.keys() == seen.get(row["task"], {"val", "test"})
        for part in {"val", "test"} & row.keys():
            assert all(0 < score <= 100 for score in row[part].values())
        # Steps are kept of what the figure shows, and of the reproduction.
        guided = row["task"] == "compare" and row["guide"] in ("original", "nmm")
        assert ("curve" in row) == (guided or row["task"] == "reproduce")
    wide = [row for row in rows if row["task"] == "attention"] + found["deviations"]
    for row in wide:
        settings = row["settings"]
        assert settings["width"] == settings["num_communities"]
        assert settings["own_attention"] == (row.get("reading") != "first layer shared")
    for make in tables.TABLES:
        assert make(found).count("\n") > 1, make
    tables.link_bound(found).savefig(tmp_path / "link_bound.png")
    assert (tmp_path / "link_bound.png").stat().st_size > 10_000


def test_settings_follow_validation_alone():
    row = {"task": "search", "dataset": "cora", "guide": "sage"}
    rows = [
        row | {"trial": trial, "seed": seed, "settings": {"layers": trial}, "val": {"AP": value}}
        for trial, values in enumerate([(80.0, 90.0), (84.0, 88.0)])
        for seed, value in enumerate(values)
    ]
    rows += [rows[0] | {"guide": "vgae", "trial": 9, "val": {"AP": 99.0}}]
    assert protocol.chosen(rows, "pubmed", "sage") == {"layers": 1}
    with pytest.raises(ValueError, match="search of nips12 sage"):
        protocol.chosen(rows, "nips12", "sage")
    # The NMM's are chosen by its bound.
    nmm = [r | {"guide": "nmm", "loss": 0.5 + r["trial"]} for r in rows]
    assert protocol.chosen(nmm, "cora", "nmm") == {"layers": 0}


def lines(make, links, deviations=()):
    """A table's lines, each as a dictionary; of headings that are equal the last one."""
    head, _, *body = make({"links": list(links), "deviations": list(deviations)}).splitlines()
    names = head.strip("| ").split(" | ")
    return [dict(zip(names, line[2:-2].split(" | "), strict=True)) for line in body]


def measured(guide, gain, **more):
    row = {"task": "compare", "dataset": "cora", "guide": guide}
    tests = [{"AP": 90 + gain + s / (2 + gain), "AUC": 80 + gain} for s in range(4)]
    return [row | more | {"seed": s, "test": test} for s, test in enumerate(tests)]


def test_rivals_are_paired():
    """On the same splits, and apart from splits that settings were searched on."""
    rows = measured("nmm", 1.0) + measured("sage", 3.0)[1:]
    first, second = lines(tables.link_rivals, rows)
    assert (first["method"], second["method"]) == ("GraphSAGE", "NMM-DGLFRM")
    assert first["AUC, NMM-DGLFRM minus it"] == "-2.00 ± 0.00 (median -2.00)"
    assert second["AUC, NMM-DGLFRM minus it"] == ""
    rows += [{"task": "search", "dataset": "cora", "guide": "nmm", "seed": 0}]
    found = [
        (line["splits"], line["method"], line["number"]) for line in lines(tables.link_rivals, rows)
    ]
    assert found == [("new", "GraphSAGE", "3"), ("new", "NMM-DGLFRM", "3"),
                     ("of the search", "NMM-DGLFRM", "1")]  # fmt: skip


def test_graphs_are_pooled():
    """All splits together, and the graphs' means beside those of the paper."""
    rows = [
        row | {"dataset": dataset}
        for dataset, gain in (("cora", 1.0), ("yeast", 2.0))
        for row in measured("original", 0.0) + measured("nmm", gain)
    ]
    _, auc = lines(tables.pooled_links, rows)
    assert (auc["splits"], auc["splits that gain"]) == ("8", "8")
    assert auc["all splits"].startswith("+1.50 ± 0.53")
    assert auc["means of the graphs"].startswith("+1.50 ± 0.71")
    assert auc["means of the graphs in the paper"].startswith("+0.79 ± 0.43")  # .48 and 1.09


def test_vgae_is_held_against_its_authors():
    row = {"task": "anchor", "dataset": "cora"}
    scores = [{"AUC": 91.2 + s, "AP": 90.1 + s} for s in (-1, 0, 1)]
    rows = [row | {"seed": s, "test": test} for s, test in enumerate(scores)]
    authors, example = lines(tables.published_links, rows)
    assert (authors["source"], authors["AUC, published"]) == ("authors", "91.4")
    assert authors["above ours, sd"] == "+0.2"  # the AUC's, which is the last
    assert (example["source"], example["AP, published"]) == ("DGL's example", "92.5")
    text = tables.published_links({"links": rows, "deviations": []})
    assert "| 92.5 | +2.4 |" in text


def test_readings_of_the_appendix_are_paired():
    base = {"dataset": "cora", "settings": {"num_communities": 9}}
    row = base | {"loss": 0.9, "val": {"AP": 90.0, "AUC": 80.0}}
    ours = [row | {"task": "search", "guide": "nmm", "seed": s} for s in range(3)]
    wide = row["settings"] | {"own_attention": True, "width": 9}
    changed = {"task": "attention", "reading": "one", "loss": 0.8, "settings": wide}
    first, second = lines(
        tables.link_attention, ours + [row | changed | {"seed": s} for s in range(2)]
    )
    assert first["attention"] == "first layer shared, 16 outputs"
    assert (first["splits"], first["bound, change"]) == ("2", "")
    assert second["attention"] == "a network of its own, as wide as the communities"
    assert second["bound, change"] == "+0.1000 ± 0.0000 (median +0.1000)"


def test_every_stored_row_is_shown(monkeypatch):
    """Without the rows of a task, a guide or a reading, a table differs."""
    monkeypatch.setattr(Paired, "p", 1.0)  # for speed
    files = {name: read(RESULTS / f"{name}.jsonl") for name in ("links", "deviations")}

    def kept(row):
        """All of Cora, and what there is of the NMM on NIPS12, of a few seeds."""
        graph, nmm = row.get("dataset"), row.get("guide", "nmm") == "nmm"
        return row.get("seed", 0) < 4 and (graph == "cora" or (graph == "nips12" and nmm))

    files = {name: [row for row in rows if kept(row)] for name, rows in files.items()}
    whole = [make(files) for make in tables.TABLES]
    keys = ("task", "dataset", "guide", "reading", "split", "change")
    for name, rows in files.items():
        for group in {tuple(row.get(key) for key in keys) for row in rows}:
            left = [row for row in rows if tuple(row.get(key) for key in keys) != group]
            assert [make(files | {name: left}) for make in tables.TABLES] != whole, group


def test_tables_without_rows():
    first, *others = (make({"links": [], "deviations": []}) for make in tables.TABLES)
    assert "| AP | 0 |" in first
    assert set(others) == {"Nothing has been measured yet."}
