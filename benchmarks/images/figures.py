# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The figures of docs/results/denoising.md."""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from benchmarks.images.scores import BINS, NYQUIST
from benchmarks.images.tables import DRAWN, stored
from benchmarks.shared.records import Files
from benchmarks.shared.tables import groups


def denoising_steps(files: Files) -> Figure:
    """PSNR of the longest trained networks on validation images, over steps."""
    rows = stored(files, "train").sort_values("step")
    rows = rows[(rows["network"] == rows["network"].min()) & (rows["seed"] == 0)]
    trunk = rows[rows["method"] == "trunk"]
    figure, axis = plt.subplots(figsize=(5.4, 3.6), layout="constrained")
    for (method,), part in groups(rows, ["method"]):
        if part["step"].min() > trunk["step"].max():  # it starts where the trunk ends
            part = pd.concat([trunk.tail(1), part])
        axis.plot(part["step"], part["PSNR"], label=method, marker="o", ms=3, lw=1.2)
    axis.set(xlabel="step", ylabel="PSNR on validation images, dB")
    axis.legend(frameon=False, loc="lower right")
    return figure


def denoising_spectra(files: Files) -> Figure:
    """Power of errors and of samples over frequency, on average over images."""
    rows = stored(files, "spectra")
    frequency = NYQUIST * (np.arange(BINS) + 0.5) / BINS
    figure, axis = plt.subplots(figsize=(6.4, 4.4), layout="constrained")
    for number, ((method,), part) in enumerate(groups(rows, ["method"])):
        for name, style in {"error": "-", "sample": "--", "apart": ":"}.items():
            decibels, label = 10 * np.log10(np.stack(part[name])).mean(0), DRAWN[name]
            axis.plot(frequency, decibels, style, color=f"C{number}", label=f"{method}, {label}")
    axis.set(xlabel="frequency, cycles per pixel", ylabel="power, dB of a squared grey level")
    axis.set_title(" and ".join(rows["images"].unique()))
    axis.legend(frameon=False)
    return figure


FIGURES = denoising_steps, denoising_spectra
