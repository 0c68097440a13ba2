# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Loops that fit networks and a few parameters."""

from collections.abc import Callable, Sequence

from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer


def descend(module: nn.Module, optimizer: Optimizer, loss: Callable, num_epochs: int) -> nn.Module:
    """The module in evaluation mode, after epochs of steps on its loss."""
    module.train()
    for _ in range(num_epochs):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    return module.eval()


def minimise(loss: Callable[[], Tensor], values: Sequence[Tensor], num_steps: int) -> None:
    """Move values to a minimum of a loss by L-BFGS."""
    optimizer = LBFGS(values, max_iter=num_steps, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        cost = loss()
        cost.backward()
        return cost

    optimizer.step(closure)
