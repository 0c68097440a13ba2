# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""How tables state what was measured: with its spread, differences paired, and in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import mean, median, stdev

from scipy.stats import ttest_rel

Pairs = Sequence[tuple[float, float]]
#: Names in tables; what else is stored comes after them, as it is stored.
GRAPHS = {"nips12": "NIPS12", "yeast": "Yeast", "cora": "Cora", "citeseer": "CiteSeer",
          "pubmed": "PubMed"}  # fmt: skip


def p_value(pairs: Pairs) -> float | None:
    """Of a t-test, paired; none of fewer than three pairs or of pairs that are all alike."""
    if len(pairs) < 3 or len({ours - theirs for theirs, ours in pairs}) < 2:
        return None
    theirs, ours = zip(*pairs, strict=True)
    return float(ttest_rel(ours, theirs).pvalue)


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


def centre(values: Sequence[float], digits: int) -> str:
    """The mean, and the median in brackets."""
    if not values:
        return ""
    middle = f" ({median(values):.{digits}f})" if len(values) > 1 else ""
    return f"{mean(values):.{digits}f}{middle}"


def difference(pairs: Pairs, digits: int) -> str:
    """Mean of the second minus the first ± sd, the median, and the p-value."""
    gaps = [ours - theirs for theirs, ours in pairs]
    inside = [f"median {median(gaps):+.{digits}f}"] if len(gaps) > 1 else []
    if (p := p_value(pairs)) is not None:
        inside.append(p_text(p, ("1e-6", ".001")))
    return spread(gaps, digits, sign="+") + (f" ({', '.join(inside)})" if inside else "")


def costs(row: dict) -> list[str]:
    """Milliseconds of two methods, their ratio, and MiB."""
    times = [f"{1e3 * value:.0f}" for value in row["seconds"].values()]
    return [*times, f"{row['ratio']:.2f}", *(f"{value:.0f}" for value in row["MiB"].values())]


def names(known: dict[str, str], found: Iterable[str]) -> dict[str, str]:
    """Names of all that is stored: known ones first, others as they are stored."""
    found = list(dict.fromkeys(found))
    stored = [key for key in known if key in found] + [key for key in found if key not in known]
    return {key: known.get(key, key) for key in stored}


def table(head: list[str], rows: Iterable[list[str]], left: int = 1) -> str:
    """In Markdown, the first columns aligned to the left; without rows that have nothing else."""
    rows = [row for row in rows if any(row[left:])]
    align = ["---"] * left + ["---:"] * (len(head) - left)
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, align, *rows])
