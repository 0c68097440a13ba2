# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Rows of node classification's results: named, looked up and compared seed by seed."""

from __future__ import annotations

from benchmarks.shared.common import GRAPHS, pick
from benchmarks.shared.writing import Paired, Rows, scores, sections

NAMES = {"gcn": "GCN", "gat": "GAT", "appnp": "APPNP", "mlp": "MLP"}
#: What tables put first, in this order; ratios are in their own.
ORDERS = {
    "dataset": GRAPHS.values(),
    "backbone": NAMES.values(),
    "ratio": None,
    "method": [
        model + after + given
        for model in ("backbone", "NMM", "backbone + consistency", "NMM + consistency")
        for given in ("", ", settings of its first 6 trials", ", settings of NMM")
        for after in ("", ", temperature", ", stacked", ", pooled")
    ],
}
#: Of a score in tables: its digits and unit.
FORM = {"accuracy": (1, 100), "nll": (3, 1)}


def runs(rows: Rows, task: str) -> Rows:
    """
    Rows of a task under the names of tables, with their scores on the test nodes. Settings from
    elsewhere than its own search make a method another one.
    """
    found = [row | row.get("test", {}) for row in pick(rows, task=task)]
    for row in found:
        row["dataset"] = GRAPHS.get(row["dataset"], row["dataset"])
        row["backbone"] = NAMES.get(row["backbone"], row["backbone"])
        if "settings of" in row:
            row["method"] += f", settings of {row['settings of']}"
    return found


def parts(rows: Rows, *fields: str) -> dict[tuple, Rows]:
    """By some fields, in the order of tables."""
    return sections(rows, **{field: ORDERS[field] for field in fields})


def label(method: str, backbone: str) -> str:
    """A method's name in a table: ``"NMM, stacked"`` on GCN is StackedNMM on NMM-GCN."""
    first, *more = method.split(", ")
    name = first.replace("NMM", "NMM-" + backbone).replace("backbone", backbone)
    for part in more:
        if part == "stacked":
            name = f"StackedNMM on {name}"
        elif part == "pooled":
            name = f"StackedNMM with its pool on {name}"
        elif part == "temperature":
            name += " + temperature"
        else:
            given = part.replace("settings of NMM", "settings of the NMM's search")
            name += f" ({given})"
    return name


def gap(rows: Rows, field: str, ours: str, theirs: str) -> Paired:
    """Of two methods in one cell."""
    return Paired.of_rows(pick(rows, method=ours), pick(rows, method=theirs), field)


def shared(rows: Rows) -> set[tuple]:
    """Seeds that all methods with three or more have."""
    seeds = [set(scores(part, "seed")) for part in parts(rows, "method").values()]
    return set.intersection(*([known for known in seeds if len(known) > 2] or [set()]))


def on_shared(rows: Rows, field: str, method: str) -> tuple[dict, str]:
    """
    Values on the seeds that all methods with three or more share, so that the rows of a table
    compare; or, of a method that has fewer, on its own, and a remark that says how many.
    """
    values, common = scores(rows, field, method=method), shared(rows)
    if common and common <= values.keys():
        return {seed: values[seed] for seed in common}, ""
    return values, remark(values, "split")


def remark(values: dict, what: str) -> str:
    return f" ({len(values)} {what}{'s' * (len(values) > 1)})" if values else ""


def whole(rows: Rows, field: str, method: str) -> tuple[dict, str]:
    """All values, and a remark if another method has more seeds."""
    values = scores(rows, field, method=method)
    most = max((len(scores(part, "seed")) for part in parts(rows, "method").values()), default=0)
    return values, remark(values, "seed") if len(values) < most else ""
