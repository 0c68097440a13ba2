# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Planetoid's graphs, communities of a graph, and the loop that fits a network to it."""

from collections.abc import Callable
from pathlib import Path

import networkx as nx
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch_geometric.data import Data
from torch_geometric.datasets import Planetoid
from torch_geometric.transforms import NormalizeFeatures
from torch_geometric.utils import to_networkx

from pyro_nmm.sparse import to_csr

PLANETOID = {"cora": "Cora", "citeseer": "CiteSeer", "pubmed": "PubMed"}


def planetoid(name: str, root: Path | None = None) -> Data:
    """A graph of PyG with the public split. Rows of features sum to one; bags of words are sparse.

    :param root: folder that holds ``Cora/raw`` and the like; default ``~/.cache/pyro-nmm``.
    """
    folder = str(root or Path.home() / ".cache" / "pyro-nmm")
    data = Planetoid(folder, PLANETOID[name], transform=NormalizeFeatures())[0]
    # Dense products are faster for PubMed's features.
    if (data.x != 0).double().mean() < 0.05:
        data.x = to_csr(data.x)
    return data


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


def descend(module: nn.Module, optimizer: Optimizer, loss: Callable, num_epochs: int) -> nn.Module:
    """The module in evaluation mode, after epochs of steps on its loss."""
    module.train()
    for _ in range(num_epochs):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    return module.eval()
