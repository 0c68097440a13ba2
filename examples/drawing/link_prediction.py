# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""A graph whose nodes have the colours of their communities, by each guide."""

from __future__ import annotations

import networkx
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from torch.nn.functional import one_hot
from torch_geometric.utils import to_networkx

from drawing import PALETTE, canvas, save


def draw(output, data, names: list[str], communities: dict[str, Tensor]) -> None:
    """A panel for each guide; each community of the first has the name of its largest node."""
    graph = to_networkx(data, to_undirected=True)
    place = networkx.kamada_kawai_layout(graph)
    degree = dict(graph.degree)
    figure, axes = canvas(1, len(communities), (6.5 * len(communities), 5), font=12, squeeze=False)
    first = next(iter(communities.values()))
    members = [(first == k).nonzero().flatten().tolist() for k in first.unique()]
    largest = [max(nodes, key=lambda i: degree[i]) for nodes in members]
    for axis, (title, community) in zip(axes[0], communities.items(), strict=True):
        colors = [PALETTE[k] for k in matched(community, first)]
        networkx.draw_networkx_edges(graph, place, ax=axis, edge_color="0.8")
        networkx.draw_networkx_nodes(
            graph, place, ax=axis, node_color=colors, edgecolors="0.3", linewidths=0.6,
            node_size=[40 + 12 * degree[i] for i in graph],
        )  # fmt: skip
        box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 0.8}
        for i in largest:
            axis.annotate(names[i], place[i], (0, 9), textcoords="offset points", ha="center",
                          fontsize=10, bbox=box)  # fmt: skip
        axis.set_title(title)
        axis.axis("off")
    save(figure, output)


def matched(community: Tensor, other: Tensor) -> list[int]:
    """Communities, renamed after those of another partition that they share most nodes with."""
    number = int(max(community.max(), other.max())) + 1
    shared = one_hot(community, number).T @ one_hot(other, number)
    _, columns = linear_sum_assignment(shared, maximize=True)
    return [int(columns[k]) for k in community]
