# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The tables of mrf.py's results, for report.py."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean, median

from comparison import Table, centre, difference


def load(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def strips(rows: list[dict], table: Table) -> str:
    """Means and medians over the seeds of each coupling."""
    lines = []
    for coupling in sorted({r["coupling"] for r in rows if r["task"] == "strips"}):
        part = [r for r in rows if r["task"] == "strips" and r["coupling"] == coupling]
        columns = [[r[name] for r in part] for name in ("mean field", "NMM bound", "NMM")]
        cells = [f"{len(part)}", *(centre(column, 2) for column in columns)]
        cells[3] += f" ± {(sum(r['error'] ** 2 for r in part)) ** 0.5 / len(part):.2f}"
        cells.append(difference(list(zip(columns[0], columns[2], strict=True)), 2))
        cells.append(f"{max(r['NMM bound'] / r['mean field'] for r in part):.2f}")
        for name in ("mean field", "loopy", "NMM"):
            errors = [r["marginals"][name] for r in part]
            cells.append(f"{mean(errors):.4f}" if None not in errors else "")
        for name in ("mean field", "loopy", "NMM"):
            seconds = [r["seconds"][name] for r in part]
            cells.append(f"{median(seconds):.1f}" if None not in seconds else "")
        lines.append([f"{coupling}", *cells])
    head = ["coupling", "fields", "KL, mean field", "KL, NMM's bound", "KL, NMM",
            "minus mean field", "worst ratio"]  # fmt: skip
    head += [f"error, {name}" for name in ("mean field", "loopy BP", "NMM")]
    head += [f"s, {name}" for name in ("mean field", "loopy BP", "NMM")]
    return table(head, lines)


def large(rows: list[dict], table: Table) -> str:
    lines = []
    for row in rows:
        if row["task"] not in ("letter", "plain"):
            continue
        name = f"letter {row['seed']}" if row["task"] == "letter" else f"plain {row['coupling']}"
        log_z = row["log Z"]
        cells = [f"{log_z:.1f}" + (f" ± {row['log Z error']:.1f}" if "log Z error" in row else "")]
        cells += [f"{row[m] + log_z:.1f}" for m in ("mean field", "NMM", "NMM-CNN")]
        for method in ("NMM", "NMM-CNN"):
            cells.append(f"{(row[method] + log_z) / (row['mean field'] + log_z):.2f}")
        for method in ("mean field", "loopy", "NMM", "NMM-CNN"):
            seconds = row["seconds"][method]
            cells.append(f"{seconds:.0f}" if seconds is not None else "")
        lines.append([name, *cells])
    head = ["field", "log Z", "KL, mean field", "KL, NMM's bound", "KL, NMM-CNN's bound"]
    head += ["NMM / mean field", "NMM-CNN / mean field"]
    head += [f"s, {name}" for name in ("mean field", "loopy BP", "NMM", "NMM-CNN")]
    return table(head, lines)


def amortized(rows: list[dict], table: Table) -> str:
    lines = []
    for row in rows:
        if row["task"] == "amortized":
            pairs = list(zip(row["NMM-CNN"], row["mean field"], strict=True))
            cells = [f"{sum(a < b for a, b in pairs)} of {len(pairs)}"]
            cells += [centre(row[name], 2) for name in ("mean field", "NMM-CNN")]
            cells.append(difference([(b, a) for a, b in pairs], 2))
            cells += [f"{1e3 * median(row['seconds'][n]):.0f}" for n in ("mean field", "NMM-CNN")]
            lines.append([*cells, f"{row['train seconds']:.0f}"])
    head = ["NMM-CNN better", "mean field", "NMM-CNN, bound", "difference", "mean field, ms",
            "NMM-CNN, ms", "training, s"]  # fmt: skip
    return table(head, lines, left=0)


def scaling(rows: list[dict], table: Table) -> str:
    part = [r for r in rows if r["task"] == "scaling"]
    lines = []
    for row in part:
        pixels = row["size"] ** 2
        cells = [f"{1e3 * row['seconds']:.0f}", f"{row['MiB']:.0f}"]
        cells.append(f"{1e6 * row['seconds'] / pixels:.1f}")
        lines.append([f"{row['size']} x {row['size']}", *cells])
    head = ["grid", "a step, ms", "memory, MiB", "µs a pixel"]
    return table(head, lines)


def tables(rows: list[dict], table: Table) -> dict[str, str]:
    found = {"strips": strips, "large": large, "amortized": amortized, "scaling": scaling}
    return {name: make(rows, table) for name, make in found.items()}
