# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The tables of docs/results/crowds.md."""

import pandas as pd
from pandas import DataFrame

from benchmarks.crowds.run import BEST, COPYING, FIELD, METHODS, OURS
from benchmarks.shared import tables as shared
from benchmarks.shared.records import Files
from benchmarks.shared.tables import average, centre, count, frame, ordered, spread

NAMES = {"digits": "digits", "cora": "Cora", "pubmed": "PubMed", "citeseer": "CiteSeer"}
NAMES |= {"music": "music", "labelme": "LabelMe"}
ANSWERS = {"all": "all annotators", "control": "control: independent errors"}
ANSWERS |= {"one": "one annotator", "one, a tenth": "one annotator, a tenth of the nodes"}
NETWORKS = [name for name in METHODS if name.startswith("GCN")]
PARTS = {"answered": "answered", "test": "unanswered test images"}


def methods(files: Files) -> DataFrame:
    """A row for each method and seed, on answered and on unanswered nodes."""
    stored, order = frame(files["crowds"], task="answers"), [*METHODS, COPYING, OURS, FIELD, BEST]
    rows = []
    for part, name in PARTS.items():
        prefix = "" if part == "test" else f"{part}."  # as `frame` has it
        columns = {f"{prefix}{score}": score for score in ("accuracy", "nll", "brier", "ece")}
        if f"{prefix}nll" in stored:
            found = stored[["set", "kind", "method", "seed", "seconds", *columns]]
            rows.append(found.rename(columns=columns).dropna(subset="nll").assign(nodes=name))
    both = pd.concat(rows)
    both["set"], both["answers"] = ordered(both["set"], NAMES), ordered(both["kind"], ANSWERS)
    both["method"] = ordered(both["method"], order)
    return both.assign(nodes=ordered(both["nodes"], list(PARTS.values())))


CELLS = {"seeds": count, "accuracy": spread("accuracy", 3), "NLL": centre("nll", 3)}
CELLS |= {"Brier": average("brier", ".3f"), "ECE": average("ece", ".3f")}


def crowds(files: Files) -> str:
    """How good is every combination of real answers?"""
    cells = CELLS | {"s": average("seconds", ".1f")}
    return shared.table(methods(files), ["set", "nodes", "answers", "method"], cells)


def crowds_summary(files: Files) -> str:
    """The default beside the best rival without features, for each set."""
    rows, lines = methods(files), []
    rivals = rows[~rows["method"].isin([OURS, FIELD, BEST, COPYING, *NETWORKS])]
    names = ["set", "nodes", "answers"]
    for key, part in shared.groups(rows[rows["method"] == OURS], names):
        line = dict(zip(names, map(str, key), strict=True))
        beside = rivals.merge(part[[*names, "seed"]], on=[*names, "seed"])
        mean = beside.groupby("method", observed=True)[["accuracy", "nll", "ece"]].mean()
        best = {"accuracy": mean["accuracy"].idxmax(), "nll": mean["nll"].idxmin()}
        for score, name in {"accuracy": "accuracy", "nll": "NLL"}.items():
            line |= {name: f"{part[score].mean():.3f}"}
            line |= {f"best rival, {name}": f"{mean[score][best[score]]:.3f} ({best[score]})"}
        line["ECE"] = f"{part['ece'].mean():.3f}"
        line["its ECE"] = f"{mean['ece'][best['accuracy']]:.3f}"
        hindsight = rows[rows["method"] == BEST].merge(part[[*names, "seed"]], on=[*names, "seed"])
        line["NLL above the best powers"] = f"{part['nll'].mean() - hindsight['nll'].mean():.3f}"
        lines.append(line)
    return shared.markdown(lines, left=3)


def annotators_coverage(files: Files) -> str:
    """How often does a 90 % interval contain an annotator's accuracy, and is dependence found?"""
    lines = []
    for (strength,), rows in shared.groups(frame(files["crowds"], task="coverage"), ["strength"]):
        each = rows.explode(["truth", "mean", "low", "high"])
        inside = each["truth"].between(each["low"], each["high"])
        line = {"repeat a common guess": f"{100 * strength:.0f} %", "simulations": f"{len(rows)}"}
        line["accuracies inside"] = f"{100 * inside.mean():.1f} %"
        line["mean width"] = f"{(each['high'] - each['low']).mean():.3f}"
        line["mean error"] = f"{(each['mean'] - each['truth']).mean():+.3f}"
        line["mean excess agreement"] = f"{rows['excess'].mean():.3f}"
        lines.append(line | {"dependence found": f"{100 * rows['found'].mean():.1f} %"})
    return shared.markdown(lines)


TABLES = crowds_summary, crowds, annotators_coverage
