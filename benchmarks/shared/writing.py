# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
How documents state what was measured: rows by what they are of, means with their spread,
differences that are paired, and tables whose lines name their cells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import inf, nan
from statistics import mean, median, stdev

from scipy.stats import ttest_1samp

from benchmarks.shared.common import grouped, pick, table, wrapped

Rows = list[dict]


def scores(rows: Rows, field: str, by: tuple[str, ...] = ("seed",), **key) -> dict:
    """A field's values by seed, of rows that have it; or by other fields, such as images."""
    known = [row for row in pick(rows, **key) if row.get(field) is not None]
    return {tuple(row[name] for name in by): row[field] for row in known}


def sections(rows: Rows, **orders: Iterable | None) -> dict[tuple, Rows]:
    """
    Rows by the values of some fields, in an order: the known ones first, under their names if the
    order has such, and then others as they are stored; by size if there is no order.
    """
    names = {}
    for field, order in reversed(orders.items()):
        values = [row[field] for row in rows]
        known = list(dict.fromkeys(sorted(values) if order is None else [*order, *values]))
        rows = sorted(rows, key=lambda row: known.index(row[field]))
        names |= order if isinstance(order, dict) else {}
    found = grouped(rows, *orders)
    return {tuple(names.get(v, v) for v in values): part for values, part in found.items()}


def p_text(p: float, limits: Sequence[str] = (".001",)) -> str:
    small = next((limit for limit in limits if p < float(limit)), None)
    return f"p < {small}" if small else f"p = {p:.3f}".replace("0.", ".")


def spread(values: Iterable[float], digits: int, unit: float = 1, sign: str = "") -> str:
    """Mean ± sd; a ``sign`` of "+" shows it where the mean is positive too."""
    values = list(values)
    if not values:
        return ""
    sd = f" ± {unit * stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{unit * mean(values):{sign}.{digits}f}{sd}"


def centre(values: Iterable[float], digits: int) -> str:
    """The mean, and the median in brackets."""
    values = list(values)
    if not values:
        return ""
    middle = f" ({median(values):.{digits}f})" if len(values) > 1 else ""
    return f"{mean(values):.{digits}f}{middle}"


def costs(row: dict, names: dict[str, str]) -> dict[str, str]:
    """Cells with milliseconds of two methods, their ratio, and MiB."""
    times = {f"{names.get(k, k)}, ms": f"{1e3 * v:.0f}" for k, v in row["seconds"].items()}
    memory = {f"{names.get(k, k)}, MiB": f"{v:.0f}" for k, v in row["MiB"].items()}
    return times | {"ratio": f"{row['ratio']:.2f}"} | memory


@dataclass(frozen=True)
class Paired:
    """One method minus another wherever both were measured: seeds, splits, images or fields."""

    gaps: list[float]

    @staticmethod
    def of(ours: dict, theirs: dict) -> Paired:
        """Of values by what they were measured on."""
        return Paired([value - theirs[key] for key, value in ours.items() if key in theirs])

    @staticmethod
    def of_rows(ours: Rows, theirs: Rows, field: str, by: tuple[str, ...] = ("seed",)) -> Paired:
        """Of a field of rows."""
        return Paired.of(scores(ours, field, by), scores(theirs, field, by))

    def __len__(self) -> int:
        return len(self.gaps)

    @property
    def mean(self) -> float:
        return mean(self.gaps) if self.gaps else nan

    @property
    def error(self) -> float:
        """Of the mean; not known of a single pair."""
        return stdev(self.gaps) / len(self) ** 0.5 if len(self) > 1 else inf

    @property
    def tested(self) -> bool:
        """Not of fewer than three pairs, nor of pairs that are all alike."""
        return len(self) > 2 and len(set(self.gaps)) > 1

    @property
    def p(self) -> float:
        """Of a paired t-test."""
        return float(ttest_1samp(self.gaps, 0).pvalue) if self.tested else 1.0

    def clear(self, sign: int = 0) -> bool:
        """Whether p < .05, with a mean of this sign."""
        return self.p < 0.05 and (sign == 0 or sign * self.mean > 0)

    def mark(self, sign: int = 1) -> str:
        """† better and ‡ worse, p < .05; ``sign`` is -1 where less is better."""
        return " †" * self.clear(sign) + " ‡" * self.clear(-sign)

    def spread(self, digits: int, unit: float = 1) -> str:
        return spread(self.gaps, digits, unit, "+")

    def brief(self, digits: int, unit: float = 1) -> str:
        """Mean ± sd and the p-value, of three pairs or more."""
        return f"{self.spread(digits, unit)} ({p_text(self.p)})" if len(self) > 2 else ""

    def text(self, digits: int, unit: float = 1) -> str:
        """Mean ± sd, the median, and the p-value."""
        inside = [f"median {unit * median(self.gaps):+.{digits}f}"] if len(self) > 1 else []
        inside += [p_text(self.p, ("1e-6", ".001"))] if self.tested else []
        return self.spread(digits, unit) + (f" ({', '.join(inside)})" if inside else "")


def as_table(lines: Iterable[dict], left: int = 1) -> str:
    """From lines that name their cells; of a name that is a tuple the last part is the heading."""
    lines = list(lines)
    if not lines:
        return "Nothing has been measured yet."
    names = list(dict.fromkeys(name for line in lines for name in line))
    headings = (name if isinstance(name, str) else name[-1] for name in names)
    return table(" | ".join(headings), [[line.get(n, "") for n in names] for line in lines], left)


def made(makers: dict[Callable, int], rows) -> dict[str, str]:
    """
    Tables and sentences by their names in the documents, which are those of the functions that
    make them; and how many of a table's columns are aligned to the left.
    """
    found = {make.__name__.replace("_", " "): (make(rows), left) for make, left in makers.items()}
    return {k: v if isinstance(v, str) else as_table(v, left) for k, (v, left) in found.items()}


def bullets(lines: Iterable[str]) -> str:
    return "\n".join(wrapped(f"- {line}", "  ") for line in lines)
