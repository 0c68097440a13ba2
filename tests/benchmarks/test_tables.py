# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""No row of the results is hidden: take it away, and a table changes; add one, and it appears."""

import json
import re
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import annotators_tables  # noqa: E402
import batches_tables  # noqa: E402
import calibration_tables  # noqa: E402
import calibration_uses  # noqa: E402
import claims  # noqa: E402
import common  # noqa: E402
import deviations_tables  # noqa: E402
import fields_compared_tables  # noqa: E402
import fields_tables  # noqa: E402
import gradient_variance  # noqa: E402
import hidden_tables  # noqa: E402
import images_joint_tables  # noqa: E402
import images_tables  # noqa: E402
import large_tables  # noqa: E402
import links_rivals_tables  # noqa: E402
import links_tables  # noqa: E402
import nodes_rivals_tables  # noqa: E402
import nodes_why  # noqa: E402
import repelling_tables  # noqa: E402
import samples_tables  # noqa: E402
import speed_tables  # noqa: E402
import writing  # noqa: E402

sys.path.remove(str(BENCHMARKS))

FILES = {"links": links_tables, "fields": fields_tables, "images": images_tables,
         "speed": speed_tables, "gradient_variance": gradient_variance,
         "hidden": hidden_tables, "repelling": repelling_tables,
         "batches": batches_tables, "annotators": annotators_tables, "samples": samples_tables,
         "large": large_tables, "calibration": calibration_tables}  # fmt: skip
#: Further tables of the same rows.
MORE = {"calibration": [calibration_uses], "images": [images_joint_tables],
        "links": [links_rivals_tables]}  # fmt: skip


@pytest.fixture(autouse=True)
def all_cells(monkeypatch):
    """Tables have all cells, also of rows that report.py would leave out."""
    for module in (writing, gradient_variance):
        monkeypatch.setattr(
            module, "table", lambda head, rows, left=1: "\n".join(map(" | ".join, rows))
        )


def shown(name, rows):
    if name == "deviations":
        stored = {file: read(file) for file in ("nodes", "links", "images")}
        return deviations_tables.tables(stored | {name: rows})["from paper"]
    if name == "fields_compared":
        stored = {"fields": read("fields")} | {name: rows}
        return "\n".join(fields_compared_tables.tables(stored).values())
    if name == "nodes_rivals":
        stored = {file: read(file) for file in ("nodes", "calibration")}
        return "\n".join(nodes_rivals_tables.tables(stored | {name: rows}).values())
    modules = [FILES[name], *MORE.get(name, [])]
    return "\n".join(text for module in modules for text in module.tables(rows).values())


def read(name):
    return common.read(common.RESULTS / f"{name}.jsonl")


def ends(rows):
    """The first and the last of the rows that differ by image, split or trial alone."""
    found = {}
    for number, row in enumerate(rows):
        names = {k: v for k, v in row.items() if isinstance(v, str) or k in ("split", "coupling")}
        if row.get("task") in ("train", "test", "tiles", "spectra"):
            names |= {"settings": row["settings"], "seed": row["seed"], "noise": row.get("noise")}
        key = {k: v for k, v in names.items() if k != "image"}
        found.setdefault(json.dumps(key, sort_keys=True), []).append(number)
    return sorted({number for part in found.values() for number in (part[0], part[-1])})


@pytest.mark.parametrize("name", [*FILES, "deviations", "fields_compared", "nodes_rivals"])
def test_every_row_is_shown(name, monkeypatch):
    monkeypatch.setattr(writing.Paired, "p", 1.0)  # for speed
    every = read(name)
    assert every
    # These tables are slow, and say of a cell what its rows say.
    slow = {"annotators": ("task", "graph", "section", "cell", "level")}
    slow |= {"calibration": ("task", "dataset", "backbone")}
    fields = slow.get(name, ())
    for rows in common.grouped(every, *fields).values():
        whole = shown(name, rows)
        for number in ends(rows):
            row = rows[number]
            if name != "deviations" or row.get("change") != "":
                left = rows[:number] + rows[number + 1 :]
                assert shown(name, left) != whole, row


@pytest.mark.parametrize(
    ("name", "task", "field"),
    [
        ("images", "test", "method"),
        ("images", "test", "dataset"),
        ("images", "train", "method"),
        ("links", "compare", "dataset"),
        ("links", "compare", "guide"),
        ("links", "search", "guide"),
        ("links", "search", "dataset"),
        ("links", "memberships", "dataset"),
        ("links", "cost", "dataset"),
        ("links", "reproduce", "dataset"),
        ("links", "anchor", "dataset"),
        ("links", "attention", "reading"),
        ("speed", "draw", "code"),
        ("speed", "step", "estimator"),
        ("speed", "scale", "name"),
        ("gradient_variance", None, "estimator"),
        ("deviations", "links", "change"),
        ("deviations", "fields", "change"),
    ],
)
def test_rows_under_new_names_appear(name, task, field):
    """Nothing is looked up in a list of what is known."""
    rows = read(name)
    row = next(r for r in rows if r.get("task") == task and r.get(field) != "")
    assert "another one" in shown(name, [*rows, row | {field: "another one"}])


def hidden_rows():
    """Three seeds of a field, on which the NMM errs by .02 less and has 41 nats less."""
    row = {"task": "compare", "size": 64, "field": "smooth", "noise": 0.5, "error": 0.3}
    row |= {"accuracy": 0.9, "NLL": 0.3, "bound": -4200.0, "settings": {"coupling": 1.0}}
    return [
        row | {"method": method, "seed": seed, "Brier": 0.1 - gain + 0.001 * seed,
               "log evidence": -4096.0 - 2048 * gain}
        for method, gain in (("Potts, mean field", 0.0), ("NMM, bound", 0.02), ("other", 0.01))
        for seed in range(3)
    ]  # fmt: skip


def test_hidden_fields():
    """Methods that nobody knew are shown, what is compared is paired, and the sentence follows."""
    lines = list(hidden_tables.hidden(hidden_rows()))
    assert [line["model"] for line in lines][::2] == ["Potts, mean field", "other"]
    assert lines[1]["minus Potts, mean field"].startswith("-0.020 ± 0.000")
    assert lines[0]["log p(w), nats a pixel"].startswith("-1.000 ± 0.000")
    claim = " ".join(hidden_tables.hidden_claim(hidden_rows()).split())
    assert "below that of the Potts field's mean field in 1 of 1 cells" in claim
    assert "log p(w) is lower in 1 of 1; differences -0.010 to -0.010 nats" in claim
    worse = [r | {"Brier": 0.2} if "NMM" in r["method"] else r for r in hidden_rows()]
    assert "mean field in 0 of 1 cells" in " ".join(hidden_tables.hidden_claim(worse).split())
    others = [row for row in hidden_rows() if "NMM" not in row["method"]]
    assert hidden_tables.hidden_claim(others) == hidden_tables.hidden_claim([])


def annotator_rows():
    """Sections whose clusterings choose six labels, at which the NMM is ahead by .1 and .3."""
    row = {"task": "cortex", "accuracy": 0.7, "log score": -0.5, "ECE": 0.1, "confidence": 0.8,
           "entropy": 0.4, "left out": -9.0, "seconds": 2.0}  # fmt: skip
    cortex = [
        row | {"section": section, "labels": labels, "method": method, "seed": seed,
               "ARI": 0.3 + gain + (labels == 5) + 0.01 * seed}
        for section, lead in (("a", 0.1), ("b", 0.3))
        for labels in (5, 6)
        for method, gain in (("Dawid-Skene", 0.0), ("NMM, types", lead), ("other", 0.2))
        for seed in range(3)
    ]  # fmt: skip
    halves = [
        {"task": "halves", "section": section, "labels": labels, "halving": halving,
         "agreement": 0.1 * (labels == 6) + 0.01 * number}
        for section in "ab" for labels in (5, 6)
        for number, halving in enumerate((0, 1, "PCA and UMAP"))
    ]  # fmt: skip
    return cortex + halves


def simulated_rows():
    """Three seeds, in which the fit that predicts better what is left out is the better one."""
    row = {"task": "simulated", "graph": "cora", "level": 0.7, "cell": "copies", "ECE": 0.1,
           "Brier": 0.2, "seconds": 1.0, "score": -5.0, "kappa": 0.2}  # fmt: skip
    methods = {"majority": 0.5, "Dawid-Skene": 0.6, "label spreading": 0.55,
               "Potts, mean field": 0.7, "Potts, Gibbs": 0.7, "Potts, Gibbs, copies": 0.75,
               "NMM, every node": 0.65, "NMM, copies, every node": 0.8}  # fmt: skip
    return [
        row | {"method": method, "seed": seed, "accuracy": right * (1 + 0.02 * seed),
               "log score": right * (1 + 0.1 * seed) - 1, "left out": right - 6.0}
        for method, right in methods.items() for seed in range(3)
    ]  # fmt: skip


def test_noisy_labels_of_cortex():
    """The number of labels is that of the highest agreement, not of the highest ARI."""
    rows = annotator_rows()
    tables = annotators_tables.tables(rows)
    assert annotators_tables.chosen_labels(rows) == {"a": 6, "b": 6}
    claim = " ".join(tables["annotators claim"].split())
    assert (
        "NMM with types 0.510 over 2 sections, Dawid-Skene 0.310; above it in 2. other 0.510"
        in claim
    )
    first = [line for line in annotators_tables.cortex(rows) if line["labels"] == "chosen"]
    assert [line["method"] for line in first] == ["Dawid-Skene", "NMM, types", "other"]
    assert first[1]["ARI"] == "0.510 ± 0.010"
    assert first[1]["sections x starts"] == "2 x 3"
    assert "another one" in annotators_tables.tables([*rows, rows[0] | {"method": "another one"}])[
        "cortex"
    ]  # fmt: skip


def test_noisy_labels_of_simulated_annotators():
    rows = simulated_rows()
    line = next(annotators_tables.simulated_differences(rows))
    assert line["cell"] == "Cora, copies, 0.7"
    assert line["Potts, mean field: accuracy"].startswith("+10.2 ± 0.2")
    assert line["Potts, Gibbs sampling: accuracy"].startswith("+5.1 ± 0.1")  # who copies, too
    text = " ".join(annotators_tables.annotators_claim(rows).split())
    assert "annotators alone*, 1 cells" in text
    assert "Potts, Gibbs sampling in 1 and 1. Its ECE is at most 0.100" in text
    # Beside a GCN all get worse; ours may leave it out.
    beside = [r | {"cell": "copies and a GCN", "accuracy": r["accuracy"] - 0.1,
                   "log score": r["log score"] - 0.9 * r["method"].startswith("NMM")}
              for r in rows]  # fmt: skip
    text = " ".join(annotators_tables.annotators_claim(rows + beside).split())
    assert "one more annotator*, 1 cells" in text
    assert "Dawid-Skene in 1 and 0; " in text
    assert "leaves that GCN out, its rivals do not*, 1 cells" in text
    # What is chosen follows the answers, be it worse.
    worse = [r | {"left out": -9.0} if r["method"].startswith("NMM, copies") else r for r in rows]
    line = next(annotators_tables.simulated_differences(worse))
    assert line["Potts, mean field: accuracy"].startswith("-5.1 ± 0.1")
    assert "mean field in 0 and 0" in " ".join(annotators_tables.annotators_claim(worse).split())
    # Every fit has a line.
    fits = [line["fit"] for line in annotators_tables.simulated_fits(rows)]
    assert len(fits) == len({row["method"] for row in rows}) - 1


def test_coverage_of_intervals():
    row = {"task": "coverage", "mean": [0.5, 0.7], "truth": [0.4, 0.7], "low": [0.45, 0.6],
           "high": [0.55, 0.8], "covered": [False, True]}  # fmt: skip
    text = " ".join(annotators_tables.annotators_coverage([row | {"seed": 0}] * 2).split())
    assert "cover 50.0 % of the true ones" in text
    assert "mean width is 0.150, the mean error +0.0500" in text


def test_repelling_labels():
    """What relabelling changes is paired by split; marks and the sentence follow the sign."""
    row = {"task": "graphs", "dataset": "texas", "backbone": "mlp", "own product": -2.0}
    rows = [
        row | {"method": method, "split": split, "joint": joint + 0.02 * split * joint,
               "test": {"accuracy": 0.8, "nll": -joint}}
        for method, joint in (("NMM", -0.9), ("NMM, relabelled", -0.6), ("other", -0.1))
        for split in range(4)
    ]  # fmt: skip
    lines = {line["model"]: line for line in repelling_tables.repelling(rows)}
    assert list(lines) == ["NMM", "NMM, relabelling", "other"]
    changes = lines["NMM, relabelling"]
    assert changes["log p(test \\| train)", "minus plain"] == "+0.309 ± 0.008 †"
    assert changes["NLL", "minus plain"].startswith("-0.300 ± 0.000")
    claim = " ".join(repelling_tables.repelling_claim(rows).split())
    assert "NMM with relabelling edges has a higher log p(test | train)" in claim
    assert "in 1 of 1 cells (graph and backbone), significantly in 1," in claim
    generated = [{"task": "generated", "seed": s, "truth": -0.5 - s, "plain": -0.7 - s,
                  "relabelled": -0.6 - s, "independent": -0.8 - s} for s in range(3)]  # fmt: skip
    found = list(repelling_tables.repelling_generated(generated))
    assert found[1]["minus the truth's"] == "-0.100 ± 0.000"


def batch_rows():
    """Three seeds, of which random batches lose .01 nats and 1 point, and clusters gain."""
    row = {"task": "training", "dataset": "cora", "epochs": 10, "steps": 70}
    return [
        row | {"way": way, "batch_size": size, "seed": seed, "joint": -0.7 + gap,
               "test": {"accuracy": 0.8 + gap + seed * gap / 10}}
        for way, size, gap in (("whole graph", None, 0.0), ("random", 20, -0.01),
                               ("clusters", 20, 0.01))
        for seed in range(3)
    ]  # fmt: skip


def test_batches_are_compared_with_the_whole_graph():
    lines = list(batches_tables.batch_training(batch_rows()))
    names = [line["batches, seeds in each"] for line in lines]
    assert names == ["whole graph", "random, 20", "cluster-wise, 20"]
    assert lines[0]["accuracy", "minus whole graph's"] == ""
    assert lines[1]["accuracy", "minus whole graph's"] == "-1.1 ± 0.1 ‡"
    claim = " ".join(batches_tables.batch_claim(batch_rows()).split())
    assert (
        "Cora, random, 20, 3 runs: -1.1 ± 0.1 points and -0.010 ± 0.000 nats, the mean not within;"
        in claim
    )
    assert (
        "cluster-wise, 20, 3 runs: +1.1 ± 0.1 points and +0.010 ± 0.000 nats, the mean within."
        in claim
    )
    assert "In 0 of 2 a standard error is larger than what is aimed at" in claim
    seconds = {1: 2.0, 2: 1.6}
    rows = [{"task": "throughput", "dataset": "cora", "processes": n, "repeat": 0, "seconds": s}
            for n, s in seconds.items()]  # fmt: skip
    assert list(batches_tables.batch_throughput(rows))[1]["times as fast as one"] == "1.25"


def test_steps_with_evidence():
    row = {"task": "evidence", "nodes": 19_717, "edges": 108_269, "classes": 7, "particles": 4,
           "estimator": "no_score", "seconds": {"observed": 0.02, "evidence": 0.05}}  # fmt: skip
    text = speed_tables.tables([row])["evidence steps"]
    assert "19,717 nodes, 108,269 edges, 7 labels, T = 4 | `no_score` | 20.0 | 50.0 | 2.50" in text


def test_sentences_follow_from_the_rows():
    """A comparison that would turn out otherwise is told otherwise."""
    rows = {name: read(name) for name in ("nodes", "links", "images", "fields", "speed")}
    whole = claims.what_reproduces(rows)
    field = next(row for row in rows["fields"] if row["task"] == "strips")
    worse = field | {"NMM bound": 2 * field["mean field"]}
    changed = [worse if row is field else row for row in rows["fields"]]
    count = re.search(r"below it on\s+(\d+) of (\d+)", whole)
    assert count[1] == count[2]
    again = claims.what_reproduces(rows | {"fields": changed})
    assert re.search(r"below it on\s+(\d+) of", again)[1] == str(int(count[1]) - 1)
    assert "to 2.00 times" in " ".join(again.split())


def test_new_seeds_and_settings_appear():
    rows = read("images")
    row = next(r for r in rows if r["task"] == "test")
    whole = shown("images", rows)
    assert shown("images", [*rows, row | {"seed": 77}]) != whole
    other = row | {"settings": row["settings"] | {"num_steps": 123}}
    assert "123 steps" in shown("images", [*rows, other])


def test_changes_of_nodes_are_read_as_they_come():
    scores = [{"accuracy": 0.80, "nll": 0.6}, {"accuracy": 0.82, "nll": 0.5}]
    base = {"task": "deviations", "dataset": "cora", "backbone": "gcn", "method": "NMM"}
    rows = [
        base | {"change": change, "seed": seed, "test": {k: v + gap for k, v in score.items()},
                "sequential": score["accuracy"] - 0.01}
        for change, gap in (("none", 0.0), ("something new", 0.02))
        for seed, score in enumerate(scores)
    ]  # fmt: skip
    lines = [list(part.values()) for part in deviations_tables.nodes(rows)]
    assert [part[1] for part in lines] == ["prediction", "something new"]
    assert lines[0][-1] == "accuracy -1.0 ± 0.0 (median -1.0)"
    assert lines[1][4:] == [
        "2 seeds",
        "accuracy +2.0 ± 0.0 (median +2.0); NLL +0.020 ± 0.000 (median +0.020)",
    ]


def difference(pairs, digits):
    theirs, ours = (dict(enumerate(values)) for values in zip(*pairs, strict=True))
    return writing.Paired.of(ours, theirs).text(digits)


def test_differences_are_paired_and_have_a_spread():
    pairs = [(1.0, 1.5), (2.0, 2.4), (5.0, 5.9)]
    assert difference(pairs, 2) == "+0.60 ± 0.26 (median +0.50, p = .059)"
    assert difference([(1.0, 3.0)] * 5, 1) == "+2.0 ± 0.0 (median +2.0)"
    assert difference(pairs[:1], 1) == "+0.5"
    assert writing.Paired.of({}, {}).text(1) == ""
    assert writing.Paired.of({1: 3.0, 2: 4.0}, {2: 1.0, 3: 0.0}).gaps == [3.0]
    assert difference([(0.0, 1 + 1e-3 * i) for i in range(9)], 2).endswith("p < 1e-6)")
    assert writing.centre([1.0, 2.0, 6.0], 1) == "3.0 (2.0)"


def test_why_nodes_follows_from_the_rows():
    """Scores alone gain .4 nats on an MLP and .1 on others, and .05 more jointly."""
    runs = [{"split": split, "fold": 0, "dataset": "cora"} for split in range(3)]
    gains = {"temperature": 0.0, "StackedNMM, scores alone": 1.0, "the pool alone": 2.0,
             "StackedNMM": 3.0}  # fmt: skip
    calibration = [
        run | {"task": "splits", "backbone": kind, "method": method, "joint": unit * gain - 0.95,
               "test": {"nll": 1 - unit * gain, "accuracy": 0.8}}
        for run in runs for kind, unit in (("mlp", 0.4), ("gcn", 0.1), ("gat", 0.1))
        for method, gain in gains.items()
    ]  # fmt: skip
    nodes = [
        {"task": "accuracy", "dataset": "cora", "backbone": "gcn", "method": method, "seed": seed,
         "test": {"accuracy": 0.8 + gain + seed / 1e4}}
        for method, gain in (("backbone", 0.0), ("backbone + consistency", 0.02))
        for seed in range(3)
    ]  # fmt: skip
    nodes.append({"task": "pairs", "method": "NMM", "conditional": -1.0, "own product": -1.0021})
    text = nodes_why.tables({"calibration": calibration, "nodes": nodes})["why nodes"]
    text = " ".join(text.split())
    assert "0.0021 nats a pair" in text
    assert "0.050 nats a test node in StackedNMM (0.050 to 0.050 by run)" in text
    assert "0.400 on an MLP, which sees no neighbour, 0.100 on a GCN and 0.100 on a GAT" in text
    gain = "which is 0.200 nats below temperature scaling where StackedNMM is 0.300"
    assert f"{gain} (GCN and GAT; 0.800 and 1.200 on MLPs)" in text
    assert "(+2.0 to +2.0 points on the public split, significant in 0 of 1 cells)" in text
