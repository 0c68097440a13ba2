# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Posterior of the total concentration, and the entropy of members before and after a label."""

from __future__ import annotations

import math
from pathlib import Path

import networkx as nx
import torch
from pyro.distributions import LogNormal
from scipy.stats import gaussian_kde
from torch import Tensor

from drawing import BLUE, GREEN, ORANGE, VERMILION, canvas, save

COLORS = {"MCMC, FieldGibbs": GREEN, "SVI, AutoNMM": BLUE, "SVI, ELBO alone": ORANGE}


def draw(
    output: Path,
    kappas: dict[str, Tensor],
    edges: Tensor,
    entropies: list[Tensor],
    observed: Tensor,
    added: int,
) -> None:
    """Draws ``(S,)`` of kappa by method; entropies ``(N,)`` before and after the added label."""
    figure, (left, *graphs) = canvas(1, 3, (11, 3.4), font=11)
    grid = torch.linspace(0.01, 2.0, 300)
    left.plot(grid, LogNormal(0.0, 1.0).log_prob(grid).exp(), color="0.6", ls="--", label="prior")
    for name, color in COLORS.items():
        density = gaussian_kde(kappas[name].log().numpy())
        left.plot(grid, density(grid.log().numpy()) / grid.numpy(), color=color, label=name)
    left.set(xlabel="kappa (small: neighbours agree)", ylabel="density", xlim=(0, 2), ylim=0)
    left.legend(frameon=False)
    graph = nx.Graph(edges.T.tolist())
    place = nx.kamada_kawai_layout(graph)
    x, y = zip(*(place[i] for i in range(graph.number_of_nodes())), strict=True)
    titles = f"{int(observed.sum())} labels observed (orange)", f"the label of {added}, too"
    for axis, entropy, title in zip(graphs, entropies, titles, strict=True):
        nx.draw_networkx_edges(graph, place, ax=axis, edge_color="0.85")
        dots = axis.scatter(x, y, 110, entropy, cmap="Blues", vmin=0.9, vmax=math.log(4),
                            edgecolors="0.5", zorder=2)  # fmt: skip
        known = (observed | (torch.arange(len(x)) == added)) if axis is graphs[1] else observed
        for i in known.nonzero()[:, 0].tolist():
            axis.scatter(x[i], y[i], 110, VERMILION, zorder=3)
        axis.set_title(title, fontsize=11)
        axis.axis("off")
    figure.colorbar(dots, ax=graphs, label="entropy of a label, nats", shrink=0.9, extend="min")
    save(figure, output)
