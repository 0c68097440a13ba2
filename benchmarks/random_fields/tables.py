# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The tables of fields.py's results, for report.py."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import mean, median

from benchmarks.shared.common import pick
from benchmarks.shared.writing import Paired, Rows, centre, made, scores, sections

#: With loopy belief propagation, which runs where PGMax is installed.
METHODS = {"mean field": "mean field", "loopy": "loopy BP", "NMM": "NMM"}


def tables(rows: Rows) -> dict[str, str]:
    return made({strips: 1, large: 1, amortized: 0, scaling: 1}, rows)


def strips(rows: Rows) -> Iterator[dict]:
    """KL divergences: means and medians over the seeds of each coupling."""
    for (coupling,), part in sections(pick(rows, task="strips"), coupling=None).items():
        free, bound, kl = (scores(part, name) for name in ("mean field", "NMM bound", "NMM"))
        error = sum(row["error"] ** 2 for row in part) ** 0.5 / len(part)
        line = {
            "coupling": f"{coupling}",
            "fields": f"{len(part)}",
            "KL, mean field": centre(free.values(), 2),
            "KL, NMM's bound": centre(bound.values(), 2),
            "KL, NMM": f"{centre(kl.values(), 2)} ± {error:.2f}",
            "minus mean field": Paired.of(kl, free).text(2),
            "worst ratio": f"{max(bound[seed] / free[seed] for seed in free):.2f}",
        }
        for method, name in METHODS.items():
            errors = [row["marginals"][method] for row in part]
            line[f"error, {name}"] = "" if None in errors else f"{mean(errors):.4f}"
        for method, name in METHODS.items():
            seconds = [row["seconds"][method] for row in part]
            line[f"s, {name}"] = "" if None in seconds else f"{median(seconds):.1f}"
        yield line


def with_kl(rows: Rows) -> Rows:
    """Large fields by name, with bounds on KL divergences."""
    found = [row for row in rows if row["task"] in ("letter", "plain")]
    for number, row in enumerate(found):
        kl = {method: row[method] + row["log Z"] for method in ("mean field", "NMM", "NMM-CNN")}
        name = f"{row['task']} {row.get('seed', row.get('coupling'))}"
        found[number] = row | kl | {"name": name}
    return found


def large(rows: Rows) -> Iterator[dict]:
    """Fields of many pixels, one by one."""
    for row in with_kl(rows):
        error = f" ± {row['log Z error']:.1f}" if "log Z error" in row else ""
        line = {
            "field": row["name"],
            "log Z": f"{row['log Z']:.1f}{error}",
            "KL, mean field": f"{row['mean field']:.1f}",
            "KL, NMM's bound": f"{row['NMM']:.1f}",
            "KL, NMM-CNN's bound": f"{row['NMM-CNN']:.1f}",
            "NMM / mean field": f"{row['NMM'] / row['mean field']:.2f}",
            "NMM-CNN / mean field": f"{row['NMM-CNN'] / row['mean field']:.2f}",
        }
        for method, name in (METHODS | {"NMM-CNN": "NMM-CNN"}).items():
            seconds = row["seconds"][method]
            line[f"s, {name}"] = "" if seconds is None else f"{seconds:.0f}"
        yield line


def amortized(rows: Rows) -> Iterator[dict]:
    """One network for many fields, on fields that it was not trained on."""
    for row in pick(rows, task="amortized"):
        free, network, seconds = row["mean field"], row["NMM-CNN"], row["seconds"]
        found = Paired([b - a for a, b in zip(free, network, strict=True)])
        yield {
            "NMM-CNN better": f"{sum(gap < 0 for gap in found.gaps)} of {len(found)}",
            "mean field": centre(free, 2),
            "NMM-CNN, bound": centre(network, 2),
            "difference": found.text(2),
            "mean field, ms": f"{1e3 * median(seconds['mean field']):.0f}",
            "NMM-CNN, ms": f"{1e3 * median(seconds['NMM-CNN']):.0f}",
            "training, s": f"{row['train seconds']:.0f}",
        }


def scaling(rows: Rows) -> Iterator[dict]:
    """A step of training on square grids."""
    for row in pick(rows, task="scaling"):
        yield {
            "grid": f"{row['size']} x {row['size']}",
            "a step, ms": f"{1e3 * row['seconds']:.0f}",
            "memory, MiB": f"{row['MiB']:.0f}",
            "µs a pixel": f"{1e6 * row['seconds'] / row['size'] ** 2:.1f}",
        }
