# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Dice, choices and labels of five nodes, and how often two nodes have the same label."""

from __future__ import annotations

from matplotlib.colors import LinearSegmentedColormap
from matplotlib.patches import Circle

from drawing import BLUE, GREEN, ORANGE, canvas, save

COLORS = BLUE, ORANGE
PLACES = (0.0, 1.9), (0.8, 0.9), (2.1, 1.7), (1.7, 0.0), (3.1, 0.4)
TITLES = "1. Each node has a die,", "2. chooses a node,", "3. and rolls that node's die."


def draw(output, edges, z, c, y, equal) -> None:
    ratios = {"width_ratios": (1, 1, 1, 0.85)}
    figure, axes = canvas(1, 4, (10.4, 3.25), font=12, box=True, gridspec_kw=ratios)
    figure.get_layout_engine().set(w_pad=0.02, h_pad=0.02)
    for step, (axis, title) in enumerate(zip(axes, TITLES, strict=False)):
        for i, j in edges:
            axis.plot(*zip(PLACES[i], PLACES[j], strict=True), color="0.85", lw=3, zorder=0)
        for i, (x, height) in enumerate(PLACES):
            ring = COLORS[y[i]] if step == 2 else "white"
            axis.add_patch(Circle((x, height), 0.48, color=ring, zorder=1))
            axis.add_patch(Circle((x, height), 0.38, color="white", zorder=1))
            wedges, _ = axis.pie(z[i], center=(x, height), radius=0.33, colors=COLORS, frame=True)
            for wedge in wedges:
                wedge.set_zorder(2)
            axis.add_patch(Circle((x, height), 0.18, color="white", zorder=2.5))
            axis.text(x, height, f"{i}", ha="center", va="center_baseline", fontsize=11, zorder=4)
            if step and c[i] != i:
                arrow = {"arrowstyle": "-|>", "color": "black", "shrinkA": 13, "shrinkB": 15}
                arrow |= {"lw": 1.6, "mutation_scale": 14, "connectionstyle": "arc3,rad=0.2"}
                axis.annotate("", PLACES[c[i]], (x, height), arrowprops=arrow, zorder=3)
        axis.set(xlim=(-0.6, 3.65), ylim=(-0.55, 2.45), aspect="equal")
        axis.set_title(title, fontsize=12)
        axis.axis("off")
    table = axes[3]
    shades = LinearSegmentedColormap.from_list("shades", ["white", GREEN])
    table.imshow(equal, cmap=shades, vmin=0.47, vmax=0.8)
    for i in range(5):
        for j in range(5):
            text = "" if i == j else f"{equal[i, j]:.2f}".removeprefix("0")
            table.text(j, i, text, ha="center", va="center")
    table.set(xticks=range(5), yticks=range(5))
    table.set_title("How often labels agree\n(.50: independent)", fontsize=12)
    table.tick_params(length=0)
    table.spines[:].set_visible(False)
    save(figure, output)
