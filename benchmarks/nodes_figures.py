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
    figure, axes = plt.subplots(1, len(graphs), figsize=(width * len(graphs), 3.6),
                                layout="constrained", squeeze=False)  # fmt: skip
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
                points = {ratio: part.part(ratio=ratio).paired("test.accuracy", method)
                          for ratio in part.values("ratio")}  # fmt: skip
                points = {r: list(v.values()) for r, (v, fewer) in points.items() if not fewer}
                points = {r: v for r, v in points.items() if len(v) > 1}
                if "temperature" in method or not points:
                    continue
                name, _, more = method.partition(", ")
                means = [100 * mean(v) for v in points.values()]
                errors = [100 * stdev(v) / len(v) ** 0.5 for v in points.values()]
                axis.errorbar(
                    list(points), means, errors, marker="o", ms=3, capsize=2, lw=1,
                    label=label(method, kind), ls=":" if more else "-",
                    color=COLORS[first.index(name) % len(COLORS)],
                )  # fmt: skip
        axis.set(xlabel="share of training nodes", ylabel="test accuracy, %",
                 title=f"{GRAPHS.get(dataset, dataset)}, ± one standard error")  # fmt: skip
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
            axis.plot(range(1, len(curve) + 1), curve, lw=1, label=label(row["method"], "gcn"),
                      color=COLORS[runs.methods.index(row["method"]) % len(COLORS)])  # fmt: skip
        axis.set(xlabel="epoch", ylabel="validation accuracy, %",
                 title=GRAPHS.get(dataset, dataset), ylim=(50, None))  # fmt: skip
    places[0][0].legend(frameon=False, fontsize=8, loc="lower right")
    figure.savefig(path / "convergence.png", dpi=150)
    plt.close(figure)
