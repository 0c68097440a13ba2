# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The figures of docs/results/nodes.md."""

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from pandas import Series

from benchmarks.nodes.run import METHODS
from benchmarks.nodes.tables import runs
from benchmarks.shared.records import Files
from benchmarks.shared.tables import groups

COLORS = dict(zip(METHODS, ("#E69F00", "#56B4E9", "#009E73", "#0072B2"), strict=True))


def training_size(files: Files) -> Figure:
    """Accuracy over training sizes, mean ± one standard error, a panel a graph and backbone."""
    rows = runs(files, "sizes")
    rows = rows[~rows["method"].str.endswith("temperature")]  # which changes no prediction
    graphs, kinds = ([name for (name,), _ in groups(rows, [k])] for k in ("graph", "backbone"))
    size = {"figsize": (4 * len(kinds), 3.2 * len(graphs) + 0.6), "layout": "constrained"}
    figure, axes = plt.subplots(len(graphs), len(kinds), squeeze=False, sharey="row", **size)
    for (graph, kind), part in groups(rows, ["graph", "backbone"]):
        axis = axes[graphs.index(graph), kinds.index(kind)]
        for (model,), lines in groups(part, ["model"]):
            hits = 100 * lines.groupby("ratio")["accuracy"].agg(["mean", "sem"])
            method = model.removeprefix("StackedNMM on ")
            looks = {"fmt": "o-" if model == method else "s:", "color": COLORS[method]}
            axis.errorbar(hits.index, *hits.T.values, ms=3, capsize=2, lw=1, label=model, **looks)
        title = f"{graph}, {kind}: {part['seed'].nunique()} splits, ± 1 standard error"
        axis.set_title(title, fontsize=9)
        axis.set(xlabel="share of training nodes", xticks=part["ratio"].unique())
        axes[graphs.index(graph), 0].set_ylabel("test accuracy, %")
    for axis in axes.flat:
        axis.set_visible(axis.has_data())
    looks = {"frameon": False, "fontsize": 9, "ncols": 4}
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", **looks)
    return figure


def convergence(files: Files) -> Figure:
    """Validation accuracy over the epochs of the first seed, with a GCN."""
    rows = runs(files, "accuracy").dropna(subset=["curve"])
    graphs = list(groups(rows[rows["backbone"] == "GCN"], ["graph"]))
    size = {"figsize": (4 * len(graphs), 3.6), "layout": "constrained"}
    figure, axes = plt.subplots(1, len(graphs), squeeze=False, **size)
    for axis, ((graph,), part) in zip(axes[0], graphs, strict=True):
        for (model,), lines in groups(part, ["model"]):
            curve = 100 * Series(lines["curve"].iloc[0])
            axis.plot(curve.index + 1, curve, lw=1, label=model, color=COLORS[model])
        axis.set(title=graph, xlabel="epoch", ylabel="validation accuracy, %", ylim=(50, None))
    axes[0, 0].legend(frameon=False, fontsize=8, loc="lower right")
    return figure


FIGURES = training_size, convergence
