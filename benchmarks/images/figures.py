# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The figure of spectra of samples of images, for figures.py."""

from __future__ import annotations

from math import log10
from pathlib import Path
from statistics import mean

import matplotlib.pyplot as plt

from benchmarks.images.tables import NOISE, sized, titled
from benchmarks.shared.common import grouped, pick
from benchmarks.shared.writing import Rows

#: Frequency of the last bin's end, in cycles a pixel.
NYQUIST = 0.5
#: A method and a spectrum: its name, colour and line.
LINES = {
    ("NMM", "error"): ("error of the NMM's estimate", "#000000", "-"),
    ("NMM", "sample"): ("samples of the NMM", "#0072B2", "-"),
    ("NMM", "apart"): ("its marginals, drawn apart", "#56B4E9", "--"),
    ("U-Net-widths", "error"): ("error of the U-Net with widths", "#999999", ":"),
    ("U-Net-widths", "sample"): ("samples of the U-Net with widths", "#D55E00", "-."),
}


def decibels(part: Rows, spectrum: str) -> list[float]:
    """Means over images of means over seeds, bin by bin, in dB of a squared grey level."""
    images = []
    for known in grouped(part, "image").values():
        each = [[10 * log10(p) for p in row[spectrum]] for row in known]
        images.append([mean(values) for values in zip(*each, strict=True)])
    return [mean(values) for values in zip(*images, strict=True)]


def spectra(rows: Rows, path: Path) -> None:
    """Power over frequency of errors and of samples, a panel for each set of images."""
    panels = [(t, p) for t, p in titled(sized(rows, "spectra")) if p[0]["noise"] == NOISE]
    if not panels:
        return
    size = {"figsize": (max(4.6 * len(panels), 6.4), 4.4), "layout": "constrained"}
    figure, axes = plt.subplots(1, len(panels), sharey=True, squeeze=False, **size)
    for axis, (title, every) in zip(axes[0], panels, strict=True):
        for (method, spectrum), (name, color, style) in LINES.items():
            if part := pick(every, method=method):
                values = decibels(part, spectrum)
                middles = [NYQUIST * (n + 0.5) / len(values) for n in range(len(values))]
                axis.plot(middles, values, label=name, color=color, ls=style, lw=1.6)
        axis.set(xlabel="frequency, cycles a pixel", xlim=(0, NYQUIST))
        axis.set_title(f"{title['images']}, noise {title['noise']}")
    axes[0][0].set_ylabel("power, dB of a squared grey level")
    handles, names = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    figure.savefig(path, dpi=150)
    plt.close(figure)
