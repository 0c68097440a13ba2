# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The tables of fields_compared.py's results, for report.py."""

from __future__ import annotations

from collections.abc import Iterator
from math import log1p
from statistics import mean, median

from common import grouped, pick, wrapped
from writing import Paired, Rows, made, scores, sections

#: What others are compared with on the same fields: the longest fit of each number of labels.
OURS = {2: "NMM, 2000 steps"}
SHORT = "NMM, 500 steps"
FIELD = "labels", "coupling", "seed"


def tables(rows: Rows) -> dict[str, str]:
    return made(
        {field_rivals_claim: 0, halves_claim: 0, field_rivals: 2, log_z_rivals: 2, large_rivals: 2},
        rows,
    )


def narrow(rows: Rows, measure: str) -> Iterator[tuple[int, str, Rows]]:
    """Rows of narrow grids that have a measure, by labels and method."""
    known = [row for row in rows if row["task"] != "plain" and measure in row]
    for (labels, method), part in sections(known, labels=None, method={}).items():
        yield labels, method, part


def ours(rows: Rows, labels: int) -> dict:
    """The NMM's KL by field."""
    return scores(pick(rows, labels=labels, method=OURS.get(labels, SHORT)), "KL", FIELD)


def by_share(rows: Rows, labels: int) -> dict[str, Rows]:
    """Rows by their coupling over the critical one of an infinite grid, log(1 + sqrt(C))."""
    critical = log1p(labels**0.5) / (2 if labels == 2 else 1)  # the Ising model's J counts double
    found: dict[str, Rows] = {}
    for (coupling,), part in sections(rows, coupling=None).items():
        found.setdefault(f"{coupling / critical:.1f}", []).extend(part)
    return found


def field_rivals(rows: Rows) -> Iterator[dict]:
    """
    KL divergences: means over fields, the standard error of sampling, and in brackets how many
    fields; differences over all of them; seconds.
    """
    for labels, method, part in narrow(rows, "KL"):
        line = {"labels": f"{labels}", "method": method}
        for share, each in by_share(part, labels).items():
            error = sum(row.get("error", 0.0) ** 2 for row in each) ** 0.5 / len(each)
            sampled = f" ± {error:.2f}" if error else ""
            kl = mean(row["KL"] for row in each)
            line[f"KL, {share} of critical"] = f"{kl:.2f}{sampled} ({len(each)})"
        if method != OURS.get(labels, SHORT):
            line["minus NMM"] = Paired.of(scores(part, "KL", FIELD), ours(rows, labels)).text(2)
        line["s"] = f"{median(row['seconds'] for row in part):.1f}"
        yield line


def log_z_rivals(rows: Rows) -> Iterator[dict]:
    """Estimates of log Z minus the exact one, field by field."""
    for labels, method, part in narrow(rows, "log Z error"):
        for (coupling,), each in sections(part, coupling=None).items():
            errors = [row["log Z error"] for row in each]
            worst = max(row["change"] for row in each)
            yield {
                "labels": f"{labels}",
                "method": method,
                "coupling": f"{coupling}",
                "log Z, minus exact": ", ".join(f"{error:+.2f}" for error in errors),
                "last change of a message": f"{worst:.0e}",
                "s": f"{median(row['seconds'] for row in each):.1f}",
            }


def large_rivals(rows: Rows) -> Iterator[dict]:
    for row in pick(rows, task="plain"):
        error = f" ± {row['error']:.1f}" if "error" in row else ""
        kl = f"{row['KL']:.1f}{error}" if "KL" in row else ""
        away = f"{row['log Z error']:+.1f}" if "log Z error" in row else ""
        names = {"field": f"plain {row['coupling']}", "method": row["method"]}
        yield names | {"KL": kl, "log Z, minus exact": away, "s": f"{row['seconds']:.1f}"}


def field_rivals_claim(rows: Rows) -> str:
    """Who is closer to the target than the NMM, on how many of the same fields."""
    found = []
    for labels, part in grouped([r for r in rows if r["task"] != "plain"], "labels").items():
        reference = ours(rows, *labels)
        for _, method, each in narrow(part, "KL"):
            values = scores(each, "KL", FIELD)
            both = [key for key in values if key in reference]
            if both and not method.startswith("NMM"):
                closer = sum(values[key] < reference[key] for key in both)
                found.append(f"{method} on {closer} of {len(both)} ({labels[0]} labels)")
    if not found:
        return "Nothing has been measured yet."
    return wrapped(
        "Closer to the target than the NMM's bound of its longest fit, on the same narrow grids: "
        + "; ".join(found)
        + "."
    )


def halves_claim(rows: Rows) -> str:
    """What was learned from the rivals: before and after, and wider windows alone beside it."""
    strips = pick(rows, task="strips")
    before = scores(strips, "KL", FIELD, method=OURS[2])
    found = []
    for method, name in (
        ("NMM of half, 2000 steps", "half of the pixels summed out"),
        ("NMM, 5 x 5, 2000 steps", "windows of 5 x 5 alone, nothing summed out"),
    ):
        after = {k: v for k, v in scores(strips, "KL", FIELD, method=method).items() if k in before}
        if not after:
            continue
        each = []
        for coupling in sorted({coupling for _, coupling, _ in after}):
            among = [key for key in after if key[1] == coupling]
            means = [mean(values[key] for key in among) for values in (before, after)]
            each.append(f"{means[0]:.1f} to {means[1]:.1f} at {coupling}")
        change = Paired.of(after, before)
        fewer = sum(gap < 0 for gap in change.gaps)
        found.append(
            f"{name}: lower on {fewer} of {len(change)} fields, by "
            f"{change.text(2)}, means from {', '.join(each)}"
        )
    if not found:
        return "Nothing has been measured yet."
    return wrapped(f"The NMM's bound at 2,000 steps, with {'; with '.join(found)}.")
