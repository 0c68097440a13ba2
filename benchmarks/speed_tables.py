# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The tables of speed.py's results, for report.py."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from common import grouped, made, names, pick, table, wrapped

CODES = {
    "loop": "loop over nodes in PyTorch",
    "compiled": "compiled loops (CPU, numba)",
    "sweeps": "tensor code (any device)",
}


def exponent(small: dict, row: dict, what: str = "seconds") -> float:
    """Of growth with the edges."""
    gain, size = (math.log(row[k] / small[k]) for k in (what, "edges"))
    return gain / size


def draws(rows: list[dict]) -> str:
    """One draw of q(c | y), against a loop over nodes."""
    lines = []
    for part in grouped(pick(rows, task="draw"), "device", "threads", "nodes").values():
        loop = next((row["seconds"] for row in part if row["code"] == "loop"), math.nan)
        known = names(CODES, (row["code"] for row in part))
        for row in sorted(part, key=lambda row: list(known).index(row["code"])):
            each = f", each of T = {row['particles']}" if row["code"] != "loop" else ""
            ratio = f"{loop / row['seconds']:,.0f} ×" if row["code"] != "loop" else "1"
            lines.append([known[row["code"]] + each, f"{row['nodes']:,}", f"{row['edges']:,}",
                          f"{1e3 * row['seconds']:,.1f}", ratio])  # fmt: skip
    return table("one draw of q(c \\| y) | nodes | edges | ms | against the loop", lines)


def steps(rows: list[dict]) -> str:
    """A step of the bound over a step of a GCN, and in brackets of one with input dropout."""
    found = pick(rows, task="step")
    sizes = sorted({row["particles"] for row in found})
    lines = []
    for (nodes, labelled, estimator), part in grouped(
        found, "nodes", "labelled", "estimator"
    ).items():
        cells = []
        for size in sizes:
            each = [row["seconds"] for row in part if row["particles"] == size]
            ratios = [
                [s["bound"] / s[name] for name in ("GCN", "GCN, input dropout")] for s in each
            ]
            cells.append(", ".join(f"{a:.2f} ({b:.2f})" for a, b in ratios))
            cells.append(", ".join(f"{1e3 * s['bound']:.1f}" for s in each))
        who = "all" if labelled == nodes else ""
        lines.append([f"{who} {labelled:,} labelled".strip(), f"`{estimator}`", *cells])
    head = "one step of the bound / one step of a GCN | estimator"
    head += "".join(f" | T = {size} | T = {size}, ms" for size in sizes)
    return table(head, lines, left=2)


def growth(rows: list[dict]) -> str:
    lines = [
        [f"{row['nodes']:,}", f"{row['edges']:,}", f"{row['seconds']:.3f}",
         f"{row['peak'] / 1e9:.2f}", f"{row['above'] / 1e9:.3f}"]
        for row in sorted(pick(rows, task="growth"), key=lambda row: row["edges"])
    ]  # fmt: skip
    head = "nodes | edges | seconds a step | peak memory, GB | memory above start, GB"
    return table(head, lines, left=0)


def growth_rates(rows: list[dict]) -> str:
    """Exponents of a least-squares fit, and of the last step."""
    found = sorted(pick(rows, task="growth"), key=lambda row: row["edges"])
    if len(found) < 2:
        return "One size has been measured."
    edges = torch.tensor([row["edges"] for row in found], dtype=torch.double).log()
    design = torch.stack([edges, torch.ones_like(edges)], 1)
    parts = []
    for name, what in (("time", "seconds"), ("memory above start", "above")):
        values = torch.tensor([row[what] for row in found], dtype=torch.double).log()
        slope = torch.linalg.lstsq(design, values).solution[0]
        last = exponent(*found[-2:], what)
        parts.append(f"{name} grows with the exponent {slope:.2f} ({last:.2f} over the last size)")
    ends = f"{found[0]['edges']:,} to {found[-1]['edges']:,} edges"
    peak = f"{found[-1]['nodes']:,} nodes take {found[-1]['peak'] / 1e9:.1f} GB in all"
    return wrapped(f"From {ends}, {' and '.join(parts)}; {peak}.")


def scale(rows: list[dict]) -> str:
    """Queries on large graphs, each after the same at a tenth of the size."""
    lines = []
    for part in grouped(pick(rows, task="scale"), "query").values():
        part.sort(key=lambda row: row["edges"])
        for small, row in pairwise([None, *part]):
            grown = small is not None and small["edges"] < row["edges"]
            rate = f"{exponent(small, row):.2f}" if grown else ""
            lines.append([row["name"], f"{row['nodes']:,}", f"{row['edges']:,}",
                          str(row["classes"]), f"{row['seconds']:.2f}", rate,
                          f"{row['peak'] / 1e9:.2f}"])  # fmt: skip
    head = "query | nodes | edges | labels | seconds | exponent of time | peak memory, GB"
    return table(head, lines)


def tables(rows: list[dict]) -> dict[str, str]:
    return made((draws, steps, growth, growth_rates, scale), rows)
