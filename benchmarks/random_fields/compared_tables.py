# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The tables of fields_compared.py's results, for report.py."""

from __future__ import annotations

from collections.abc import Iterator
from math import log1p
from statistics import mean, median

from benchmarks.random_fields.tables import with_kl
from benchmarks.shared.common import grouped, pick, wrapped
from benchmarks.shared.writing import Paired, Rows, made, scores, sections

#: What others are compared with on the same fields: the longest fit of each number of labels.
OURS = {2: "NMM, 2000 steps"}
SHORT = "NMM, 500 steps"
FIELD = "labels", "coupling", "seed"
#: What fields.py has fitted to all pixels.
ALL = "NMM", "NMM-CNN", "mean field"
#: Tasks whose rows are not of narrow grids.
LARGE = "plain", "letter"


def tables(files: dict[str, Rows]) -> dict[str, str]:
    makers = {field_rivals_claim: 0, closest_claim: 0, halves_claim: 0}
    makers |= {field_rivals: 2, log_z_rivals: 2}
    found = made(makers | {large_rivals: 1}, files["fields_compared"])
    return found | made({large_halves_claim: 0}, files)


def narrow(rows: Rows, measure: str) -> Iterator[tuple[int, str, Rows]]:
    """Rows of narrow grids that have a measure, by labels and method."""
    known = [row for row in rows if row["task"] not in LARGE and measure in row]
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


def large_fields(rows: Rows) -> Iterator[tuple[str, Rows]]:
    """Rows of each large field, by the name that fields_tables.py gives it."""
    for task in reversed(LARGE):
        for (_, _), part in grouped(pick(rows, task=task), "coupling", "seed").items():
            yield f"{task} {part[0]['coupling' if task == 'plain' else 'seed']}", part


def large_rivals(rows: Rows) -> Iterator[dict]:
    """KL divergences with the standard errors of sampling, and seconds."""
    for name, part in large_fields(rows):
        line = {"field": name}
        for row in part:
            method = row["method"].removesuffix(", 8 given").removesuffix(", 500 steps")
            seconds = f"{row['seconds']:.0f} s"
            if "KL" in row:
                error = f" ± {row['error']:.1f}" if "error" in row else ""
                line[f"KL, {method}"] = f"{row['KL']:.1f}{error} ({seconds})"
            else:
                line[f"{method}, log Z minus exact"] = f"{row['log Z error']:+.1f} ({seconds})"
        yield line


def large_halves(files: dict[str, Rows]) -> Iterator[tuple[str, float, dict, float]]:
    """
    Of every large field: its name, the NMM's KL with half of the pixels summed out, those of what
    fields.py has fitted to all, and the least of the rivals here.
    """
    names = {row["name"]: row for row in with_kl(files.get("fields", []))}
    for name, part in large_fields(files.get("fields_compared", [])):
        kl = {row["method"]: row["KL"] for row in part if "KL" in row}
        half, known = kl.pop("NMM of half, 500 steps", None), names.get(name)
        if half is not None and known and kl:
            yield name, half, {each: known[each] for each in ALL}, min(kl.values())


def large_won(files: dict[str, Rows]) -> tuple[int, int]:
    """On how many large fields that NMM is the closest of all, and how many there are."""
    found = list(large_halves(files))
    return sum(half < min(*every.values(), rival) for _, half, every, rival in found), len(found)


def large_halves_claim(files: dict[str, Rows]) -> str:
    """Where half of the pixels are summed out, against what fields.py has fitted to all."""
    lines = [
        f"{half:.1f} nats on {name} (NMM of all pixels {every['NMM']:.1f}, NMM-CNN "
        f"{every['NMM-CNN']:.1f}, mean field {every['mean field']:.1f})"
        for name, half, every, _ in large_halves(files)
    ]
    if not lines:
        return "Nothing has been measured yet."
    won, number = large_won(files)
    return wrapped(
        f"The NMM's bound with half of the pixels summed out: {'; '.join(lines)}. It is the "
        f"closest of all, windows and chains too, on {won} of {number}."
    )


def field_rivals_claim(rows: Rows) -> str:
    """Who is closer to the target than the NMM, on how many of the same fields."""
    found = []
    for labels, part in grouped([r for r in rows if r["task"] not in LARGE], "labels").items():
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


def closest(rows: Rows) -> Iterator[tuple[str, int, str, float]]:
    """Of each kind of narrow grid: the method of the lowest mean over the fields that all have."""
    small = [row for row in rows if "KL" in row and row["task"] not in LARGE]
    for (labels,), part in sections(small, labels=None).items():
        for share, each in by_share(part, labels).items():
            every = {
                name: scores(of, "KL", FIELD) for (name,), of in grouped(each, "method").items()
            }
            number = max(map(len, every.values()))
            means = {n: mean(v.values()) for n, v in every.items() if len(v) == number}
            best = min(means, key=lambda name: means[name])
            yield best, labels, share, means[best]


def closest_claim(rows: Rows) -> str:
    """Which of all methods is the closest on average."""
    found = [
        f"{best} with {labels} labels at {share} ({kl:.2f} nats)"
        for best, labels, share, kl in closest(rows)
    ]
    if not found:
        return "Nothing has been measured yet."
    return wrapped(
        f"Closest on average, by labels and share of the critical coupling: {'; '.join(found)}."
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
