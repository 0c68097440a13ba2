# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Communities of a graph, and the loop that fits a network to it."""

from collections.abc import Callable

from torch import nn
from torch.optim import Optimizer


def descend(module: nn.Module, optimizer: Optimizer, loss: Callable, num_epochs: int) -> nn.Module:
    """The module in evaluation mode, after epochs of steps on its loss."""
    module.train()
    for _ in range(num_epochs):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    return module.eval()
