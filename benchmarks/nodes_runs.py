# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Rows of node classification's results: looked up, named and compared seed by seed."""

from __future__ import annotations

from collections.abc import Iterator
from math import nan
from statistics import mean, stdev
from typing import NamedTuple

from common import GRAPHS, p_text, p_value, pick

NAMES = {"gcn": "GCN", "gat": "GAT", "appnp": "APPNP", "mlp": "MLP"}
#: In which tables put what they know; what else is stored comes after it.
ORDER = ["backbone", "NMM", "backbone + consistency", "NMM + consistency"]
LATER = ["", "temperature", "stacked"]
#: Of a field in tables: its digits and unit.
FORM = {"test.accuracy": (1, 100), "test.nll": (3, 1)}
Values = dict[int, float]


def method_of(row: dict) -> str:
    """A row's method; settings from elsewhere than its own search make it another one."""
    given = row.get("settings of")
    return row["method"] + (f", settings of {given}" if given else "")


def place(method: str) -> tuple:
    """Where tables put a method."""
    first, *more = method.split(", ")
    given = more.pop() if more and more[-1].startswith("settings of") else ""
    after = ", ".join(more)
    known = ORDER.index(first) if first in ORDER else len(ORDER)
    return known, first, given, LATER.index(after) if after in LATER else len(LATER), after


def label(method: str, kind: str) -> str:
    """A method's name in a table: ``"NMM, stacked"`` on GCN is StackedNMM on NMM-GCN."""
    backbone = NAMES.get(kind, kind)
    first, *more = method.split(", ")
    name = first.replace("NMM", "NMM-" + backbone).replace("backbone", backbone)
    for part in more:
        if part == "stacked":
            name = f"StackedNMM on {name}"
        elif part == "temperature":
            name += " + temperature"
        else:
            given = part.replace("settings of NMM", "settings of the NMM's search")
            name += f" ({given})"
    return name


class Runs:
    """Rows of one task, or of a part of it."""

    def __init__(self, rows: list[dict]) -> None:
        self.rows = rows
        self.by_method: dict[str, list[dict]] = {}
        for row in rows:
            self.by_method.setdefault(method_of(row), []).append(row)
        self.methods = sorted(self.by_method, key=place)

    def part(self, **key) -> Runs:
        return Runs(pick(self.rows, **key))

    def values(self, name: str, order=()) -> list:
        """What stands in a column, known values in their order, then all others."""
        found = {row[name] for row in self.rows}
        return [v for v in order if v in found] + sorted(found - set(order), key=str)

    def cells(self) -> Iterator[tuple[str, str, Runs]]:
        """Every graph with every backbone of it that is stored."""
        for dataset in self.values("dataset", GRAPHS):
            part = self.part(dataset=dataset)
            for kind in part.values("backbone", NAMES):
                yield GRAPHS.get(dataset, dataset), kind, part.part(backbone=kind)

    def get(self, field: str, method: str) -> Values:
        """Values by seed; ``field`` may be ``"test.nll"``."""
        found = {}
        for row in self.by_method.get(method, []):
            value = row
            for name in field.split("."):
                value = value.get(name) if value is not None else None
            if value is not None:
                found[row["seed"]] = value
        return found

    def gap(self, field: str, ours: str, theirs: str) -> Gap:
        return gap(self.get(field, ours), self.get(field, theirs))

    def paired(self, field: str, method: str) -> tuple[Values, str]:
        """
        Values on the seeds that all methods with three or more share, so that the rows of a table
        compare; or, of a method that has fewer, on its own, and a remark that says how many.
        """
        values, shared = self.get(field, method), self.shared()
        if shared and shared <= values.keys():
            return {seed: values[seed] for seed in sorted(shared)}, ""
        return values, remark(values)

    def shared(self) -> set[int]:
        seeds = [{row["seed"] for row in rows} for rows in self.by_method.values()]
        return set.intersection(*([s for s in seeds if len(s) >= 3] or [set()]))

    def whole(self, field: str, method: str) -> tuple[Values, str]:
        """All values, and a remark if another method has more seeds."""
        values = self.get(field, method)
        most = max((len({r["seed"] for r in rows}) for rows in self.by_method.values()), default=0)
        return values, remark(values) if len(values) < most else ""


def remark(values: Values) -> str:
    return f" ({len(values)} seed{'s' * (len(values) > 1)})" if values else ""


class Gap(NamedTuple):
    """One method minus another over common seeds, with the p-value of a paired t-test."""

    mean: float
    sd: float
    p: float
    seeds: int

    def text(self, digits: int, unit: float) -> str:
        if self.seeds < 3:
            return ""
        return f"{unit * self.mean:+.{digits}f} ± {unit * self.sd:.{digits}f} ({p_text(self.p)})"


def gap(ours: Values, theirs: Values) -> Gap:
    pairs = [(theirs[seed], ours[seed]) for seed in sorted(ours.keys() & theirs.keys())]
    gaps, p = [b - a for a, b in pairs], p_value(pairs)
    sd = stdev(gaps) if len(gaps) > 1 else nan
    return Gap(mean(gaps) if gaps else nan, sd, 1.0 if p is None else p, len(gaps))


def mark(values: Values, base: Values, sign: int = 1) -> str:
    """† better than ``base`` and ‡ worse, p < .05; ``sign`` is -1 where less is better."""
    found = gap(values, base)
    return "" if not found.p < 0.05 else " †" if sign * found.mean > 0 else " ‡"
