# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
GMNN (Qu, Bengio and Tang 2019, "Graph Markov Neural Networks", ICML,
https://github.com/DeepGraphLearning/GMNN): a network of features and one of neighbours' labels
that teach each other.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.data import Data

Score = tuple[float, float]


def gmnn(
    make: Callable[[int], nn.Module], data: Data, sharpness: float = 0.1, num_epochs: int = 100
) -> Tensor:
    """
    The published schedule, one round of three phases: the features' network learns the training
    labels; the labels' network learns labels that are drawn from softmax of its logits over
    ``sharpness``, from those of neighbours; and the features' network goes on to learn what the
    other one predicts. Training nodes keep their labels. The rate, of two, is the held-out nodes'.

    :param make: a network of so many inputs, called with features and edges.
    :return: ``(N, C)`` logits of the features' network at its best epoch on the held-out nodes.
    """
    found = [_round(make, data, sharpness, num_epochs, lr) for lr in (0.01, 0.05)]
    return max(found, key=lambda each: each[0])[1]


def _round(
    make: Callable[[int], nn.Module], data: Data, sharpness: float, num_epochs: int, lr: float
) -> tuple[Score, Tensor]:
    train, num_classes = data.train_mask, int(data.y.max()) + 1
    sure = F.one_hot(data.y.where(train, 0), num_classes).to(data.x.dtype)
    features, labels = make(data.num_features), make(num_classes)
    optimizer = _optimizer(features, lr)
    _, out, _ = _taught(features, optimizer, data.x, sure, train, data, num_epochs)
    drawn = torch.distributions.Categorical(logits=out / sharpness).sample()
    drawn = F.one_hot(data.y.where(train, drawn), num_classes).to(sure)
    every = torch.ones_like(train)
    _, _, last = _taught(labels, _optimizer(labels, lr), drawn, drawn, every, data, num_epochs)
    taught = sure.where(train[:, None], last.softmax(-1))
    score, out, _ = _taught(features, optimizer, data.x, taught, every, data, num_epochs)
    return score, out


def _optimizer(network: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(network.parameters(), lr=lr, weight_decay=5e-4)


def _taught(
    network: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, targets: Tensor,
    nodes: Tensor, data: Data, num_epochs: int,
) -> tuple[Score, Tensor, Tensor]:  # fmt: skip
    """The best epoch's accuracy and loss on the held-out nodes, and its logits; and the last's."""
    best, kept, state = (-1.0, 0.0), None, None
    for _ in range(num_epochs):
        network.train()
        optimizer.zero_grad()
        F.cross_entropy(network(x, data.edge_index)[nodes], targets[nodes]).backward()
        optimizer.step()
        network.eval()
        with torch.no_grad():
            out = network(x, data.edge_index)
        held, y = out[data.val_mask], data.y[data.val_mask]
        score = (held.argmax(-1) == y).double().mean().item(), -F.cross_entropy(held, y).item()
        if score > best:
            best, kept, state = score, out, copy.deepcopy(network.state_dict())
    network.load_state_dict(state)
    return best, kept, out
