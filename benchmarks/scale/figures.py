# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The figures of docs/results/speed.md."""

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from benchmarks.shared.records import Files
from benchmarks.shared.tables import frame, groups

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
LOOKS = {"marker": "o", "ms": 3, "lw": 1.2}
#: By task: what is drawn over what, for each of what; and its name.
PANELS = {
    "gradients": ("sd", "particles", "estimator", "standard deviation of the gradient"),
    "marginals": ("error", "draws", "weighted", "error of marginals, total variation"),
    "likelihood": ("relative", "particles", "task", "sd of log p, nats a labelled node"),
}


def samples(files: Files) -> Figure:
    """Noise of a gradient, errors of marginals and of the likelihood, over the number of draws."""
    rows = frame(files["samples"])
    rows["relative"] = rows["sd"] / rows["labelled"]
    rows["weighted"] = rows["weighted"].map({False: "equal weights", True: "weighted"})
    figure, axes = plt.subplots(1, 3, figsize=(11, 4.6), layout="constrained")
    for axis, (task, (what, over, each, name)) in zip(axes, PANELS.items(), strict=True):
        part = rows[(rows["task"] == task) & (rows[over] > 0)]
        curves = part.pivot(index=over, columns=[each, "labelled"], values=what)
        curves.columns = [f"{kind}, {labelled:,} labels" for kind, labelled in curves]
        kinds = part[each].nunique()
        looks = LOOKS | {"color": PALETTE[:kinds] * 2, "style": ["-"] * kinds + ["--"] * kinds}
        curves.plot(ax=axis, loglog=True, ylabel=name, **looks)
        axis.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.2))
    return figure


def growth(files: Files) -> Figure:
    """Seconds and memory of a step and of queries, over edges."""
    rows = frame([row for row in files["speed"] if row["task"] in ("growth", "scale")])
    rows = rows.fillna({"query": "step", "name": "a step of the bound"})
    figure, axes = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    for number, (_, part) in enumerate(groups(rows, ["query"])):
        part = part.sort_values("edges")
        looks = LOOKS | {"color": PALETTE[number % 7], "ls": ("-", "--")[number // 7]}
        axes[0].plot(part["edges"], part["seconds"], label=part["name"].iloc[-1], **looks)
        axes[1].plot(part["edges"], part["peak"] / 1e9, **looks)
    axes[0].set(xlabel="edges", xscale="log", ylabel="seconds", yscale="log")
    axes[1].set(xlabel="edges", xscale="log", ylabel="peak memory, GB", ylim=(0, None))
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=7)
    return figure


FIGURES = samples, growth
