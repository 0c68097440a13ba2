# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Labels of nodes in a plane, and accuracies of annotators."""

from __future__ import annotations

import matplotlib
import matplotlib.pyplot as plt
import torch
from sklearn.manifold import TSNE
from torch import Tensor

from drawing import BLUE, PALETTE, VERMILION, canvas, save

COLORS = matplotlib.colors.ListedColormap(PALETTE)
LABELS = {"cmap": COLORS, "vmin": 0, "vmax": len(PALETTE), "lw": 0}


def draw_digits(output, x, y, probs: dict, rates: dict, quality) -> None:
    """Wrong digits of every method, and the accuracy of every annotator."""
    places = torch.from_numpy(TSNE(init="pca", random_state=0).fit_transform(x))
    figure, axes = canvas(2, 3, (14, 9), font=15)
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.1)
    first, *others, last = axes.flatten()
    first.scatter(*places.T, s=9, c=y, **LABELS)
    for digit in y.unique():
        box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 1.5}
        middle = places[y == digit].median(0).values
        first.text(*middle, f"{digit}", ha="center", va="center", weight="bold", bbox=box)
    first.set_title(f"{len(y)} digits, placed by t-SNE")
    for axis, (name, table) in zip(others, probs.items(), strict=True):
        wrong = table.argmax(1) != y
        axis.scatter(*places[~wrong].T, s=7, color="0.85", lw=0)
        axis.scatter(*places[wrong].T, s=16, color=VERMILION, lw=0)
        axis.set_title(f"{name}: {int(wrong.sum())} wrong")
    for axis in (first, *others):
        axis.set(aspect="equal")
        axis.axis("off")
    intervals(last, list(rates), quality, "estimate, 90 %")
    truths(last, list(rates.values()), "simulated")
    last.set(xlabel="accuracy of the annotators")
    save(figure, output)


def draw_section(output, places, columns: dict, layers, entropy, names, quality, about) -> None:
    """Labels of four methods as colors, entropy, and the information of every clustering."""
    places = places * torch.tensor([1.0, -1.0])
    figure, axes = canvas(2, 3, (14, 9), font=13)
    *maps, uncertain, last = axes.flatten()
    for axis, (title, column) in zip(maps, columns.items(), strict=True):
        there = column >= 0
        axis.scatter(*places[there].T, s=9, c=column[there], **LABELS)
        axis.set_title(title)
    greys = matplotlib.colormaps["Greys"](torch.linspace(0.2, 1, 256))
    shown = uncertain.scatter(*places.T, s=9, c=entropy, lw=0, vmin=0,
                              cmap=matplotlib.colors.ListedColormap(greys))  # fmt: skip
    uncertain.set_title("entropy of the NMM's labels")
    figure.colorbar(shown, ax=uncertain, label="nats", shrink=0.5)
    for axis in (*maps, uncertain):
        axis.set(aspect="equal")
        axis.axis("off")
    intervals(last, names, quality, "on the NMM's labels, 90 %")
    truths(last, about, "on the layers by hand")
    last.set(xlabel="information of a clustering, nats")
    colors = PALETTE[: len(layers)]
    handles = [plt.Line2D([], [], marker="o", ls="", color=color) for color in colors]
    place = {"ncols": len(layers), "loc": "outside lower center", "handletextpad": 0.1}
    title = "color: the layer that a label overlaps most"
    figure.legend(handles, layers, frameon=False, title=title, **place)
    save(figure, output)


def intervals(axis, names, quality, label: str) -> None:
    mean, low, high = quality
    axis.errorbar(mean, range(len(names)), xerr=torch.stack([mean - low, high - mean]), fmt="o",
                  ms=5, capsize=4, color=BLUE, label=label)  # fmt: skip
    for place, name in enumerate(names):
        axis.text(0.0, place - 0.25, name, transform=axis.get_yaxis_transform(), fontsize=13)
    axis.spines["left"].set_visible(False)
    axis.set_yticks([])
    axis.set_ylim(len(names) - 0.5, -1.2 - 0.2 * len(names))


def truths(axis, values: list | Tensor, label: str) -> None:
    axis.plot(values, range(len(values)), "D", ms=8, mfc="none", color=VERMILION, label=label)
    axis.legend(frameon=False, loc="upper left")
    axis.set_xlim(left=0)
