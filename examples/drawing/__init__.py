# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Pictures of the examples, a file each; and what they share."""

from __future__ import annotations

from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import torch
from torch import Tensor

#: Orange, blue, green and pink of Okabe and Ito.
ORANGE, BLUE, GREEN, PINK = "#E69F00", "#0072B2", "#009E73", "#CC79A7"
VERMILION = "#D55E00"
#: Okabe and Ito's palette for up to seven labels, extended by grey, black and a wine red.
PALETTE = (ORANGE, "#56B4E9", GREEN, "#F0E442", BLUE, VERMILION, PINK, "#999999", "#000000",
           "#882255")  # fmt: skip


def canvas(rows: int, columns: int, size: tuple[float, float], font: int = 10, **style):
    """A figure and its axes, without lines on top and on the right by default."""
    matplotlib.use("Agg")
    lines = dict.fromkeys(("axes.spines.top", "axes.spines.right"), style.pop("box", False))
    plt.rcParams.update({"font.size": font} | lines)
    return plt.subplots(rows, columns, figsize=size, layout="constrained", **style)


def save(figure, path: Path, **style) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, **style)
    plt.close(figure)
    print(f"picture: {path}")


def reliability(axis, probs: Tensor, y: Tensor, color: str, label: str, bins: int = 10) -> None:
    """Accuracy over confidence in bins of equally many nodes."""
    confidence, prediction = probs.max(-1)
    hit = (prediction == y).double()
    parts = confidence.argsort().chunk(bins)
    x = torch.stack([confidence[part].mean() for part in parts])
    share = torch.stack([hit[part].mean() for part in parts])
    error = (share * (1 - share) / torch.tensor([len(part) for part in parts])).sqrt()
    axis.errorbar(x, share, error, fmt="o-", ms=4, capsize=2, color=color, label=label)


def diagonal(axis, low: float = 1.0) -> float:
    """Where accuracy equals confidence; returns the least value shown."""
    low = min(axis.get_xlim()[0], axis.get_ylim()[0], low)
    axis.plot([low, 1], [low, 1], color="0.7", lw=1, zorder=0)
    return low
