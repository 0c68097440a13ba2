# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Communities of a graph."""

import networkx as nx
import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.utils import to_networkx


def louvain(data: Data, resolution: float, probs: Tensor | None = None, seed: int = 0) -> Tensor:
    """``(N,)``: Louvain's communities; with marginals, edges weigh the chance of equal labels."""
    ends = data.edge_index.cpu()
    weight = torch.ones(ends.shape[1]) if probs is None else probs.cpu()[ends].prod(0).sum(-1)
    known = Data(edge_index=ends, num_nodes=data.num_nodes, weight=weight)
    graph = to_networkx(known, None, ["weight"], to_undirected=True, remove_self_loops=True)
    found = nx.community.louvain_communities(graph, resolution=resolution, seed=seed)
    membership = torch.empty(data.num_nodes, dtype=torch.long)
    for number, members in enumerate(found):
        membership[list(members)] = number
    return membership.to(data.y.device)
