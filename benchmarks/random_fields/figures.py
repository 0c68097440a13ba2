# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Curves of the divergence from a random field against the seconds that it takes to get there."""

from __future__ import annotations

from pathlib import Path
from statistics import mean, median

import matplotlib.pyplot as plt

from benchmarks.shared.common import grouped
from benchmarks.shared.writing import Rows

#: By how a method's name begins: what the legend says, a colour and a marker.
FAMILIES = {
    "mean field": ("mean field", "#999999", "s"),
    "chains": ("mean field of chains", "#000000", "D"),
    "windows": ("windows, 3 to 7 wide", "#009E73", "^"),
    "VAN": ("VAN", "#CC79A7", "v"),
    "NMM, 5 x 5": ("NMM, 5 x 5", "#56B4E9", "o"),
    "NMM of half, row by row": ("the same, row by row", "#E69F00", "o"),
    "NMM of half": ("NMM of half of the pixels", "#D55E00", "o"),
    "NMM": ("NMM", "#0072B2", "o"),
}


def family(method: str) -> str:
    return next(name for name in FAMILIES if method.startswith(name))


def field_seconds(rows: Rows, path: Path) -> None:
    """A panel for each coupling of the narrow Ising grids; lines join one method's settings."""
    known = [r for r in rows if r["task"] == "strips" and "KL" in r and r["KL"] > 0]
    if not known:
        return
    couplings = sorted({row["coupling"] for row in known})
    size = {"figsize": (3.6 * len(couplings), 4.4), "layout": "constrained"}
    figure, axes = plt.subplots(1, len(couplings), squeeze=False, sharey=True, **size)
    for axis, coupling in zip(axes[0], couplings, strict=True):
        points: dict[str, list[tuple[float, float]]] = {}
        part = [row for row in known if row["coupling"] == coupling]
        for (method,), each in grouped(part, "method").items():
            seconds = max(median(row["seconds"] for row in each), 1e-2)
            points.setdefault(family(method), []).append((seconds, mean(r["KL"] for r in each)))
        for name, found in points.items():
            label, color, marker = FAMILIES[name]
            looks = {"color": color, "marker": marker, "ms": 5, "lw": 1.2, "label": label}
            axis.plot(*zip(*sorted(found), strict=True), **looks)
        axis.set(xscale="log", yscale="log", xlabel="seconds, one thread")
        axis.set_title(f"coupling {coupling}", fontsize=10)
    axes[0][0].set_ylabel("KL divergence, nats (12 x 40 pixels)")
    handles = dict(zip(*axes[0][-1].get_legend_handles_labels()[::-1], strict=True))
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)
