# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Probabilities and samples of the exact posterior and its approximations, and the bound."""

from __future__ import annotations

import torch
from torch import Tensor

from drawing import BLUE, VERMILION, canvas, save


def draw(output, clean: Tensor, noisy: Tensor, marginals: dict[str, Tensor],
         samples: dict[str, Tensor], curve: list[float], result: dict) -> None:  # fmt: skip
    figure, axes = canvas(4, 3, (12, 6.6), font=13, box=True)
    shape, grey = clean.shape, {"cmap": "gray_r", "vmin": 0, "vmax": 1}
    show(axes[0, 0], clean > 0, "letters", **grey)
    show(axes[0, 1], noisy, "observed: letters and noise", cmap="gray_r")
    for column, (name, table) in zip(axes[1:].T, marginals.items(), strict=True):
        error = f", mean error {result[name]['error']:.3f}" if name in result else ""
        show(column[0], table[:, 1].view(shape), f"{name}: p(black){error}", **grey)
        for axis, image in zip(column[1:], samples[name], strict=True):
            show(axis, image, f"{name}: a sample", **grey)
    axis = axes[0, 2]
    smooth = torch.tensor(curve).unfold(0, min(25, len(curve)), 1).mean(-1)
    axis.plot(range(len(curve) - len(smooth), len(curve)), smooth, color=BLUE)
    independent = result["mean field"]["KL"]
    axis.axhline(independent, color=VERMILION, ls="--")
    place = {"transform": axis.get_yaxis_transform(), "ha": "right"}
    axis.text(1, independent, "mean field", color=VERMILION, va="bottom", **place)
    axis.text(1, smooth[-1] - 1, "NMM, at most", color=BLUE, va="top", **place)
    axis.set_title("KL divergence, nats", fontsize=12)
    axis.set(xlabel="step", ylim=(0, 1.3 * independent))
    axis.spines[["top", "right"]].set_visible(False)
    save(figure, output)


def show(axis, image: Tensor, title: str, **style) -> None:
    axis.set_title(title, fontsize=12)
    axis.set_xticks([])
    axis.set_yticks([])
    axis.imshow(image.cpu(), **style)
