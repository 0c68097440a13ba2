# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The tables and the figure of denoising.py's results, for report.py."""

from __future__ import annotations

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


def by_image(rows: list[dict], field: str, **key) -> dict[str, float]:
    """Values of every image, means over seeds."""
    part = [r for r in rows if r["task"] == "test" and all(r[k] == v for k, v in key.items())]
    return {name: mean(r[field] for r in part if r["image"] == name)
            for name in {r["image"]: None for r in part}}  # fmt: skip


def denoised(rows: list[dict], table: Callable[..., str]) -> str:
    """Means over images, and differences from the U-Net paired by image."""
    lines = []
    for dataset, name in SETS.items():
        for method, label in METHODS.items():
            cells = []
            for field, digits in (("PSNR", 2), ("log p", 3)):
                ours = by_image(rows, field, dataset=dataset, method=method)
                base = by_image(rows, field, dataset=dataset, method="U-Net")
                both = [(base[image], ours[image]) for image in base if image in ours]
                cells.append(f"{mean(ours.values()):.{digits}f}" if ours else "")
                gain = difference(both, digits) if method != "U-Net" and both else ""
                cells.append(gain)
            inside = by_image(rows, "coverage", dataset=dataset, method=method).values()
            cells.append(f"{100 * mean(inside):.1f} %" if inside else "")
            if inside:
                lines.append([name, label, *cells, PAPER.get((dataset, method), "")])
    head = ["images", "method", "PSNR, dB", "gain", "log p, nats a value", "gain",
            "in 90 % intervals", "PSNR in the paper"]  # fmt: skip
    return table(head, lines, left=2)


def denoising_cost(rows: list[dict], table: Callable[..., str]) -> str:
    lines = []
    for row in rows:
        if row["task"] == "cost":
            cells = [f"{1e3 * value:.0f}" for value in row["seconds"].values()]
            memory = [f"{value:.0f}" for value in row["MiB"].values()]
            lines.append([f"{row['patches']} patches", *cells, f"{row['ratio']:.2f}", *memory])
    head = ["a step", "U-Net, ms", "NMM, ms", "ratio", "U-Net, MiB", "NMM, MiB"]
    return table(head, lines)


def curves_figure(rows: list[dict], path: Path) -> None:
    """Validation PSNR over steps, each seed a line."""
    figure, axis = plt.subplots(figsize=(5.4, 3.6), layout="constrained")
    for method, label in METHODS.items():
        part = [r for r in rows if r["task"] == "train" and r["method"] == method]
        for seed in sorted({r["seed"] for r in part}):
            points = sorted((r["step"], r["PSNR"]) for r in part if r["seed"] == seed)
            axis.plot(*zip(*points, strict=True), color=COLORS[method], marker="o", ms=3, lw=1.2,
                      label=label if seed == 0 else None)  # fmt: skip
    axis.set(xlabel="step", ylabel="PSNR on validation images, dB")
    if axis.lines:
        axis.legend(frameon=False, loc="lower right")
        figure.savefig(path / "denoising_steps.png", dpi=150)
    plt.close(figure)
