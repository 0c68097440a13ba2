# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Proposals of a Metropolis random walk that a warm-up adapts."""

import math

import torch
from pyro.ops.welford import WelfordCovariance
from torch import Tensor

#: The best share of accepted proposals is 0.07 if densities are estimated with the best noise, and
#: 0.234 if they are exact (Sherlock, Thiery, Roberts and Rosenthal 2015).
_ACCEPTED = 0.2
#: A warm-up that accepts fewer ends the moves: they would cost time for nothing.
_LEAST = 0.02
#: More parameters have no joint moves: the number of steps that a walk needs grows with them, and
#: its covariance with their square. They serve programs with a few; 50 or 200 would, too.
MOST = 100
#: Positions after which the covariance of the walk is theirs, not the identity.
_ENOUGH = 20


class RandomWalk:
    """Steps of unconstrained parameters, with the covariance of earlier positions."""

    def __init__(self, warmup_steps: int, useful: bool = True) -> None:
        self.warmup_steps, self.useful = warmup_steps, useful
        self.num_steps = 0
        self._accepted = 0.0
        self._log_scale = math.log(0.5)
        self._covariance = WelfordCovariance(diagonal=False)

    def propose(self, params: dict[str, Tensor]) -> dict[str, Tensor]:
        first = next(iter(params.values()))
        sizes = [value.numel() for value in params.values()]
        step = torch.randn(sum(sizes), dtype=first.dtype, device=first.device)
        if self._covariance.n_samples >= _ENOUGH:
            covariance = self._covariance.get_covariance().double()
            step = torch.linalg.cholesky(covariance).to(step.dtype) @ step
        names = zip(params.items(), (math.exp(self._log_scale) * step).split(sizes), strict=True)
        return {name: value + part.view_as(value) for (name, value), part in names}

    def decide(self, params: dict[str, Tensor], log_ratio: Tensor) -> bool:
        """Whether the step from ``params`` is accepted. The warm-up learns from it."""
        probability = log_ratio.clamp(max=0).exp().nan_to_num(0).item()
        self.num_steps += 1
        if self.num_steps <= self.warmup_steps:
            self._learn(params, probability)
        return torch.rand(()).item() < probability

    def _learn(self, params: dict[str, Tensor], probability: float) -> None:
        self._accepted += probability
        self._log_scale += (probability - _ACCEPTED) / self.num_steps**0.6
        if self.num_steps == self.warmup_steps // 4:  # the way to the posterior is forgotten
            self._covariance.reset()
        self._covariance.update(torch.cat([value.flatten() for value in params.values()]))
        if self.num_steps == self.warmup_steps and self._accepted < _LEAST * self.num_steps:
            self.useful = False
