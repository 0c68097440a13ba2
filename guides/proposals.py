# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Proposals of Metropolis steps that a warm-up adapts."""

import math

import torch
from pyro.ops.welford import WelfordCovariance
from torch import Tensor

#: The best share of accepted steps of a random walk (Roberts, Gelman and Gilks 1997).
_ACCEPTED = 0.234
#: More parameters have no joint moves. Effective draws of the slowest of 8 in a CPU minute with and
#: without: 515 and 113 with 200 nodes, 271 and 536 with 2,000. Of 4: 923 and 611 with 2,000; of 15:
#: 88 and 250 with 200.
FEW = 8
#: Positions a parameter after which the moments of proposals are theirs, not zero and one.
_ENOUGH = 10
#: The share of proposals that do not depend on the present parameters, and the degrees of freedom
#: of their Student t. With .5 in place of .9 there are .8 and .6 times as many effective draws with
#: 10,000 nodes, and .98 and .84 with 400; with none, the moments are not learned on the way to the
#: posterior. 2 or 10 degrees change less than 10 %.
_ANYWHERE, _FREEDOM = 0.9, 5.0


class Proposals:
    """Of unconstrained parameters, by the moments of earlier positions: steps of a random walk, or
    draws of a Student t, at random."""

    def __init__(self, warmup_steps: int) -> None:
        self.warmup_steps, self.num_steps = warmup_steps, 0
        self._log_scale, self._walks = math.log(0.5), True
        self._positions = WelfordCovariance(diagonal=False)

    def propose(self, params: dict[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
        """Parameters, and the log-density of the way back less that of the way there."""
        here = torch.cat([value.flatten() for value in params.values()])
        log_ratio, step = here.new_zeros(()), torch.randn_like(here)
        enough = self._positions.n_samples >= _ENOUGH * len(here)
        self._walks = not enough or bool(torch.rand(()) >= _ANYWHERE)
        if enough:
            covariance = self._positions.get_covariance().double()
            root = torch.linalg.cholesky(covariance).to(here)
            step = root @ step
        if self._walks:
            there = here + math.exp(self._log_scale) * step
        else:
            mean, freedom = self._positions._mean.to(here), torch.tensor(_FREEDOM)
            width = torch.distributions.Chi2(freedom).sample().div(freedom).rsqrt()
            there = mean + width.to(here) * step
            ends = torch.stack([there, here]) - mean
            distance = torch.linalg.solve_triangular(root, ends.T, upper=False).square().sum(0)
            logs = -(_FREEDOM + len(here)) / 2 * (distance / _FREEDOM).log1p()
            log_ratio = logs[1] - logs[0]
        parts = there.split([value.numel() for value in params.values()])
        names = zip(params.items(), parts, strict=True)
        return {name: part.view_as(value) for (name, value), part in names}, log_ratio

    def decide(self, params: dict[str, Tensor], log_ratio: Tensor, learns: bool = True) -> bool:
        """Whether a step from ``params`` is accepted. The warm-up ``learns`` from it."""
        probability = log_ratio.clamp(max=0).exp().item() if log_ratio.isfinite() else 0.0
        self.num_steps += learns
        if learns and self.num_steps <= self.warmup_steps:
            if self._walks:
                self._log_scale += (probability - _ACCEPTED) / self.num_steps**0.6
            if self.num_steps == self.warmup_steps // 4:  # the way to the posterior is forgotten
                self._positions.reset()
            self._positions.update(torch.cat([value.flatten() for value in params.values()]))
        return torch.rand(()).item() < probability
