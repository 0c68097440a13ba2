# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Reliability, and the marginals around one node."""

from __future__ import annotations

import matplotlib
import torch
from torch import Tensor

from drawing import BLUE, ORANGE, PALETTE, canvas, diagonal, reliability, save


def draw(args, data, mix, probs: dict[str, Tensor]) -> None:
    figure, axes = canvas(1, 2, (8.4, 4.4), font=12)
    test = data.test_mask
    for (name, p), color in zip(probs.items(), (ORANGE, BLUE), strict=True):
        reliability(axes[0], p[test].cpu(), data.y[test].cpu(), color, name)
    low = diagonal(axes[0], 0.9)
    axes[0].set(xlabel="confidence", ylabel="accuracy", xlim=(low, 1.01), ylim=(low, 1.01),
                title="Reliability, ± one standard error")  # fmt: skip
    axes[0].legend(frameon=False, loc="lower right")
    node = uncertain_node(data, mix, *probs.values()) if args.node is None else args.node
    neighbourhood(axes[1], data, mix, list(probs.values())[1], node)
    save(figure, args.output)


def uncertain_node(data, mix, first: Tensor, second: Tensor) -> int:
    """The test node with 3 to 8 neighbours on which the two models differ most."""
    degree = mix.hood.ptr.diff() - 1
    wanted = data.test_mask & (degree >= 3) & (degree <= 8)
    wanted = wanted if wanted.any() else data.test_mask
    gap = (first - second).abs().sum(-1)
    return int(gap.masked_fill(~wanted, -1).argmax())


def neighbourhood(axis, data, mix, marginals: Tensor, node: int) -> None:
    """Draw a node and its attention: width is attention, pies are posterior marginals."""
    hood = mix.hood
    row = slice(int(hood.ptr[node]), int(hood.ptr[node + 1]))
    weight = dict(zip(hood.source[row].tolist(), mix.attention[row].tolist(), strict=True))
    others = sorted((j for j in weight if j != node), key=lambda j: -weight[j])[:8]
    angle = torch.arange(len(others)) * 2 * torch.pi / max(len(others), 1) + 0.3
    circle = (1.1 * torch.stack([angle.cos(), angle.sin()], -1)).tolist()
    places = {node: (0.0, 0.0)} | dict(zip(others, circle, strict=True))
    for j in others:
        x, y = places[j]
        axis.plot([0, x], [0, y], color="0.4", lw=30 * weight[j], alpha=0.5, zorder=1,
                  solid_capstyle="butt")  # fmt: skip
    seen = set()
    for j, (x, y) in places.items():
        radius, share = (0.28 if j == node else 0.18), marginals[j].tolist()
        start = 90.0
        for k, p in enumerate(share):
            wedge = matplotlib.patches.Wedge((x, y), radius, start, start + 360 * p, zorder=2,
                                             facecolor=PALETTE[k % len(PALETTE)])  # fmt: skip
            axis.add_patch(wedge)
            start += 360 * p
            if p > 0.02:
                seen.add(k)
        known = f"\nknown: {int(data.y[j])}" if data.train_mask[j] else ""
        text = f"itself {weight[j]:.2f}" if j == node else f"{weight[j]:.2f}{known}"
        box = {"facecolor": "white", "edgecolor": "none", "pad": 0.6, "alpha": 0.8}
        axis.text(
            x, y - radius - 0.04, text, ha="center", va="top", fontsize=10, zorder=3, bbox=box
        )
    handles = [matplotlib.patches.Patch(color=PALETTE[k % len(PALETTE)], label=f"label {k}")
               for k in sorted(seen)]  # fmt: skip
    axis.legend(handles=handles, frameon=False, fontsize=10, loc="upper left",
                bbox_to_anchor=(-0.05, 1.0))  # fmt: skip
    more = f" ({len(weight) - 1 - len(others)} more)" * (len(weight) - 1 > len(others))
    axis.set_title(f"Attention of node {node}{more}")
    axis.set(xlim=(-1.75, 1.5), ylim=(-1.5, 1.5), aspect="equal")
    axis.axis("off")
