# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Figures of node_classification.py's results, for report.py."""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
from runs import GRAPHS, Runs, label, mean, sd

COLORS = ("#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7")


def panels(runs: Runs, width: float):
    """One axis a graph."""
    graphs = runs.values("dataset", GRAPHS)
    figure, axes = plt.subplots(1, len(graphs), figsize=(width * len(graphs), 3.6),
                                layout="constrained", squeeze=False)  # fmt: skip
    return figure, list(zip(axes[0], graphs, strict=True))


def looks(method: str, first: list[str]) -> dict:
    """A color for each trained model, dashes for what is fitted on top of it."""
    name, _, more = method.partition(", ")
    return {"color": COLORS[first.index(name) % len(COLORS)], "ls": ":" if more else "-"}


def sizes_figure(runs: Runs, path: Path) -> None:
    """
    Accuracy over training sizes, where a method has the splits that the others share; a
    temperature changes none, so its rows coincide.
    """
    if not runs.rows:
        return
    figure, places = panels(runs, 4.8)
    first = list(dict.fromkeys(m.split(", ")[0] for m in runs.methods()))
    for axis, dataset in places:
        for kind in runs.values("backbone", (), dataset=dataset):
            for method in runs.methods(dataset=dataset, backbone=kind):
                key = {"dataset": dataset, "backbone": kind}
                points = {r: runs.paired("test.accuracy", method, ratio=r, **key)
                          for r in runs.values("ratio", (), **key)}  # fmt: skip
                points = {r: v for r, (v, fewer) in points.items() if len(v) > 1 and not fewer}
                if "temperature" in method or not points:
                    continue
                errors = [100 * sd(v) / len(v) ** 0.5 for v in points.values()]
                axis.errorbar(list(points), [100 * mean(v) for v in points.values()], errors,
                              marker="o", ms=3, capsize=2, lw=1, label=label(method, kind),
                              **looks(method, first))  # fmt: skip
        axis.set(xlabel="share of training nodes", ylabel="test accuracy, %",
                 title=f"{GRAPHS.get(dataset, dataset)}, ± one standard error")  # fmt: skip
    places[0][0].legend(frameon=False, fontsize=7)
    figure.savefig(path / "training_size.png", dpi=150)
    plt.close(figure)


def convergence_figure(runs: Runs, path: Path) -> None:
    """Validation accuracy over the epochs of the first seed, with a GCN."""
    kept = Runs([row for row in runs.rows if "curve" in row and row["backbone"] == "gcn"])
    if not kept.rows:
        return
    figure, places = panels(kept, 4)
    first = kept.methods()
    for axis, dataset in places:
        for row in kept.block(dataset=dataset):
            curve = [100 * value for value in row["curve"]]
            axis.plot(range(1, len(curve) + 1), curve, lw=1, label=label(row["method"], "gcn"),
                      color=looks(row["method"], first)["color"])  # fmt: skip
        axis.set(xlabel="epoch", ylabel="validation accuracy, %",
                 title=GRAPHS.get(dataset, dataset), ylim=(50, None))  # fmt: skip
    places[0][0].legend(frameon=False, fontsize=8, loc="lower right")
    figure.savefig(path / "convergence.png", dpi=150)
    plt.close(figure)
