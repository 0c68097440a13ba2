# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
Tables of stored rows. A table is declared by the rows that it shows, what goes down, what goes
across, and its cells: functions of a line's rows and of the line's peers, which are all rows that
share the names of the line but the last, usually the method's. Rivals are found among the peers.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf, nan
from statistics import mean, median, stdev
from typing import Self

import pandas as pd
from pandas import DataFrame, Series
from scipy.stats import ttest_1samp

Cell = Callable[[DataFrame, DataFrame], str]
#: Names of graphs in tables, in the order of lines.
GRAPHS = {"nips12": "NIPS12", "yeast": "Yeast"}
GRAPHS |= {"cora": "Cora", "citeseer": "CiteSeer", "pubmed": "PubMed"}


def frame(rows: Iterable[dict], **key) -> DataFrame:
    """Rows with these values. Names of nested values have a dot; ``test.`` is left out."""
    found = pd.json_normalize([r for r in rows if all(r.get(k) == v for k, v in key.items())])
    return found.rename(columns=lambda name: name.removeprefix("test."))


def ordered(values: Series, names: Mapping | Sequence | None = ()) -> Series:
    """Values as a categorical: keys of ``names`` first, under their names; by size for ``None``."""
    known = sorted(values.dropna().unique()) if names is None else list(names)
    order = list(dict.fromkeys([*known, *values.dropna()]))
    shown = {value: names.get(value, value) if isinstance(names, Mapping) else value
             for value in order}  # fmt: skip
    return Series(pd.Categorical(values.map(shown), list(dict.fromkeys(shown.values())), True),
                  values.index)  # fmt: skip


def groups(rows: DataFrame, names: Sequence[str]) -> Iterator[tuple[tuple, DataFrame]]:
    """Rows by the values of some columns: by category where ordered, else in the order of rows."""
    plain = [name for name in names if not isinstance(rows[name].dtype, pd.CategoricalDtype)]
    rows = rows.assign(**{name: ordered(rows[name]) for name in plain})
    return iter(rows.groupby(list(names), observed=True))


def values(rows: DataFrame, field: str) -> list[float]:
    """A column without missing values; none of a column that does not exist."""
    return rows[field].dropna().tolist() if field in rows else []


def scores(rows: DataFrame, field: str, by: Sequence[str] = ("seed",)) -> dict[tuple, float]:
    """A column's values by seed, or by other columns that name what is paired."""
    known = rows.dropna(subset=[field]) if field in rows else rows[:0]
    return dict(zip(zip(*(known[name] for name in by), strict=True), values(known, field),
                    strict=True))  # fmt: skip


@dataclass(frozen=True)
class Paired:
    """One method minus another on everything that both were measured on."""

    gaps: list[float]

    @classmethod
    def of(cls, ours: dict, theirs: dict) -> Self:
        return cls([value - theirs[key] for key, value in ours.items() if key in theirs])

    @classmethod
    def rows(cls, ours: DataFrame, theirs: DataFrame, field: str, by: Sequence[str] = ("seed",)):
        return cls.of(scores(ours, field, by), scores(theirs, field, by))

    def __len__(self) -> int:
        return len(self.gaps)

    @property
    def mean(self) -> float:
        return mean(self.gaps) if self.gaps else nan

    @property
    def error(self) -> float:
        """Standard error of the mean."""
        return stdev(self.gaps) / len(self) ** 0.5 if len(self) > 1 else inf

    @property
    def tested(self) -> bool:
        """Whether there are three pairs or more, which differ."""
        return len(self) > 2 and len(set(self.gaps)) > 1

    @property
    def p(self) -> float:
        """The p-value of a paired t-test."""
        return float(ttest_1samp(self.gaps, 0).pvalue) if self.tested else 1.0

    def clear(self, sign: int = 0) -> bool:
        """Whether p < .05, with a mean of this sign."""
        return self.p < 0.05 and (sign == 0 or sign * self.mean > 0)

    def mark(self, sign: int = 1) -> str:
        """† better and ‡ worse, p < .05; ``sign`` is -1 where less is better."""
        return " †" * self.clear(sign) + " ‡" * self.clear(-sign)

    def spread(self, digits: int, unit: float = 1) -> str:
        return spread_of(self.gaps, digits, unit, "+")

    def brief(self, digits: int, unit: float = 1) -> str:
        """Mean ± sd and the p-value, of three pairs or more."""
        return f"{self.spread(digits, unit)} ({p_text(self.p)})" if len(self) > 2 else ""

    def text(self, digits: int, unit: float = 1) -> str:
        """Mean ± sd, the median, and the p-value."""
        inside = [f"median {unit * median(self.gaps):+.{digits}f}"] if len(self) > 1 else []
        inside += [p_text(self.p, ("1e-6", ".001"))] if self.tested else []
        return self.spread(digits, unit) + (f" ({', '.join(inside)})" if inside else "")


def p_text(p: float, limits: Sequence[str] = (".001",)) -> str:
    small = next((limit for limit in limits if p < float(limit)), None)
    return f"p < {small}" if small else f"p = {p:.3f}".replace("0.", ".")


def spread_of(values: Iterable[float], digits: int, unit: float = 1, sign: str = "") -> str:
    """Mean ± sd; a ``sign`` of "+" also shows it where the mean is positive."""
    if not (values := list(values)):
        return ""
    sd = f" ± {unit * stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{unit * mean(values):{sign}.{digits}f}{sd}"


def centre_of(values: Iterable[float], digits: int) -> str:
    """The mean, and the median in brackets."""
    if not (values := list(values)):
        return ""
    middle = f" ({median(values):.{digits}f})" if len(values) > 1 else ""
    return f"{mean(values):.{digits}f}{middle}"


def count(part: DataFrame, peers: DataFrame) -> str:
    """Cell: the number of rows."""
    return f"{len(part)}"


def only(method: str, cell: Cell) -> Cell:
    """Cell of one method's rows."""
    return lambda part, peers: cell(part[part["method"] == method], peers)


def bracketed(cell: Cell, inside: Cell) -> Cell:
    """Two cells in one, the second in brackets."""
    return lambda *rows: cell(*rows) + (f" ({more})" if (more := inside(*rows)) else "")


def gap(rows: DataFrame, ours: str, theirs: str, field: str, by: Sequence[str]) -> Paired:
    """One method minus another."""
    return Paired.rows(*(rows[rows["method"] == name] for name in (ours, theirs)), field, by)


def spread(field: str, digits: int, unit: float = 1) -> Cell:
    """Cell: mean ± standard deviation."""
    return lambda part, peers: spread_of(values(part, field), digits, unit)


def centre(field: str, digits: int) -> Cell:
    """Cell: the mean, and the median in brackets."""
    return lambda part, peers: centre_of(values(part, field), digits)


def average(field: str, form: str = "", unit: float = 1, of: Callable = mean) -> Cell:
    """Cell: the mean, or the ``median`` or ``max``, in a format such as ``".1f"``."""
    return lambda part, peers: format(unit * of(v), form) if (v := values(part, field)) else ""


def first(field: str, form: str = "", unit: float = 1) -> Cell:
    """Cell: the value of the only row, or of the first."""
    return average(field, form, unit, of=lambda found: found[0])


def against(
    base: Mapping | str, field: str, digits: int, unit: float = 1, by: Sequence[str] = ("seed",),
    form: Callable = Paired.text, better: int = 0,
) -> Cell:  # fmt: skip
    """Cell: the paired difference from peers, ``base``; ``better`` of 1 or -1 marks clear ones."""
    key = base if isinstance(base, Mapping) else {"method": base}

    def cell(part: DataFrame, peers: DataFrame) -> str:
        if all((part[name] == value).all() for name, value in key.items()):
            return ""
        theirs = peers
        for name, value in key.items():
            theirs = theirs[theirs[name] == value]
        gap = Paired.rows(part, theirs, field, by)
        return form(gap, digits, unit) + (gap.mark(better) if better else "")

    return cell


def differences(
    part: DataFrame, peers: DataFrame, names: Sequence[str], base: Mapping | str, field: str,
    by: Sequence[str] = ("seed",),
) -> list[Paired]:  # fmt: skip
    """Paired differences from a base, one for each combination of the values of ``names``."""
    found, key = [], base if isinstance(base, Mapping) else {"method": base}
    if all((part[name] == value).all() for name, value in key.items()):
        return []
    for name, wanted in key.items():
        peers = peers[peers[name] == wanted]
    for value, own in groups(part, names):
        among = peers[(peers[list(names)].astype(object) == list(value)).all(axis=1)]
        found.append(Paired.rows(own, among, field, by))
    return [gap for gap in found if len(gap)]


def number_of(*names: str) -> Cell:
    """Cell: how many combinations of values a line has."""
    return lambda part, peers: f"{len(part[list(names)].drop_duplicates())}"


def range_of(values: Iterable[float], form: str, unit: float = 1) -> str:
    """The mean, and the lowest and the highest value in brackets."""
    if not (values := [unit * value for value in values]):
        return ""
    ends = f" ({min(values):{form}} to {max(values):{form}})" if len(values) > 1 else ""
    return f"{mean(values):{form}}{ends}"


def over(names: Sequence[str], base: Mapping | str, field: str, form: str, unit: float = 1,
         by: Sequence[str] = ("seed",)) -> Cell:  # fmt: skip
    """Cell: mean (lowest to highest) of the mean differences from a base, by ``names``."""

    def cell(part: DataFrame, peers: DataFrame) -> str:
        gaps = differences(part, peers, names, base, field, by)
        return range_of([gap.mean for gap in gaps], form, unit)

    return cell


def clear(names: Sequence[str], base: Mapping | str, field: str, better: int = 1,
          by: Sequence[str] = ("seed",)) -> Cell:  # fmt: skip
    """Cell: how many of the differences from a base, by ``names``, are clearly better and worse."""

    def cell(part: DataFrame, peers: DataFrame) -> str:
        gaps = differences(part, peers, names, base, field, by)
        found = (sum(gap.clear(sign) for gap in gaps) for sign in (better, -better))
        return "{}, {} of {}".format(*found, len(gaps)) if gaps else ""

    return cell


def table(
    rows: DataFrame, down: Sequence[str], cells: Mapping[str | tuple, Cell], across: str = ""
) -> str:
    """
    A table in Markdown. Values of a column ``across`` have cells of their own, with a place for the
    value in each heading. Of a heading that is a tuple the last part is shown.
    """
    if rows.empty:
        return "Nothing has been measured yet."
    lines, (*outer, _) = [], down
    columns = dict(groups(rows, [across])) if across else {("",): rows}
    families = groups(rows, outer) if outer else [((), rows)]
    for _, peers in families:
        for names, part in groups(peers, down):
            line: dict = dict(zip(down, map(str, names), strict=True))
            for (value,) in columns:
                own, among = (f[f[across] == value] if across else f for f in (part, peers))
                for heading, cell in cells.items():
                    name = heading.format(value) if across else heading
                    line[name] = cell(own, among) if len(own) else ""
            lines.append(line)
    return markdown(lines, len(down))


def markdown(lines: Iterable[Mapping], left: int = 1) -> str:
    """Lines of named cells in Markdown, without empty ones; first columns aligned to the left."""
    lines = list(lines)
    if not lines:
        return "Nothing has been measured yet."
    names = list(dict.fromkeys(name for line in lines for name in line))
    heads = [name if isinstance(name, str) else name[-1] for name in names]
    cells = [[line.get(name, "") for name in names] for line in lines]
    align = ["---"] * left + ["---:"] * (len(names) - left)
    whole = [heads, align, *(row for row in cells if any(row[left:]))]
    return "\n".join(f"| {' | '.join(row)} |" for row in whole)
