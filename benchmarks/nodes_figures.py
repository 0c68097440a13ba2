# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Figures of nodes.py's results, for report.py."""

from __future__ import annotations

from pathlib import Path
from statistics import mean, stdev

import matplotlib.pyplot as plt
from common import GRAPHS, pick
from nodes_runs import Runs, label

COLORS = ("#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7")


def figures(rows: list[dict], path: Path) -> None:
    sizes_figure(Runs(pick(rows, task="sizes")), path)
    public = pick(rows, task="accuracy", backbone="gcn")
    convergence_figure(Runs([row for row in public if "curve" in row]), path)


def panels(runs: Runs, width: float):
    """One axis a graph."""
    graphs = runs.values("dataset", GRAPHS)
    size = {"figsize": (width * len(graphs), 3.6), "layout": "constrained"}
    figure, axes = plt.subplots(1, len(graphs), squeeze=False, **size)
    return figure, list(zip(axes[0], graphs, strict=True))


def sizes_figure(runs: Runs, path: Path) -> None:
    """
    Accuracy over training sizes, where a method has the splits that the others share; a
    temperature changes none, so its rows coincide. Dashes are what is fitted on top of a model.
    """
    if not runs.rows:
        return
    figure, places = panels(runs, 4.8)
    first = list(dict.fromkeys(m.split(", ")[0] for m in runs.methods))
    for axis, dataset in places:
        for kind in runs.part(dataset=dataset).values("backbone"):
            part = runs.part(dataset=dataset, backbone=kind)
            for method in part.methods:
                points = {}
                for ratio in part.values("ratio"):
                    values, fewer = part.part(ratio=ratio).paired("test.accuracy", method)
                    if len(values) > 1 and not fewer:
                        points[ratio] = list(values.values())
                if "temperature" in method or not points:
                    continue
                name, _, more = method.partition(", ")
                means = [100 * mean(v) for v in points.values()]
                errors = [100 * stdev(v) / len(v) ** 0.5 for v in points.values()]
                looks = {"marker": "o", "ms": 3, "capsize": 2, "lw": 1, "ls": ":" if more else "-"}
                looks["color"] = COLORS[first.index(name) % len(COLORS)]
                axis.errorbar(list(points), means, errors, label=label(method, kind), **looks)
        axis.set(xlabel="share of training nodes", ylabel="test accuracy, %")
        axis.set(title=f"{GRAPHS.get(dataset, dataset)}, ± one standard error")
    places[0][0].legend(frameon=False, fontsize=7)
    figure.savefig(path / "training_size.png", dpi=150)
    plt.close(figure)


def convergence_figure(runs: Runs, path: Path) -> None:
    """Validation accuracy over the epochs of the first seed, with a GCN."""
    if not runs.rows:
        return
    figure, places = panels(runs, 4)
    for axis, dataset in places:
        for row in pick(runs.rows, dataset=dataset):
            curve = [100 * value for value in row["curve"]]
            color = COLORS[runs.methods.index(row["method"]) % len(COLORS)]
            name = label(row["method"], "gcn")
            axis.plot(range(1, len(curve) + 1), curve, lw=1, label=name, color=color)
        axis.set(xlabel="epoch", ylabel="validation accuracy, %", ylim=(50, None))
        axis.set(title=GRAPHS.get(dataset, dataset))
    places[0][0].legend(frameon=False, fontsize=8, loc="lower right")
    figure.savefig(path / "convergence.png", dpi=150)
    plt.close(figure)
