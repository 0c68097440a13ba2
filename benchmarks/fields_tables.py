# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The tables of fields.py's results, for report.py."""

from __future__ import annotations

from statistics import mean, median

from common import centre, difference, grouped, made, pick, table

#: With loopy belief propagation, which runs where PGMax is installed.
METHODS = {"mean field": "mean field", "loopy": "loopy BP", "NMM": "NMM"}


def strips(rows: list[dict]) -> str:
    """Means and medians over the seeds of each coupling."""

    def column(part: list[dict], field: str, name: str, form) -> str:
        values = [row[field][name] for row in part]
        return form(values) if None not in values else ""

    lines = []
    for (coupling,), part in sorted(grouped(pick(rows, task="strips"), "coupling").items()):
        independent, bound, kl = ([r[f] for r in part] for f in ("mean field", "NMM bound", "NMM"))
        error = sum(row["error"] ** 2 for row in part) ** 0.5 / len(part)
        gaps = difference(list(zip(independent, kl, strict=True)), 2)
        worst = max(b / a for a, b in zip(independent, bound, strict=True))
        cells = [f"{coupling}", f"{len(part)}", centre(independent, 2), centre(bound, 2)]
        cells += [f"{centre(kl, 2)} ± {error:.2f}", gaps, f"{worst:.2f}"]
        cells += [column(part, "marginals", n, lambda v: f"{mean(v):.4f}") for n in METHODS]
        cells += [column(part, "seconds", n, lambda v: f"{median(v):.1f}") for n in METHODS]
        lines.append(cells)
    head = (
        "coupling | fields | KL, mean field | KL, NMM's bound | KL, NMM | minus mean field | "
        "worst ratio"
    )
    for what in ("error", "s"):
        head += "".join(f" | {what}, {name}" for name in METHODS.values())
    return table(head, lines)


def large(rows: list[dict]) -> str:
    lines, methods = [], METHODS | {"NMM-CNN": "NMM-CNN"}
    for row in (row for row in rows if row["task"] in ("letter", "plain")):
        log_z, seconds = row["log Z"], [row["seconds"][method] for method in methods]
        kl = {m: row[m] + log_z for m in ("mean field", "NMM", "NMM-CNN")}
        cells = [f"{row['task']} {row.get('seed', row.get('coupling'))}", f"{log_z:.1f}"]
        cells[1] += f" ± {row['log Z error']:.1f}" if "log Z error" in row else ""
        cells += [f"{value:.1f}" for value in kl.values()]
        cells += [f"{kl[method] / kl['mean field']:.2f}" for method in ("NMM", "NMM-CNN")]
        lines.append([*cells, *(f"{s:.0f}" if s is not None else "" for s in seconds)])
    head = (
        "field | log Z | KL, mean field | KL, NMM's bound | KL, NMM-CNN's bound | "
        "NMM / mean field | NMM-CNN / mean field"
    )
    return table(head + "".join(f" | s, {name}" for name in methods.values()), lines)


def amortized(rows: list[dict]) -> str:
    lines, methods = [], ("mean field", "NMM-CNN")
    for row in pick(rows, task="amortized"):
        pairs = list(zip(*(row[name] for name in methods), strict=True))
        cells = [f"{sum(b < a for a, b in pairs)} of {len(pairs)}"]
        cells += [*(centre(row[name], 2) for name in methods), difference(pairs, 2)]
        cells += [f"{1e3 * median(row['seconds'][name]):.0f}" for name in methods]
        lines.append([*cells, f"{row['train seconds']:.0f}"])
    head = (
        "NMM-CNN better | mean field | NMM-CNN, bound | difference | mean field, ms | "
        "NMM-CNN, ms | training, s"
    )
    return table(head, lines, left=0)


def scaling(rows: list[dict]) -> str:
    lines = []
    for row in pick(rows, task="scaling"):
        cells = [f"{row['size']} x {row['size']}", f"{1e3 * row['seconds']:.0f}"]
        lines.append(
            [*cells, f"{row['MiB']:.0f}", f"{1e6 * row['seconds'] / row['size'] ** 2:.1f}"]
        )
    return table("grid | a step, ms | memory, MiB | µs a pixel", lines)


def tables(rows: list[dict]) -> dict[str, str]:
    return made((strips, large, amortized, scaling), rows)
