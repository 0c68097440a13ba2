# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The tables of fields.py's results, for report.py."""

from __future__ import annotations

from statistics import mean, median

from common import centre, difference, grouped, pick, table

#: With loopy belief propagation, which runs where PGMax is installed.
METHODS = {"mean field": "mean field", "loopy": "loopy BP", "NMM": "NMM"}


def tables(rows: list[dict]) -> dict[str, str]:
    return {"strips": strips(rows), "large": large(rows), "amortized": amortized(rows),
            "scaling": scaling(rows)}  # fmt: skip


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
        lines.append([
            f"{coupling}", f"{len(part)}", centre(independent, 2), centre(bound, 2),
            f"{centre(kl, 2)} ± {error:.2f}", gaps,
            f"{max(b / a for a, b in zip(independent, bound, strict=True)):.2f}",
            *(column(part, "marginals", n, lambda v: f"{mean(v):.4f}") for n in METHODS),
            *(column(part, "seconds", n, lambda v: f"{median(v):.1f}") for n in METHODS),
        ])  # fmt: skip
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
        lines.append([
            f"{row['task']} {row.get('seed', row.get('coupling'))}",
            f"{log_z:.1f}" + (f" ± {row['log Z error']:.1f}" if "log Z error" in row else ""),
            *(f"{value:.1f}" for value in kl.values()),
            *(f"{kl[method] / kl['mean field']:.2f}" for method in ("NMM", "NMM-CNN")),
            *(f"{value:.0f}" if value is not None else "" for value in seconds),
        ])  # fmt: skip
    head = (
        "field | log Z | KL, mean field | KL, NMM's bound | KL, NMM-CNN's bound | "
        "NMM / mean field | NMM-CNN / mean field"
    )
    return table(head + "".join(f" | s, {name}" for name in methods.values()), lines)


def amortized(rows: list[dict]) -> str:
    lines, methods = [], ("mean field", "NMM-CNN")
    for row in pick(rows, task="amortized"):
        pairs = list(zip(*(row[name] for name in methods), strict=True))
        lines.append([
            f"{sum(b < a for a, b in pairs)} of {len(pairs)}",
            *(centre(row[name], 2) for name in methods), difference(pairs, 2),
            *(f"{1e3 * median(row['seconds'][name]):.0f}" for name in methods),
            f"{row['train seconds']:.0f}",
        ])  # fmt: skip
    head = (
        "NMM-CNN better | mean field | NMM-CNN, bound | difference | mean field, ms | "
        "NMM-CNN, ms | training, s"
    )
    return table(head, lines, left=0)


def scaling(rows: list[dict]) -> str:
    lines = [[f"{row['size']} x {row['size']}", f"{1e3 * row['seconds']:.0f}", f"{row['MiB']:.0f}",
              f"{1e6 * row['seconds'] / row['size'] ** 2:.1f}"]
             for row in pick(rows, task="scaling")]  # fmt: skip
    return table("grid | a step, ms | memory, MiB | µs a pixel", lines)
