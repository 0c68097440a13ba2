# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Graphs for the benchmarks: made up without data, or a real one under ``--data-root``."""

from __future__ import annotations

import torch
from torch import Tensor


def citation_like(num_nodes: int, num_links: int, seed: int = 0) -> Tensor:
    """
    An undirected graph with hubs, in linear time: every link joins a random node to an
    end of an earlier link or, half of the time, to any earlier node.

    :return: ``edge_index`` of shape ``(2, 2 * num_links)`` with both directions.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(high: Tensor) -> Tensor:
        return (torch.rand(len(high), generator=generator) * high).long()

    new = torch.arange(1, num_links + 1) % num_nodes
    new[new == 0] = 1
    old = draw(new)
    # Following the link that introduced a node to its older end prefers nodes of high degree.
    first = torch.zeros(num_nodes, dtype=torch.long)
    first[new.flip(0)] = old.flip(0)
    old = torch.where(torch.rand(num_links, generator=generator) < 0.5, first[old], old)
    edge_index = torch.stack([new, old])
    return torch.cat([edge_index, edge_index.flip(0)], 1)


def cora(data_root: str) -> tuple[Tensor, Tensor]:
    """``edge_index`` and labels of Cora through PyG's Planetoid."""
    from torch_geometric.datasets import Planetoid

    data = Planetoid(data_root, "Cora")[0]
    return data.edge_index, data.y
