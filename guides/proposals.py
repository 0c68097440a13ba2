# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Proposals of Metropolis steps that a warm-up adapts."""

import math

import torch
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
        self._positions: list[Tensor] = []
        self._mean = self._root = torch.empty(0)

    def propose(self, params: dict[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
        """Parameters, and the log-density of the way back less that of the way there."""
        here = torch.cat([value.flatten() for value in params.values()])
        log_ratio, step, mean, root = here.new_zeros(()), torch.randn_like(here), self._mean, None
        self._walks = not len(mean) or bool(torch.rand(()) >= _ANYWHERE)
        if len(mean):
            mean, root = mean.to(here), self._root.to(here)
            step = root @ step
        if self._walks or root is None:
            there = here + math.exp(self._log_scale) * step
        else:
            freedom = torch.tensor(_FREEDOM)
            width = torch.distributions.Chi2(freedom).sample().div(freedom).rsqrt()
            there = mean + width.to(here) * step
            ends = torch.stack([there, here]) - mean
            distance = torch.linalg.solve_triangular(root, ends.T, upper=False).square().sum(0)
            logs = -(_FREEDOM + len(here)) / 2 * (distance / _FREEDOM).log1p()
            log_ratio = logs[1] - logs[0]
        parts = there.split([value.numel() for value in params.values()])
        names = zip(params.items(), parts, strict=True)
        return {name: part.view_as(value).to(value) for (name, value), part in names}, log_ratio

    def decide(self, params: dict[str, Tensor], log_ratio: Tensor, learns: bool = True) -> bool:
        """Whether a step from ``params`` is accepted. The warm-up ``learns`` from it."""
        probability = log_ratio.clamp(max=0).exp().item() if log_ratio.isfinite() else 0.0
        self.num_steps += learns
        if learns and self.num_steps <= self.warmup_steps:
            if self._walks:
                self._log_scale += (probability - _ACCEPTED) / self.num_steps**0.6
            self._positions.append(torch.cat([value.flatten() for value in params.values()]))
            if not len(self._positions) % max(1, len(self._positions) // 20):
                self._learn()
        return torch.rand(()).item() < probability

    def _learn(self) -> None:
        # From the later half, so that the way to the posterior is forgotten.
        later = torch.stack(self._positions[len(self._positions) // 2 :]).double()
        number, size = later.shape
        if number >= _ENOUGH * size:
            self._mean = later.mean(0)
            covariance = (later - self._mean).T @ (later - self._mean) + 0.005 * torch.eye(size)
            self._root = torch.linalg.cholesky(covariance / (number + 5))
