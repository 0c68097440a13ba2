# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Node classification: a small run, scores of pairs, and tables that show all stored rows."""

import math
import statistics
from functools import cache

import networkx as nx
import pytest
import torch
from graphs import to_hood
from torch.nn import functional as F
from torch_geometric.data import Data

from benchmarks.nodes import fits, run, tables
from benchmarks.shared.records import RESULTS, read
from pyro_nmm.datasets.nodes import random_split

FILES = "nodes", "nodes_rivals", "calibration"


@pytest.fixture(autouse=True)
def as_a_user():
    torch.set_default_dtype(torch.float)


@pytest.fixture
def small(monkeypatch):
    """Ninety nodes of three labels in place of the graphs."""
    graph = nx.random_regular_graph(12, 90, seed=0)
    hood, y = to_hood(graph), torch.arange(90) % 3
    x = F.one_hot(y, 3) + torch.randn(90, 3)
    edges = torch.stack([hood.source, hood.target])[:, hood.source != hood.target]
    data = random_split(Data(x=x, edge_index=edges, y=y), 0.3, 0.2, 0.5, seed=0)
    monkeypatch.setattr(run, "load", lambda name, root: (data, hood))
    monkeypatch.setattr(run, "RESOLUTIONS", [1.0])
    monkeypatch.setattr(fits, "NUM_EPOCHS", 2)
    short = {name: change | {"num_epochs": 2} for name, change in run.CHANGES.items()}
    monkeypatch.setattr(run, "CHANGES", short)


SMALL = ["--datasets", "cora", "--backbones", "gcn", "--num-trials", "1"]
SMALL += ["--num-seeds", "1", "--num-splits", "1", "--ratios", "0.2"]
TASKS = ["search", "accuracy", "pairs", "sizes", "deviations", "communities", "predicted"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_all_tasks_run_on_a_small_graph(small, tmp_path):
    path = tmp_path / "rows.jsonl"
    arguments = [*SMALL, "--results", str(path)]
    rows = run.main([*TASKS, *arguments]).rows
    each = 3 + 2 + 3 + 2  # a fit of an NMM has no temperature scaling
    assert len(read(path)) == len(rows) == 2 * 2 + 3 * each + 13 + 2 * 4 + 3
    assert len(run.main([*TASKS, *arguments]).rows) == len(rows)
    gained = {row["method"]: row for row in rows if row["task"] == "pairs"}
    for row in gained.values():
        base, ours = gained["backbone, temperature"], row.get("conditional", row["own product"])
        known = row["on temperature"]
        assert known["mean"] == pytest.approx(ours - base["own product"], abs=1e-5)
        assert known["low"] <= known["mean"] <= known["high"]
    assert all(0 <= row["sequential"] <= 1 for row in rows if row["task"] == "deviations")
    assert all(math.isfinite(row["joint"]) for row in rows if "joint" in row)

    searched = ["--settings-of", "NMM", "--searched", "NMM"]
    again = run.main(["search", "accuracy", *searched, *arguments]).rows
    assert len(again) == len(rows) + 2 + each
    assert all(row["settings of"] == "NMM" for row in again[-each:])

    # A method alone has the same draws as among others.
    alone = ["pairs", *SMALL, "--methods", "NMM", "--results", str(tmp_path / "alone.jsonl")]
    for row in run.main(alone).rows:
        seconds = {name: row[name] for name in row if name == "fit seconds"}
        assert gained[row["method"]] | seconds == row


def test_settings_have_the_best_validation_accuracy_then_likelihood():
    scores = {0: [(0.7, 0.9), (0.8, 0.9)], 1: [(0.7, 0.5), (0.8, 0.5)], 2: [(0.6, 0.1)] * 2}
    rows = [
        {"task": "search", "trial": trial, "settings": {"lr": trial},
         "val": {"accuracy": accuracy, "nll": nll}}
        for trial, values in scores.items() for accuracy, nll in values
    ]  # fmt: skip
    assert fits.chosen(rows) == fits.DEFAULT | {"lr": 1}
    with pytest.raises(ValueError, match="not been finished"):
        fits.chosen(rows[:3])


def gains_of(num_nodes, num_pairs, hub):
    generator = torch.Generator().manual_seed(1)
    mask = torch.rand(2 * num_nodes, generator=generator) < 0.5
    ids = mask.nonzero().flatten()
    pairs = torch.combinations(ids)
    pairs = pairs[torch.randperm(len(pairs), generator=generator)[:num_pairs]].T
    gain = torch.randn(num_pairs, generator=generator, dtype=torch.double)
    gain[(pairs == pairs[0, 0]).any(0)] += hub
    return mask, ids, pairs, gain


def test_contribution_of_two_nodes():
    mask, ids, pairs, gain = gains_of(20, 60, hub=3.0)
    found = fits.summary(gain, pairs, mask)
    together = [
        gain[(pairs == a).any(0) | (pairs == b).any(0)].sum().item() / 60
        for a, b in torch.combinations(ids)
    ]
    assert found["two nodes"] == pytest.approx(max(together))
    assert found["median"] == gain.sort().values[29].item()
    assert found["share"] == pytest.approx((gain > 0).sum().item() / 60)


def test_interval_is_a_bootstrap_over_nodes():
    """It equals a bootstrap node by node, and is wider than over pairs if a hub has the gains."""
    mask, ids, pairs, gain = gains_of(40, 300, hub=8.0)
    before = torch.get_rng_state()
    found = fits.summary(gain, pairs, mask, num_resamples=2000)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(5)
    means = []
    for _ in range(2000):
        drawn = ids[torch.randint(len(ids), (len(ids),))]
        times = torch.bincount(drawn, minlength=len(mask)).double()
        weight = times[pairs[0]] * times[pairs[1]]
        means.append((weight * gain).sum() / weight.sum())
    low, high = torch.stack(means).quantile(torch.tensor([0.025, 0.975]).double()).tolist()
    width = high - low
    assert found["low"] == pytest.approx(low, abs=0.08 * width)
    assert found["high"] == pytest.approx(high, abs=0.08 * width)
    assert width > 2 * 1.96 * gain.std().item() / 300**0.5
    constant = fits.summary(torch.full_like(gain, 0.25), pairs, mask)
    assert constant["low"] == constant["high"] == pytest.approx(0.25)


@cache
def stored():
    return {name: read(RESULTS / f"{name}.jsonl") for name in FILES}


def cells_of(text):
    """Cells of a table by line and column."""
    lines = [line.strip("| ").split(" | ") for line in text.splitlines()]
    return [dict(zip(lines[0], line, strict=False)) for line in lines[2:]]


def name_of(row):
    """The name of a row's model in tables, written down apart from the code that makes them."""
    name, _, after = row["method"].partition(", ")
    after, _, resolution = after.partition(" ")
    names = {"": name, "temperature": f"{name} + temperature"}
    names["pooled"] = f"StackedNMM with its pool on {name}"
    name = names.get(after, f"StackedNMM on {name}")
    if resolution:
        return f"{name}, {after} at {float(resolution):g}"
    given = row.get("settings of", "").replace("NMM", "the NMM's search")
    return name + (f" (settings of {given})" if given else "")


def places(row):
    """Tables, lines and columns in which a row has a number."""
    graph = {"cora": "Cora", "citeseer": "CiteSeer", "pubmed": "PubMed"}[row["dataset"]]
    line = {"backbone": row["backbone"].upper(), "model": name_of(row)}
    here, ratio = line | {"graph": graph}, row.get("ratio")
    joint = "log p(test \\| train)"
    plain = line | {"change": str(row.get("change")).replace("none", "ours")}
    del plain["model"]
    return {
        "search": [("searches", line, graph)],
        "accuracy": [("accuracy", line, f"{graph}: accuracy, %"),
                     ("accuracy", line, f"{graph}: NLL / ECE / {joint}")],
        "pairs": [("pairs", line, f"{graph} {ratio}"), ("gains", here, f"{ratio}: splits")],
        "sizes": [("sizes", here, f"{ratio}")],
        "deviations": [("deviations", plain, "seeds")],
        "communities": [("communities", here | {
            "splits": f"random, {ratio}" if ratio else "published"}, "runs")],
        "predicted": [("predicted", here, "seeds")],
    }[row["task"]]  # fmt: skip


def hidden(rows, made):
    """Kinds of rows that have no number in a table."""
    fields = ("task", "dataset", "backbone", "method", "settings of", "ratio", "change")
    kinds = {tuple(row.get(field) for field in fields): row for row in rows}
    found = []
    for key, row in kinds.items():
        for name, line, column in places(row):
            lines = [cells for cells in made[name] if line.items() <= cells.items()]
            if not any(cells.get(column) for cells in lines):
                found.append((name, *key))
    return found


def made_of(rows):
    makers = {maker.__name__: maker for maker in tables.TABLES}
    names = {name for row in rows for name, *_ in places(row)}
    return {name: cells_of(makers[name]({"nodes": rows})) for name in names}


@pytest.mark.slow
def test_every_stored_row_is_in_a_table():
    rows = stored()["nodes"]
    made = made_of(rows)
    assert hidden(rows, made) == []
    assert hidden(rows, {name: [] for name in made}) != []  # the test can fail


def test_new_methods_are_in_the_tables():
    """A method that no table was written for, and a single seed."""
    rows = [r for r in stored()["nodes"] if r["dataset"] == "cora" and r["backbone"] == "mlp"]
    more = {"backbone": "gcn", "joint": -0.5, "method": "GMNN", "seed": 77}
    rows += [r | more | {"task": task} for r in rows[:1] for task in ("accuracy", "pairs", "sizes")]
    made = made_of(rows)
    assert hidden(rows, made) == []
    assert any(line["model"] == "GMNN" for line in made["pairs"])


def row_of(method, seed, **more):
    row = {"dataset": "cora", "backbone": "gcn", "method": method, "seed": seed}
    return row | {"joint": 0.0, "test": {"accuracy": 0.5, "nll": 0.5, "ece": 0.0}} | more


def test_comparisons_are_paired():
    """
    Means of pairs are over the splits that all methods share. Public means are over all seeds, and
    a test is over the common ones. A method with fewer splits says so.
    """
    seeds = {"backbone": range(6), "backbone, temperature": range(6), "NMM": range(1, 5),
             "NMM, stacked": (9,)}  # fmt: skip
    torch.manual_seed(0)
    rows, values = [], {}
    for method, seed in ((m, s) for m, known in seeds.items() for s in known):
        # The seeds that the NMM lacks have the backbone's worst values.
        score = 0.5 + 0.01 * torch.rand(()).item() - 0.4 * (seed in (0, 5)) + 0.01 * ("N" in method)
        values[method, seed] = score
        test = {"accuracy": score, "nll": -score, "ece": 0.0}
        rows.append(row_of(method, seed, task="accuracy", test=test))
        rows.append(row_of(method, seed, task="pairs", ratio=0.2, **{"own product": score}))

    def mean(method, seeds):
        return statistics.mean(values[method, seed] for seed in seeds)

    made = {name: {line["model"]: line for line in lines} for name, lines in made_of(rows).items()}
    hits, pairs = made["accuracy"], made["pairs"]
    column = "Cora: accuracy, %"
    assert hits["backbone"][column].startswith(f"{100 * mean('backbone', range(6)):.1f} ± ")
    assert hits["NMM"][column].startswith(f"{100 * mean('NMM', range(1, 5)):.1f} ± ")
    gap = [100 * (values["NMM", s] - values["backbone", s]) for s in range(1, 5)]
    line = next(s for s in tables.against_backbone({"nodes": rows}).splitlines() if "| NMM |" in s)
    assert f"| {statistics.mean(gap):+.1f} ± " in line
    for name in ("backbone", "NMM"):
        cell = pairs[name]["Cora 0.2"]
        assert cell.startswith(f"{mean(name, range(1, 5)):.3f} ± ")
        assert "split" not in cell
    assert pairs["number of splits"]["Cora 0.2"] == "4"
    assert pairs["StackedNMM on NMM"]["Cora 0.2"].endswith("(1 split)")


def test_communities_are_compared_seed_by_seed():
    methods = {"stacked": -0.5, "communities 4.0": -0.3, "weighted 2.0": -0.1}
    rows = [
        row_of(f"backbone, {name}", seed, task="communities", joint=(1 + seed / 10) * joint,
               test={"nll": -(1 + seed / 10) * joint}, **{"own product": joint})
        for name, joint in methods.items() for seed in range(3)
    ]  # fmt: skip
    line = tables.communities({"nodes": rows}).splitlines()[3]
    assert "communities at 4 | 3 | 0.330 ± 0.030 | -0.2200 ± 0.0200 † |" in line
    assert "| -0.330 ± 0.030 | +0.2200 ± 0.0200 † |" in line


def test_deviations_are_paired_with_our_recipe():
    scores = [{"accuracy": 0.80, "nll": 0.6}, {"accuracy": 0.82, "nll": 0.5}]
    rows = [
        row_of("NMM", seed, task="deviations", change=change, sequential=score["accuracy"] - 0.01,
               test={name: value + gap for name, value in score.items()})
        for change, gap in (("none", 0.0), ("something new", 0.02))
        for seed, score in enumerate(scores)
    ]  # fmt: skip
    ours, new = (line.split(" | ") for line in tables.deviations({"nodes": rows}).splitlines()[2:])
    assert (ours[2], new[2]) == ("ours", "something new")
    assert ours[-1] == "-1.0 ± 0.0 (median -1.0) |"
    assert new[5] == "+2.0 ± 0.0 (median +2.0)"
    assert new[7] == "+0.020 ± 0.000 (median +0.020)"


@pytest.mark.slow
def test_figures_are_drawn(tmp_path):
    for make in tables.FIGURES.values():
        make(stored()).savefig(tmp_path / "figure.png")
        assert (tmp_path / "figure.png").stat().st_size > 10_000
