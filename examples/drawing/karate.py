# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Posterior marginals and attention."""

from __future__ import annotations

import matplotlib.pyplot as plt
import networkx as nx
import numpy as np
from matplotlib.patches import Circle, Patch

from drawing import BLUE, GREEN, ORANGE, PINK, VERMILION, canvas, save

COLORS = BLUE, ORANGE, GREEN, PINK
RADIUS, HOLE, SHOWN = 0.062, 0.6, 0.15


def draw(output, data, mix, posterior) -> None:
    figure, axis = canvas(1, 1, (9, 5.7), font=13)
    graph = nx.Graph(data.edge_index.T.tolist())
    place = apart({i: (1.5 * y, -x) for i, (x, y) in nx.kamada_kawai_layout(graph).items()})
    nx.draw_networkx_edges(graph, place, ax=axis, edge_color="0.85", width=1)
    hood = mix.hood
    edges = zip(hood.source.tolist(), hood.target.tolist(), mix.attention.tolist(), strict=True)
    for j, i, weight in edges:
        if i != j and weight > SHOWN:
            style = {"arrowstyle": "-|>", "color": "0.25", "connectionstyle": "arc3,rad=0.12"}
            style |= {"linewidth": 5 * weight, "shrinkA": 17, "shrinkB": 17, "mutation_scale": 13}
            axis.annotate("", place[j], place[i], arrowprops=style, zorder=1)
    wrong = (posterior.predict() != data.y).tolist()
    for i, shares in enumerate(posterior.marginals().tolist()):
        if data.train_mask[i]:
            axis.add_patch(Circle(place[i], 1.18 * RADIUS, color="black", zorder=2))
        wedges, *_ = axis.pie(shares, colors=COLORS, radius=RADIUS, center=place[i], frame=True)
        for wedge in wedges:
            wedge.set_zorder(3)
        axis.add_patch(Circle(place[i], HOLE * RADIUS, color="white", zorder=4))
        axis.text(*place[i], f"{i}", ha="center", va="center_baseline", fontsize=11, zorder=5,
                  fontweight="bold" if wrong[i] else "normal",
                  color=VERMILION if wrong[i] else "black")  # fmt: skip
    handles = [Patch(color=color) for color in COLORS]
    names = [f"community {k}" for k in range(4)]
    marks = [
        {"marker": "o", "mfc": "none", "mec": "black", "mew": 2.5, "ms": 13},
        {"marker": "$7$", "color": VERMILION, "ms": 9},
        {"marker": r"$\rightarrow$", "color": "0.25", "ms": 18},
    ]
    handles += [plt.Line2D([], [], ls="", **mark) for mark in marks]
    names += ["label observed", "predicted wrongly", f"attention above {SHOWN}"]
    figure.legend(handles, names, frameon=False, ncols=4, loc="outside lower center",
                  fontsize=12, handlelength=1.2, columnspacing=1.5)  # fmt: skip
    x, y = np.array(list(place.values())).T
    axis.set(xlim=(x.min() - 0.1, x.max() + 0.1), ylim=(y.min() - 0.09, y.max() + 0.09))
    axis.set(aspect="equal", title="Posterior marginals (rings) and attention (arrows)")
    axis.axis("off")
    save(figure, output)


def apart(place: dict) -> dict:
    """Places at least two and a half radii from each other."""
    nodes, points = list(place), np.array(list(place.values()))
    for _ in range(200):
        gap = points[:, None] - points[None]
        distance = np.linalg.norm(gap, axis=-1) + np.eye(len(points))
        push = np.maximum(0, 2.8 * RADIUS - distance) / distance
        np.fill_diagonal(push, 0)
        points = points + 0.2 * (push[..., None] * gap).sum(1)
    return dict(zip(nodes, points, strict=True))
