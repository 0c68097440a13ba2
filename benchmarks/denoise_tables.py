# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The tables and the figure of denoising.py's results, for report.py."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from statistics import mean

import matplotlib.pyplot as plt
from link_tables import difference

SETS = {"bsds300": "BSD300", "kodak24": "Kodak24"}
METHODS = {"U-Net": "U-Net, squared error", "U-Net-log": "U-Net, log of it", "NMM": "NMM"}
COLORS = {"U-Net": "#D55E00", "U-Net-log": "#E69F00", "NMM": "#0072B2"}
#: Decibels in the paper's table of image denoising.
PAPER = {("bsds300", "U-Net"): "30.28", ("kodak24", "U-Net"): "31.07",
         ("bsds300", "NMM"): "30.33", ("kodak24", "NMM"): "31.55"}  # fmt: skip


def tested(rows: list[dict], dataset: str) -> dict[str, dict[tuple, dict]]:
    """Of every method, the rows of the images and seeds that all methods have been tested on."""
    found: dict[str, dict[tuple, dict]] = {}
    for row in rows:
        if row["task"] == "test" and row["dataset"] == dataset:
            found.setdefault(row["method"], {})[row["seed"], row["image"]] = row
    if "U-Net" not in found:  # nothing to compare with
        return {}
    shared = set.intersection(*(set(part) for part in found.values()))
    return {m: {k: part[k] for k in part if k in shared} for m, part in found.items()}


def by_image(part: dict[tuple, dict], field: str) -> list[float]:
    """Means over seeds, images in the order of their names."""
    images = sorted({image for _, image in part})
    return [mean(row[field] for (_, i), row in part.items() if i == image) for image in images]


def denoised(rows: list[dict], table: Callable[..., str]) -> str:
    """Means over images, and differences from the U-Net paired by image."""
    lines = []
    for dataset, name in SETS.items():
        found = tested(rows, dataset)
        for method in (m for m in METHODS if m in found):
            cells = []
            for field, digits in (("PSNR", 2), ("log p", 3)):
                ours, base = by_image(found[method], field), by_image(found["U-Net"], field)
                cells.append(f"{mean(ours):.{digits}f}")
                both = list(zip(base, ours, strict=True))
                cells.append(difference(both, digits) if method != "U-Net" else "")
            tails = "log p, logistic"
            cells.append(f"{mean(by_image(found[method], tails)):.3f}" if method != "NMM" else "")
            cells.append(f"{100 * mean(by_image(found[method], 'coverage')):.1f} %")
            cells.append(f"{mean(by_image(found[method], 'length')):.1f}")
            lines.append([name, METHODS[method], *cells, PAPER.get((dataset, method), "")])
    head = ["images", "method", "PSNR, dB", "gain", "log p", "gain", "logistic log p",
            "in 90 % intervals", "their length", "PSNR in the paper"]  # fmt: skip
    return table(head, lines, left=2)


def denoising_cost(rows: list[dict], table: Callable[..., str]) -> str:
    lines = []
    for row in rows:
        if row["task"] == "cost":
            cells = [f"{1e3 * value:.0f}" for value in row["seconds"].values()]
            memory = [f"{value:.0f}" for value in row["MiB"].values()]
            patches = row["settings"]["batch_size"]
            lines.append([f"{patches} patches", *cells, f"{row['ratio']:.2f}", *memory])
    head = ["a step", "U-Net, ms", "NMM, ms", "ratio", "U-Net, MiB", "NMM, MiB"]
    return table(head, lines)


def curves_figure(rows: list[dict], path: Path) -> None:
    """Validation PSNR over steps, each seed a line."""
    figure, axis = plt.subplots(figsize=(5.4, 3.6), layout="constrained")
    watched = [row for row in rows if row["task"] == "train"]
    for method, seed in itertools.product(METHODS, sorted({r["seed"] for r in watched})):
        part = [r for r in watched if r["seed"] == seed]
        points = sorted((r["step"], r["PSNR"]) for r in part if r["method"] == method)
        if method != "U-Net" and points:
            trunk = sorted((r["step"], r["PSNR"]) for r in part if r["method"] == "trunk")
            points = (trunk if method == "U-Net-log" else trunk[-1:]) + points
        if points:
            label = METHODS[method] if seed == 0 else None
            axis.plot(*zip(*points, strict=True), color=COLORS[method], marker="o", ms=3, lw=1.2,
                      label=label)  # fmt: skip
    axis.set(xlabel="step", ylabel="PSNR on validation images, dB")
    if axis.lines:
        axis.legend(frameon=False, loc="lower right")
        figure.savefig(path / "denoising_steps.png", dpi=150)
    plt.close(figure)
