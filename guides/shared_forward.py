# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

import operator
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from pyro.poutine.messenger import Messenger
from torch import nn

from pyro_nmm import Neighborhood
from pyro_nmm.models.param_store import register


@contextmanager
def evaluation(module: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients, and every part's own mode again afterwards."""
    modes = {part: part.training for part in module.modules()}
    try:
        module.eval()
        with torch.no_grad():
            yield
    finally:
        for part, mode in modes.items():
            part.training = mode


class NoSites(Messenger):
    """Refuses sample sites: the model takes over the guide's output, and would lack their prior."""

    def _pyro_sample(self, msg) -> None:
        raise ValueError(
            f"network has a sample site {msg['name']!r}, which would be drawn from its prior in "
            f"the guide and be missing in the model. For random weights write the two programs "
            f"out: def model(): nmm(hood, *network(hood, x), y, observed), and a guide that draws "
            f"the weights from an autoguide of poutine.block(model, hide=['z', 'c', 'y']), runs "
            f"poutine.block(poutine.condition(network, data=weights)) and ends in ordered_guide"
        )


class SharedForward:
    """
    A network that runs once for a pair of guide and model, so that both see the same dropout
    mask: the guide runs it, and the model, if it comes next with the same inputs and weights,
    takes over its output.

    :param nn.Module network: ``(hood, *inputs) -> (alpha, logits)``, or whatever else model and
        guide agree on; its parameters are registered with Pyro under ``name``.
    """

    def __init__(self, hood: Neighborhood | None, network: nn.Module, name: str) -> None:
        self.hood, self.network, self.name = hood, network, name
        self._kept: tuple | None = None

    def run(self, inputs: tuple) -> tuple[Any, Any]:
        """``alpha`` and ``logits``."""
        register(self.name, self.network)
        with NoSites():
            return self.network(self.hood, *inputs)

    def give(self, inputs: tuple) -> tuple[Any, Any]:
        """Runs the network in the guide, and keeps its output."""
        parameters = self.run(inputs)
        self._kept = inputs, self._state(), parameters
        return parameters

    def take(self, inputs: tuple) -> tuple[Any, Any]:
        """The guide's output, or the network's where no guide ran just before."""
        kept, self._kept = self._kept, None
        if kept is None or len(kept[0]) != len(inputs):
            return self.run(inputs)
        same = all(map(operator.is_, kept[0], inputs)) and kept[1] == self._state()
        return kept[2] if same else self.run(inputs)

    def _state(self) -> tuple:
        versions = [p._version for p in self.network.parameters()]
        return self.network.training, torch.is_grad_enabled(), versions
