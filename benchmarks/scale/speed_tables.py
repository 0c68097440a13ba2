# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The tables of speed.py's results, for report.py."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from statistics import linear_regression

from benchmarks.shared.common import grouped, pick, wrapped
from benchmarks.shared.writing import Rows, made, sections

CODES = {
    "loop": "loop over nodes in PyTorch",
    "compiled": "compiled loops (CPU, numba)",
    "sweeps": "tensor code (any device)",
}


def tables(rows: Rows) -> dict[str, str]:
    return made({draws: 1, steps: 2, growth: 0, growth_rates: 0, scale: 1, evidence_steps: 2}, rows)


def exponent(small: dict, row: dict, what: str = "seconds") -> float:
    """Of growth with the edges."""
    return math.log(row[what] / small[what]) / math.log(row["edges"] / small["edges"])


def by_edges(rows: Rows) -> Rows:
    return sorted(rows, key=lambda row: row["edges"])


def draws(rows: Rows) -> Iterator[dict]:
    """One draw of q(c | y), against a loop over nodes."""
    for part in grouped(pick(rows, task="draw"), "device", "threads", "nodes").values():
        loop = next((row["seconds"] for row in pick(part, code="loop")), math.nan)
        for (code,), found in sections(part, code=CODES).items():
            for row in found:
                alone = row["code"] == "loop"
                yield {
                    "one draw of q(c \\| y)": code
                    + f", each of T = {row['particles']}" * (not alone),
                    "nodes": f"{row['nodes']:,}",
                    "edges": f"{row['edges']:,}",
                    "ms": f"{1e3 * row['seconds']:,.1f}",
                    "against the loop": "1" if alone else f"{loop / row['seconds']:,.0f} ×",
                }


def steps(rows: Rows) -> Iterator[dict]:
    """A step of the bound over a step of a GCN, and in brackets of one with input dropout."""
    found = pick(rows, task="step")
    for (nodes, labelled, estimator), part in grouped(
        found, "nodes", "labelled", "estimator"
    ).items():
        who = f"{'all ' * (labelled == nodes)}{labelled:,} labelled"
        line = {"one step of the bound / one step of a GCN": who, "estimator": f"`{estimator}`"}
        for (size,) in sections(found, particles=None):
            ratios, times = [], []
            for seconds in (row["seconds"] for row in pick(part, particles=size)):
                plain, dropout = (
                    seconds["bound"] / seconds[n] for n in ("GCN", "GCN, input dropout")
                )
                ratios.append(f"{plain:.2f} ({dropout:.2f})")
                times.append(f"{1e3 * seconds['bound']:.1f}")
            line |= {f"T = {size}": ", ".join(ratios), f"T = {size}, ms": ", ".join(times)}
        yield line


def growth(rows: Rows) -> Iterator[dict]:
    """Time and memory of a step, by the size of the graph."""
    for row in by_edges(pick(rows, task="growth")):
        yield {
            "nodes": f"{row['nodes']:,}",
            "edges": f"{row['edges']:,}",
            "seconds a step": f"{row['seconds']:.3f}",
            "peak memory, GB": f"{row['peak'] / 1e9:.2f}",
            "memory above start, GB": f"{row['above'] / 1e9:.3f}",
        }


def growth_rates(rows: Rows) -> str:
    """Exponents of a least-squares fit, and of the last step."""
    found = by_edges(pick(rows, task="growth"))
    if len(found) < 2:
        return "One size has been measured."
    rates = []
    for name, what in (("time", "seconds"), ("memory above start", "above")):
        edges, values = ([math.log(row[field]) for row in found] for field in ("edges", what))
        slope, last = linear_regression(edges, values).slope, exponent(*found[-2:], what)
        rates.append(f"{name} grows with the exponent {slope:.2f} ({last:.2f} over the last size)")
    first, last = found[0], found[-1]
    return wrapped(
        f"From {first['edges']:,} to {last['edges']:,} edges, {' and '.join(rates)}; "
        f"{last['nodes']:,} nodes take {last['peak'] / 1e9:.1f} GB in all."
    )


def scale(rows: Rows) -> Iterator[dict]:
    """Queries on large graphs, each after the same at a tenth of the size."""
    for part in grouped(pick(rows, task="scale"), "query").values():
        for small, row in pairwise([None, *by_edges(part)]):
            grown = small is not None and small["edges"] < row["edges"]
            yield {
                "query": row["name"],
                "nodes": f"{row['nodes']:,}",
                "edges": f"{row['edges']:,}",
                "labels": f"{row['classes']}",
                "seconds": f"{row['seconds']:.2f}",
                "exponent of time": f"{exponent(small, row):.2f}" if grown else "",
                "peak memory, GB": f"{row['peak'] / 1e9:.2f}",
            }


def evidence_steps(rows: Rows) -> Iterator[dict]:
    """A step of the bound where labels are latent over one where they are observed."""
    for row in pick(rows, task="evidence"):
        observed, latent = (row["seconds"][name] for name in ("observed", "evidence"))
        yield {
            "step with evidence / with observed labels": f"{row['nodes']:,} nodes, "
            f"{row['edges']:,} edges, {row['classes']} labels, T = {row['particles']}",
            "estimator": f"`{row['estimator']}`",
            "observed, ms": f"{1e3 * observed:.1f}",
            "evidence, ms": f"{1e3 * latent:.1f}",
            "ratio": f"{latent / observed:.2f}",
        }
