# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""A temperature for every node, by a network on the graph."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Adam
from torch_geometric.data import Data
from torch_geometric.nn import GCN, Linear
from torch_geometric.utils import degree, scatter, softmax

from benchmarks.on_top.data import epochs, stopped_early
from pyro_nmm import Neighborhood

#: Weight decay of GATS, by graph and backbone: the configuration files of its authors.
DECAY = {("cora", "gcn"): 5e-3, ("cora", "gat"): 1e-2, ("citeseer", "gcn"): 5e-3}
DECAY |= {("citeseer", "gat"): 1e-2, ("pubmed", "gcn"): 0.0, ("pubmed", "gat"): 0.2}


class CaGCN(nn.Module):
    """Temperatures by a GCN of the logits (Wang et al. 2021)."""

    def __init__(self, hood: Neighborhood, num_classes: int) -> None:
        super().__init__()
        self.edges = torch.stack([hood.source, hood.target])
        self.network = GCN(num_classes, 16, 2, out_channels=1, dropout=0.5)

    def forward(self, logits: Tensor) -> Tensor:
        return logits * F.softplus(self.network(logits, self.edges))


class GATS(nn.Module):
    """Temperatures by attention among logits (Hsu et al. 2022), equations 7 to 10."""

    def __init__(self, hood: Neighborhood, known: Tensor, num_classes: int, heads: int = 8) -> None:
        super().__init__()
        self.source, self.target, self.size = hood.source, hood.target, hood.num_nodes
        next_to = scatter(known[hood.source].long(), hood.target, dim_size=self.size, reduce="max")
        self.distance = torch.where(known, 0, 2 - next_to)
        self.ranks = Linear(num_classes, heads, bias=False, weight_initializer="glorot")
        self.coefficient = nn.Parameter(torch.zeros(()))
        self.bias, self.of_near = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(2))

    def forward(self, logits: Tensor) -> Tensor:
        low, high = logits.aminmax(dim=1, keepdim=True)
        ranked = self.ranks(((logits - low) / (high - low)).sort(-1).values)
        near = torch.cat([self.of_near, self.of_near.new_ones(1)])[self.distance][:, None]
        sharp, sure = logits / near, logits.softmax(-1).amax(-1)
        weight = (sharp[self.source] * sharp[self.target]).sum(-1)
        weight = softmax(F.leaky_relu(weight, 0.2), self.target, num_nodes=self.size)[:, None]
        mean = scatter(weight * (ranked * near)[self.source], self.target, dim_size=self.size)
        gap = scatter(sure[self.target] - sure[self.source], self.target, dim_size=self.size)
        gap = gap / degree(self.source, self.size)
        found = F.softplus(mean + self.coefficient * gap[:, None]).mean(-1, keepdim=True)
        return logits / (found + self.bias)


def cagcn(data: Data) -> Tensor:
    return calibrated(CaGCN(data.hood, data.logits.shape[1]), 5e-3, data)


def gats(data: Data) -> Tensor:
    module = GATS(data.hood, data.train_mask, data.logits.shape[1])
    return calibrated(module, DECAY.get((data.graph, data.backbone), 5e-3), data)


def calibrated(module: nn.Module, decay: float, data: Data) -> Tensor:
    """The protocol's fit to the held-out nodes, stopped early by the training nodes."""
    known, y = data.train_mask, data.y
    optimizer = Adam(module.parameters(), lr=0.01, weight_decay=decay)
    outputs = epochs(module, optimizer, (data.logits,), y, data.val_mask, 2000)
    best = stopped_early(outputs, lambda out: (F.cross_entropy(out[known], y[known]).item(),))
    return best.softmax(-1)
