# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Communities as sources of a StackedNMM: their predictions, and the part of a graph to fit on."""

from __future__ import annotations

import torch
from torch import Tensor
from torch_geometric.utils import index_to_mask, scatter

from pyro_nmm import Neighborhood


def means(hood: Neighborhood, probs: Tensor) -> Tensor:
    """``(M - N, C)``: the mean prediction of every community's members."""
    inside = hood.source >= hood.num_nodes
    members = probs.index_select(0, hood.target[inside])
    community, size = hood.source[inside] - hood.num_nodes, hood.num_sources - hood.num_nodes
    return scatter(members, community, dim_size=size, reduce="mean")


def sources_of(hood: Neighborhood, observed: Tensor) -> tuple[Neighborhood, Tensor, Tensor]:
    """
    The rows of the observed nodes as a graph of its own, over the nodes that they may choose and
    the members of their communities, these nodes, and its sources, both in ascending order. The
    other nodes have a self-loop, and an edge from such a community that they are in, alone.
    """
    rows, num_nodes = hood.restrict(observed), hood.num_nodes
    reached, members = rows.source.unique(), rows.source.new_zeros(2, 0)
    if hood.bipartite:
        chosen = index_to_mask(reached[reached >= num_nodes], hood.num_sources)
        inside = chosen[hood.source].nonzero()[:, 0]
        members = torch.stack([hood.source[inside], hood.target[inside]])
    nodes = torch.cat([reached[reached < num_nodes], members[1]]).unique()
    sources = torch.cat([nodes, reached[reached >= num_nodes]])
    source, target = torch.cat([torch.stack([rows.source, rows.target]), members], 1)
    own = torch.arange(len(nodes), device=hood.device).expand(2, -1)
    edges = torch.stack([torch.searchsorted(sources, source), torch.searchsorted(nodes, target)])
    num_sources = len(sources) if hood.bipartite else None
    return Neighborhood(torch.cat([edges, own], 1), len(nodes), num_sources), nodes, sources


def check_hood(hood: Neighborhood, communities: bool) -> None:
    """Whether the sources are the nodes, followed by communities or not."""
    if not communities:
        if hood.bipartite:
            raise ValueError(
                "hood has sources that are no nodes: if they are communities, made by "
                "pyro_nmm.sources.communities, use StackedNMM(..., communities=True)"
            )
        return
    own = int((hood.source == hood.target).sum())
    if not hood.bipartite or hood.num_rows != hood.num_nodes or own != hood.num_nodes:
        raise ValueError(
            f"communities=True needs a hood of pyro_nmm.sources.communities, whole, whose sources "
            f"are the nodes and then communities, got {hood}: make one, or use StackedNMM(...)"
        )
