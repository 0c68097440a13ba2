# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The tables of docs/results/annotators.md."""

import pandas as pd
from pandas import DataFrame

from benchmarks.crowds.run import (
    FIELD,
    METHODS,
    NETWORKS,
    OURS,
    WITH,
)
from benchmarks.shared import tables as shared
from benchmarks.shared.records import Files
from benchmarks.shared.tables import average, centre, count, frame, ordered, spread

NAMES = {"digits": "digits", "cora": "Cora", "pubmed": "PubMed", "citeseer": "CiteSeer"}
NAMES |= {"music": "music", "labelme": "LabelMe"}
ANSWERS = {"all": "all annotators", "control": "control: independent errors"}
ANSWERS |= {"one": "one annotator", "one, a tenth": "one annotator, a tenth of the nodes"}
PARTS = {"answered": "answered", "test": "unanswered test images"}


def methods(files: Files) -> DataFrame:
    """A row for each method and seed, on answered or unanswered nodes."""
    stored, rows = frame(files["crowds"], task="answers"), []
    order = [*METHODS, OURS, FIELD, *NETWORKS, WITH]
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
    cells = CELLS | {"s": average("seconds", ".1f")}
    return shared.table(methods(files), ["set", "nodes", "answers", "method"], cells)


def crowds_summary(files: Files) -> str:
    """A line for each set, for its nodes and its answers."""
    rows = methods(files)
    names, lines = ["set", "nodes", "answers"], []
    rivals = rows[rows["method"].isin(METHODS)]
    for key, part in shared.groups(rows[rows["method"] == OURS], names):
        line = dict(zip(names, map(str, key), strict=True)) | {"seeds": f"{len(part)}"}
        both = rivals.merge(part[[*names, "seed"]], on=[*names, "seed"])
        mean = both.groupby("method", observed=True)[["accuracy", "nll", "ece"]].mean()
        best = {"accuracy": mean["accuracy"].idxmax(), "nll": mean["nll"].idxmin()}
        for score, name in {"accuracy": "accuracy", "nll": "NLL"}.items():
            line |= {name: f"{part[score].mean():.3f}"}
            line |= {f"best rival, {name}": f"{mean[score][best[score]]:.3f} ({best[score]})"}
        line["ECE"] = f"{part['ece'].mean():.3f}"
        line["its ECE"] = f"{mean['ece'][best['accuracy']]:.3f}"
        lines.append(line)
    return shared.markdown(lines, left=3)


def annotators_coverage(files: Files) -> str:
    rows = frame(files["crowds"], task="coverage")
    rows["repeat a common guess"] = rows["strength"].map(lambda share: f"{100 * share:.0f} %")
    cells = {"simulations": count, "accuracies inside": inside}
    cells["mean width"] = lambda part, _: f"{_each(part, 'high', 'low').mean():.3f}"
    cells["mean error"] = lambda part, _: f"{_each(part, 'mean', 'accuracies').mean():+.3f}"
    return shared.table(rows, ["repeat a common guess"], cells)


def inside(rows: DataFrame, peers: DataFrame) -> str:
    found = (_each(rows, "high", "accuracies") >= 0) & (_each(rows, "accuracies", "low") >= 0)
    return f"{found.mean():.1%}"


def _each(rows: DataFrame, one: str, other: str) -> pd.Series:
    """Differences over all annotators of all rows."""
    return rows[one].explode().astype(float) - rows[other].explode().astype(float)


TABLES = crowds_summary, crowds, annotators_coverage
