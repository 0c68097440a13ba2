# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Curves of docs/choosing.md: how many samples, how large a graph."""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt

from benchmarks.scale.speed_tables import by_edges
from benchmarks.shared.common import grouped, pick
from benchmarks.shared.writing import Rows

COLORS = {"reward_to_go": "#D55E00", "one_step_credit": "#0072B2", "no_score": "#009E73"}
COLORS |= {False: "#0072B2", True: "#D55E00"}
QUERIES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")


def samples(rows: Rows, path: Path) -> None:
    """Noise of a gradient, errors of marginals and of the likelihood, over the number of draws."""
    figure, axes = plt.subplots(1, 3, figsize=(11, 4.6), layout="constrained")
    sizes = sorted({row["labelled"] for row in rows})

    def curve(axis, part: Rows, over: str, what: str, kind, name: str, unit: float = 1) -> None:
        labelled = part[0]["labelled"]
        style = ("-", "--", ":")[min(sizes.index(labelled), 2)]
        looks = {
            "color": COLORS.get(kind, "#0072B2"),
            "ls": style,
            "marker": "o",
            "ms": 3,
            "lw": 1.2,
        }
        label = f"{name}{labelled:,} labels"
        axis.plot(
            [row[over] for row in part], [row[what] / unit for row in part], label=label, **looks
        )

    parts = grouped(pick(rows, task="gradients"), "labelled", "estimator")
    for (_, kind), part in parts.items():
        curve(axes[0], part, "particles", "sd", kind, f"{kind}, ")
    axes[0].set(xlabel="particles a step", ylabel="standard deviation of the gradient")
    parts = grouped(pick(rows, task="marginals"), "labelled", "weighted")
    for (_, heavy), part in parts.items():
        curve(axes[1], part, "draws", "error", heavy, f"{'weighted' if heavy else 'equal'}, ")
    axes[1].set(xlabel="draws of the posterior", ylabel="error of marginals, total variation")
    for (labelled,), part in grouped(pick(rows, task="likelihood"), "labelled").items():
        part = [row for row in part if row["particles"]]
        curve(axes[2], part, "particles", "sd", None, "", labelled)
    axes[2].set(xlabel="particles", ylabel="sd of log p, nats a labelled node")
    for axis in axes:
        axis.set(xscale="log", yscale="log")
        axis.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.2))
    figure.savefig(path, dpi=150)
    plt.close(figure)


def growth(rows: Rows, path: Path) -> None:
    """Seconds and memory of a step and of queries, over edges."""
    figure, axes = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    steps = [row | {"query": "step", "name": "a step of the bound, all nodes labelled"}
             for row in pick(rows, task="growth")]  # fmt: skip
    parts = grouped([*steps, *pick(rows, task="scale")], "query").values()
    for number, part in enumerate(part for part in parts if len(part) > 1):
        part = by_edges(part)
        edges, name = [row["edges"] for row in part], part[-1]["name"]
        looks = {"color": QUERIES[number % len(QUERIES)], "marker": "o", "ms": 3, "lw": 1.2}
        looks["ls"] = ("-", "--")[number // len(QUERIES) % 2]
        axes[0].plot(edges, [row["seconds"] for row in part], label=name, **looks)
        axes[1].plot(edges, [row["peak"] / 1e9 for row in part], **looks)
    axes[0].set(xscale="log", yscale="log", xlabel="edges", ylabel="seconds")
    axes[1].set(
        xscale="log", xlabel="edges", ylabel="peak memory of the process, GB", ylim=(0, None)
    )
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=7)
    figure.savefig(path, dpi=150)
    plt.close(figure)
