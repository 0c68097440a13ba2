# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The figure of docs/results/links.md."""

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from benchmarks.links.tables import THEIRS, compared
from benchmarks.shared.records import Files
from benchmarks.shared.tables import groups


def link_bound(files: Files) -> Figure:
    """The evidence lower bound on NIPS12 over the steps: each split, and their mean."""
    rows = compared(files)
    rows = rows[rows["graph"] == "NIPS12"]
    figure, axis = plt.subplots(figsize=(5, 3.6), layout="constrained")
    for (guide,), part in groups(rows, ["method"]):
        color = "#D55E00" if guide == THEIRS else "#0072B2"
        values = -np.array(part["curve"].tolist())
        steps = 10 * np.arange(1, values.shape[1] + 1)
        axis.plot(steps, values.T, color=color, lw=0.4, alpha=0.4)
        axis.plot(steps, values.mean(0), color=color, lw=1.8, label=guide)
    every = -np.array(rows["curve"].tolist())
    low = every[:, every.shape[1] // 8].min()  # the first steps are far below the others
    axis.set(xlabel="step", ylabel="evidence lower bound, nats per pair of nodes")
    axis.set(title=f"NIPS12, {len(values)} splits and their mean", ylim=(low, every.max() + 0.005))
    axis.legend(frameon=False, loc="lower right")
    return figure


FIGURES = (link_bound,)
