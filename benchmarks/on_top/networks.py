# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Rivals that are networks: CaGCN and GATS, with a temperature for every node, and GMNN."""

import copy
from collections.abc import Callable
from math import inf

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Adam, RMSprop
from torch_geometric.data import Data
from torch_geometric.nn import GCN, Linear
from torch_geometric.utils import degree, scatter, softmax

from benchmarks.on_top.data import epochs, held_out_losses, stopped_early
from pyro_nmm import Neighborhood

#: Weight decay of GATS, by graph and backbone: the configuration files of its authors.
DECAY = {("cora", "gcn"): 5e-3, ("cora", "gat"): 1e-2, ("citeseer", "gcn"): 5e-3}
DECAY |= {("citeseer", "gat"): 1e-2, ("pubmed", "gcn"): 0.0, ("pubmed", "gat"): 0.2}
#: GMNN draws labels from a softmax of the logits over this temperature.
SHARPNESS = 0.1


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


def gmnn(make: Callable[[int], nn.Module], data: Data, num_epochs: int = 100) -> Tensor:
    """
    ``(N, C)``: logits of GMNN (Qu, Bengio and Tang 2019, "Graph Markov Neural Networks", ICML,
    https://github.com/DeepGraphLearning/GMNN), of two learning rates the better one on the held-out
    nodes. The schedule is the published one, one round of three phases. The features' network
    learns the training labels; the labels' network learns labels that are drawn from the first
    one's predictions; the features' network learns what the labels' network predicts. Training
    nodes keep their labels.

    :param make: a network with so many inputs, called with features and edges.
    """
    train, num_classes = data.train_mask, int(data.y.max()) + 1
    every = torch.ones_like(train)

    def one_hot(labels: Tensor) -> Tensor:
        return F.one_hot(data.y.where(train, labels), num_classes).to(data.x.dtype)

    def learned(pair: tuple, x: Tensor, targets: Tensor, nodes: Tensor) -> tuple:
        """Losses of the best epoch on the held-out nodes, its logits, and the last epoch's."""
        module, optimizer = pair
        least, kept, state = (inf, inf), None, None
        for out in epochs(module, optimizer, (x, data.edge_index), targets, nodes, num_epochs):
            if (losses := held_out_losses(out, data)) < least:
                least, kept, state = losses, out, copy.deepcopy(module.state_dict())
        module.load_state_dict(state)
        return least, kept, out

    def one_round(lr: float) -> tuple:
        modules, options = map(make, (data.num_features, num_classes)), {"weight_decay": 5e-4}
        features, labels = ((m, RMSprop(m.parameters(), lr, **options)) for m in modules)
        sure = one_hot(torch.zeros_like(data.y))
        _, out, _ = learned(features, data.x, sure, train)
        drawn = one_hot(torch.distributions.Categorical(logits=out / SHARPNESS).sample())
        _, _, last = learned(labels, drawn, drawn, every)
        targets = sure.where(train[:, None], last.softmax(-1))
        return learned(features, data.x, targets, every)

    return min(map(one_round, (0.01, 0.05)), key=lambda found: found[0])[1]
