# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Counties of the United States in 2012, and counties that are held out."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import networkx as nx
import pandas as pd
import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import SimpleConv
from torch_geometric.utils import remove_self_loops, to_undirected

from pyro_nmm import Neighborhood, edge_values

#: Share of held-out counties, and counties of a held-out block.
SHARE, BLOCK = 0.2, 50
KINDS = "spatial", "random"


def counties(root: Path) -> Data:
    """Covariates ``x`` (3234, 6), winners ``y`` by the sign of the margin, adjacent counties."""
    values = pd.read_csv(root / "election/2012_xy.csv").to_numpy()
    pairs = pd.read_csv(root / "election/2012_adj.csv").to_numpy() - 1
    edges = to_undirected(remove_self_loops(torch.tensor(pairs.T))[0])
    x, margin = torch.tensor(values[:, :-1]).float(), torch.tensor(values[:, -1])
    return Data(x=x, y=(margin > 0).long(), edge_index=edges)


def spatial_blocks(edge_index: Tensor, nodes: Tensor, seed: int) -> Tensor:
    """Disjoint blocks of a fifth of the nodes, each grown from a random one by its neighbours.

    A block ends at :data:`BLOCK` nodes, or where no free node is adjacent.

    :param Tensor nodes: ``(N,)`` boolean mask of the nodes that blocks may have.
    :return: ``(N,)`` the block ``0, 1, ...`` of each node, -1 in no block.
    """
    wanted = round(SHARE * int(nodes.sum()))
    near: list[list[int]] = [[] for _ in range(len(nodes))]
    for source, target in edge_index.T.tolist():
        near[target].append(source)
    free, block, number = nodes.tolist(), torch.full((len(nodes),), -1), 0
    generator = torch.Generator().manual_seed(seed)
    for start in torch.randperm(len(nodes), generator=generator).tolist():
        size = min(BLOCK, wanted - int((block >= 0).sum()))
        if size == 0:
            break
        if not free[start]:
            continue
        grown, free[start] = [start], False
        for node in grown:
            for other in near[node]:
                if free[other] and len(grown) < size:
                    free[other] = False
                    grown.append(other)
        block[grown] = number
        number += 1
    return block


def random_nodes(nodes: Tensor, seed: int) -> Tensor:
    """A fifth of the nodes, each a block of its own."""
    some = nodes.nonzero()[:, 0]
    some = some[torch.randperm(len(some), generator=torch.Generator().manual_seed(seed))]
    some, block = some[: round(SHARE * len(some))], torch.full((len(nodes),), -1)
    block[some] = torch.arange(len(some))
    return block


def held_out(kind: str, edge_index: Tensor, nodes: Tensor, seed: int) -> Tensor:
    """Blocks of one kind of split."""
    if kind == "spatial":
        return spatial_blocks(edge_index, nodes, seed)
    return random_nodes(nodes, seed)


@dataclass(frozen=True)
class Problem:
    """A map, the counties whose labels a method sees, and the blocks on which it is scored."""

    data: Data
    train: Tensor  #: ``(N,)`` boolean mask
    block: Tensor  #: ``(N,)`` numbers of the scored blocks, -1 elsewhere

    @classmethod
    def of(cls, data: Data, kind: str, seed: int, validates: bool = False) -> "Problem":
        """Held-out counties; to validate, a part of the training counties in their place."""
        block = held_out(kind, data.edge_index, torch.ones(data.num_nodes, dtype=torch.bool), seed)
        train = block < 0
        if validates:
            block = held_out(kind, data.edge_index, train, 1000 + seed)
            train = train & (block < 0)
        return cls(data, train, block)

    @property
    def scored(self) -> Tensor:
        return self.block >= 0

    @property
    def known(self) -> Tensor:
        """``(N,)`` labels, -1 for those that no method may see."""
        return torch.where(self.train, self.data.y, -1)

    @property
    def inner(self) -> Tensor:
        """``(2, P)``: pairs of adjacent scored counties, each once."""
        first, second = self.data.edge_index
        kept = self.scored[first] & self.scored[second] & (first < second)
        return self.data.edge_index[:, kept]

    @cached_property
    def around(self) -> Tensor:
        """``(N, F)``: mean covariates of the neighbours; one's own without neighbours."""
        mean, alone = SimpleConv("mean")(self.data.x, self.data.edge_index), self.alone
        return torch.where(alone[:, None], self.data.x, mean)

    @property
    def alone(self) -> Tensor:
        """``(N,)``: whether a county has no neighbours."""
        return torch.bincount(self.data.edge_index[1], minlength=len(self.train)) == 0


def within_hops(data: Data, hops: int) -> tuple[Neighborhood, Tensor]:
    """Neighbourhoods of so many hops, and the number of hops ``(num_edges,)`` of every edge."""
    graph = nx.empty_graph(data.num_nodes)
    graph.add_edges_from(data.edge_index.T.tolist())
    reached = nx.all_pairs_shortest_path_length(graph, cutoff=hops)
    rows = [(j, i, steps) for i, found in reached for j, steps in found.items()]
    source, target, steps = torch.tensor(rows).T
    edges = torch.stack([source, target])
    hood = Neighborhood(edges, data.num_nodes)
    return hood, edge_values(hood, edges, steps.float())
