# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Curves of the divergence from a random field against the seconds of a fit."""

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from benchmarks.shared.records import Files
from benchmarks.shared.tables import frame, groups, ordered

#: How names of methods begin: a colour and a marker.
FAMILIES = {
    "mean field": ("#999999", "s"),
    "chains": ("#000000", "D"),
    "windows": ("#009E73", "^"),
    "VAN": ("#CC79A7", "v"),
    "NMM, 5 x 5": ("#56B4E9", "o"),
    "NMM of half, row by row": ("#E69F00", "o"),
    "NMM of half": ("#D55E00", "o"),
    "NMM": ("#0072B2", "o"),
}


def field_seconds(files: Files) -> Figure:
    """A panel for each coupling of the narrow Ising grids; lines join the settings of a method."""
    rows = frame(row for row in files["fields_compared"] if row["task"] == "strips" and "KL" in row)
    begins = rows.method.map(lambda name: next(each for each in FAMILIES if name.startswith(each)))
    rows["family"] = ordered(begins, list(FAMILIES))
    figure, axes = plt.subplots(1, 3, sharey=True, figsize=(10.8, 4.4), layout="constrained")
    for axis, ((coupling,), part) in zip(axes, groups(rows, ["coupling"]), strict=True):
        for (family,), own in groups(part, ["family"]):
            line = own.groupby("method").agg({"seconds": "median", "KL": "mean"})
            line = line.assign(seconds=line.seconds.clip(lower=1e-2)).sort_values(["seconds", "KL"])
            color, marker = FAMILIES[family]
            axis.plot(*line.to_numpy().T, color=color, marker=marker, ms=5, lw=1.2, label=family)
        axis.set(xscale="log", yscale="log", xlabel="seconds, one thread")
        axis.set_title(f"coupling {coupling}", fontsize=10)
    axes[0].set_ylabel("KL divergence, nats (12 x 40 pixels)")
    figure.legend(handles=axes[0].lines, loc="outside lower center", ncols=4, frameon=False)
    return figure


FIGURES = (field_seconds,)
