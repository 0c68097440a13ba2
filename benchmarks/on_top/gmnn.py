# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
GMNN (Qu, Bengio and Tang 2019, "Graph Markov Neural Networks", ICML,
https://github.com/DeepGraphLearning/GMNN): two networks that teach each other, one of features and
one of the neighbours' labels.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from math import inf

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import RMSprop
from torch_geometric.data import Data

from benchmarks.on_top.data import epochs, held_out_losses

#: Labels are drawn from a softmax of the logits over this temperature.
SHARPNESS = 0.1


def gmnn(make: Callable[[int], nn.Module], data: Data, num_epochs: int = 100) -> Tensor:
    """
    ``(N, C)``: logits of the features' network at its best epoch on the held-out nodes, of two
    learning rates the better one there. The schedule is the published one, one round of three
    phases. The features' network learns the training labels; the labels' network learns labels
    that are drawn from the first one's predictions; the features' network learns what the labels'
    network predicts. Training nodes keep their labels.

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
        modules = make(data.num_features), make(num_classes)
        features, labels = (
            (module, RMSprop(module.parameters(), lr=lr, weight_decay=5e-4)) for module in modules
        )
        sure = one_hot(torch.zeros_like(data.y))
        _, out, _ = learned(features, data.x, sure, train)
        drawn = one_hot(torch.distributions.Categorical(logits=out / SHARPNESS).sample())
        _, _, last = learned(labels, drawn, drawn, every)
        targets = sure.where(train[:, None], last.softmax(-1))
        return learned(features, data.x, targets, every)

    return min(map(one_round, (0.01, 0.05)), key=lambda found: found[0])[1]
