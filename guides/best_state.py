# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The best state of a noisy fit."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import pyro
import torch
from torch import Tensor, nn


class BestState(nn.Module):
    r"""The parameters with the least loss among the states given to :meth:`update`, because a noisy
    gradient can worsen a good start. It keeps the last state whose estimates ``(S,)`` of the loss
    have a mean within two standard errors of the least, :math:`\bar\ell \le \ell_{\min} + 2 s`. A
    fit by SVI that starts at the mean field ends no worse than the mean field:

    >>> from pyro.infer import SVI, TraceGraph_ELBO
    >>> from pyro.optim import Adam
    >>> from pyro_nmm import Neighborhood
    >>> from pyro_nmm.guides import FieldGuide, mean_field
    >>> from pyro_nmm.models import FreeNMM, grid_edges, ising
    >>> field = ising(grid_edges(3, 3), coupling=0.4, field=torch.full((9,), 0.1))
    >>> hood, best = Neighborhood.grid(3, 3), BestState()
    >>> family = FieldGuide(hood, FreeNMM(hood, 2, mean_field(field).marginals), field)
    >>> svi = SVI(family.model, family.guide, Adam({"lr": 0.1}), TraceGraph_ELBO())
    >>> for step in range(40):
    ...     if step % 10 == 0:
    ...         kept = best.update(svi.evaluate_loss() for _ in range(20))
    ...     loss = svi.step()
    >>> best.restore()
    """

    def __init__(self) -> None:
        super().__init__()
        self.least = math.inf  #: the least mean loss
        self.saved: dict[str, Tensor] = {}  #: parameters by name

    def update(
        self, losses: Iterable[float], parameters: Mapping[str, Tensor] | None = None
    ) -> bool:
        """Keep a state if the mean of its estimated losses is low enough, and return whether.

        :param parameters: tensors by name, by default the parameters of Pyro's store.
        :raises ValueError: for fewer than two estimates, and estimates that are not finite.
        """
        values = torch.tensor(list(losses), dtype=torch.double)
        if len(values) < 2 or not values.isfinite().all():
            raise ValueError(f"losses must hold two finite numbers at least, got {values.tolist()}")
        mean, error = values.mean().item(), (values.std() / len(values) ** 0.5).item()
        kept = mean <= self.least + 2 * error
        if kept:
            self.saved = {k: v.detach().clone() for k, v in _or_store(parameters).items()}
        self.least = min(self.least, mean)
        return kept

    @torch.no_grad()
    def restore(self, parameters: Mapping[str, Tensor] | None = None) -> None:
        """Write the best state into the tensors."""
        for name, value in _or_store(parameters).items():
            if name in self.saved:
                value.data.copy_(self.saved[name])

    def get_extra_state(self) -> dict[str, Any]:
        """For the state of a module that holds this one, as checkpoints keep it."""
        return {"least": self.least, "saved": self.saved}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Inverse of :meth:`get_extra_state`."""
        self.least, self.saved = state["least"], state["saved"]


def _or_store(parameters: Mapping[str, Tensor] | None) -> Mapping[str, Tensor]:
    return dict(pyro.get_param_store().named_parameters()) if parameters is None else parameters
