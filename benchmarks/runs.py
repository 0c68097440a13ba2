# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Rows of node classification's results, looked up and compared; cells of its tables."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

from scipy.stats import ttest_rel

NAMES = {"gcn": "GCN", "gat": "GAT", "appnp": "APPNP", "mlp": "MLP"}
GRAPHS = {"cora": "Cora", "citeseer": "CiteSeer", "pubmed": "PubMed"}
#: In which tables put what they know; what else is stored comes after it.
ORDER = ("backbone", "NMM", "backbone + agreement", "NMM + agreement")
LATER = ("", "temperature", "stacked")


def method_of(row: dict) -> str:
    """A row's method; settings from elsewhere than its own search make it another one."""
    given = row.get("settings of")
    return row["method"] + (f", settings of {given}" if given else "")


def label(method: str, kind: str) -> str:
    """A method's name in a table: ``"NMM, stacked"`` on GCN is StackedNMM on NMM-GCN."""
    first, *more = method.split(", ")
    name = first.replace("NMM", "NMM-" + NAMES.get(kind, kind))
    name = name.replace("backbone", NAMES.get(kind, kind))
    for part in more:
        if part == "stacked":
            name = f"StackedNMM on {name}"
        elif part == "temperature":
            name += " + temperature"
        else:
            part = part.replace("settings of NMM", "settings of the NMM's search")
            name += f" ({part})"
    return name


class Runs:
    """Rows of one task."""

    def __init__(self, rows: list[dict]) -> None:
        self.rows = rows
        self.places: dict[tuple, list[dict]] = {}
        for row in rows:
            self.places.setdefault((row["dataset"], row["backbone"]), []).append(row)

    @classmethod
    def read(cls, path: Path, task: str) -> Runs:
        lines = path.read_text().splitlines() if path.exists() else []
        return cls([row for row in map(json.loads, lines) if row["task"] == task])

    def block(self, **key) -> list[dict]:
        rows = self.rows
        if "dataset" in key and "backbone" in key:
            rows = self.places.get((key.pop("dataset"), key.pop("backbone")), [])
        return [row for row in rows if all(row.get(k) == v for k, v in key.items())]

    def values(self, name: str, order: dict | tuple, **key) -> list[str]:
        """What stands in a column, known values in their order, then all others."""
        found = {row[name] for row in self.block(**key)}
        return [v for v in order if v in found] + sorted(found - set(order), key=str)

    def methods(self, **key) -> list[str]:
        """All that are stored, sorted by :data:`ORDER`."""

        found = {method_of(row): row for row in self.block(**key)}

        def place(method: str) -> tuple:
            given = found[method].get("settings of", "")
            first, _, after = found[method]["method"].partition(", ")
            known = ORDER.index(first) if first in ORDER else len(ORDER)
            return known, first, given, LATER.index(after) if after in LATER else len(LATER), after

        return sorted(found, key=place)

    def get(self, field: str, method: str, **key) -> dict[int, float]:
        """Values by seed; ``field`` may be ``"test.nll"``."""
        found = {}
        for row in self.block(**key):
            value = row if method_of(row) == method else None
            for name in field.split("."):
                value = value.get(name) if value is not None else None
            if value is not None:
                found[row["seed"]] = value
        return found

    def shared(self, **key) -> set[int]:
        """
        The seeds of a block that all its methods with three seeds or more have: rows of a table
        are means over these, so that they compare.
        """
        seeds: dict[str, set[int]] = {}
        for row in self.block(**key):
            seeds.setdefault(method_of(row), set()).add(row["seed"])
        return set.intersection(*([s for s in seeds.values() if len(s) >= 3] or [set()]))

    def paired(self, field: str, method: str, **key) -> tuple[dict[int, float], str]:
        """
        Values on the shared seeds; or, of a method that has fewer, on those that it has, and a
        remark that says how many.
        """
        values, shared = self.get(field, method, **key), self.shared(**key)
        if shared and shared <= values.keys():
            return {seed: values[seed] for seed in sorted(shared)}, ""
        return values, remark(values)

    def whole(self, field: str, method: str, **key) -> tuple[dict[int, float], str]:
        """All values, and a remark if another method of the block has more seeds."""
        values = self.get(field, method, **key)
        most = max(len(self.get("seed", other, **key)) for other in self.methods(**key) or [method])
        return values, remark(values) if len(values) < most else ""


def remark(values: dict) -> str:
    return f" ({len(values)} seed{'s' * (len(values) > 1)})" if values else ""


def difference(a: dict[int, float], b: dict[int, float]) -> tuple[float, float, float, int]:
    """Of a - b over common seeds: mean, sd, the p-value of a paired t-test, and their number."""
    seeds = sorted(a.keys() & b.keys())
    gaps = [a[s] - b[s] for s in seeds]
    if len(gaps) < 3:
        return (statistics.mean(gaps) if gaps else float("nan")), float("nan"), 1.0, len(gaps)
    # A t-test knows no p of equal values.
    p = ttest_rel([a[s] for s in seeds], [b[s] for s in seeds]).pvalue if any(gaps) else 1.0
    return statistics.mean(gaps), statistics.stdev(gaps), p, len(gaps)


def mark(values: dict[int, float], base: dict[int, float], sign: int = 1) -> str:
    """† better than ``base`` and ‡ worse, p < .05; ``sign`` is -1 where less is better."""
    mean, _, p, _ = difference(values, base)
    return "" if not p < 0.05 else " †" if sign * mean > 0 else " ‡"


def mean(values: dict[int, float]) -> float:
    return statistics.mean(values.values())


def sd(values: dict[int, float]) -> float:
    return statistics.stdev(values.values()) if len(values) > 1 else float("nan")


def p_value(p: float) -> str:
    return "p < .001" if p < 0.001 else f"p = {p:.3f}".replace("0.", ".")


def table(head: list[str], rows: list[list[str]], left: int = 1) -> str:
    rows = [row for row in rows if any(row[left:])]  # without what has not been run
    align = ["---"] * left + ["---:"] * (len(head) - left)
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, align, *rows])
