# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Programs that share one run of a network, and the contexts in which they run."""

import operator
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import pyro
import torch
from pyro.distributions import TorchDistribution
from pyro.poutine.messenger import Messenger
from torch import Tensor, nn

from pyro_nmm import Neighborhood
from pyro_nmm.arguments import as_tensor
from pyro_nmm.model_arguments import check_hood, order_to_rows
from pyro_nmm.models.networks import register

Family = TypeVar("Family", bound=TorchDistribution)


@contextmanager
def unvalidated() -> Iterator[None]:
    """Around Pyro's steps, whose inputs are checked before, and whose NaN is our error."""
    with warnings.catch_warnings(), pyro.validation_enabled(False):
        warnings.filterwarnings("ignore", "Encountered (NaN|.*inf)")
        yield


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


def as_order(hood: Neighborhood, order: Any) -> Tensor:
    """A permutation of the nodes, default random."""
    every = torch.randperm(hood.num_nodes, device=hood.device) if order is None else order
    order = as_tensor("order", every, hood.device)
    order_to_rows(hood, order)
    return order


class NoSites(Messenger):
    """Refuses sample sites: the model takes over the guide's output, and would lack their prior."""

    def _pyro_sample(self, msg) -> None:
        raise ValueError(
            f"network has a sample site {msg['name']!r}, which the model would lack: for random "
            f"weights write both programs out, the guide as an autoguide of "
            f"poutine.block(model, hide=['z', 'c', 'y']) and an ordered_guide"
        )


class SharedForward(nn.Module, Generic[Family]):
    """A model and a guide that share one run of a network, so that both see one dropout mask."""

    def __init__(
        self,
        hood: Neighborhood,
        network: nn.Module,
        name: str,
        family: Callable[..., Family],
    ) -> None:
        super().__init__()
        check_hood(hood)
        self.hood, self.network, self.name, self.family = hood, network, name, family
        self._kept: tuple | None = None

    def mixture(self, *inputs: Any) -> Family:
        """The fitted distribution, for queries: evaluation mode, without gradients."""
        with evaluation(self):
            outputs = [part if part is None else part.detach() for part in self(*inputs)]
        return self.family(self.hood, *outputs)

    def forward(self, *inputs: Any) -> Any:
        """The network's output: ``alpha``, ``logits`` and, if edges relabel, ``relabel``."""
        register(self.name, self.network)
        with NoSites():
            return self.network(self.hood, *inputs)

    def give(self, inputs: tuple) -> Any:
        """Runs the network in the guide, and keeps its output."""
        outputs = self(*inputs)
        self._kept = inputs, self._state(), outputs
        return outputs

    def take(self, inputs: tuple) -> Any:
        """The guide's output, or the network's if no guide ran just before."""
        kept, self._kept = self._kept, None
        if kept is None or len(kept[0]) != len(inputs):
            return self(*inputs)
        same = all(map(operator.is_, kept[0], inputs)) and kept[1] == self._state()
        return kept[2] if same else self(*inputs)

    def _state(self) -> tuple:
        versions = [p._version for p in self.network.parameters()]
        return self.network.training, torch.is_grad_enabled(), versions
