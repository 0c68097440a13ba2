# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

r"""Metropolis steps of parameters along the gradient of a log-density, which a warm-up adapts.

With the negative Hessian :math:`H` and the gradient :math:`g` a step goes to

.. math::

    \theta' = \theta + a H^{-1} g(\theta) + \sqrt{a (2 - a)} \, H^{-1/2} \epsilon , \qquad
    \epsilon \sim \mathrm{Normal}(0, 1) .

For a normal density all steps are accepted: with :math:`a = 1` they are independent draws of it,
and with :math:`1 < a < 2` they lie on the other side of its mean [1], so that parameters leave
where choices hold them in half as many sweeps. Small :math:`a` is the Langevin algorithm [2].

[1] Stephen L. Adler (1981) "Over-relaxation method for the Monte Carlo evaluation of the partition
function for multiquadratic actions", Physical Review D 23,
https://doi.org/10.1103/PhysRevD.23.2901.
[2] Gareth O. Roberts, Osnat Stramer (2002) "Langevin Diffusions and Metropolis-Hastings
Algorithms", Methodology and Computing in Applied Probability 4,
https://doi.org/10.1023/A:1023562417138.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

#: The longest steps. Autocorrelation of an attention coefficient with 10,000 nodes, in sweeps that
#: are over-relaxed, too: 67 at 1, 46 at 1.8, 100 at 1.95, where every third step is rejected.
LONGEST = 1.8
#: The share of accepted steps to which shorter ones are adapted. With .75 the autocorrelation is 86
#: in place of 55: a rejected step that is over-relaxed goes back.
ACCEPTED = 0.85
#: The least curvature, of a standard deviation of ten without constraints.
LEAST = 0.01
#: With more parameters NUTS takes the place of these steps. A Hessian is two gradients a parameter;
#: 50 or 200 would do, too.
MOST = 100
#: Differences of gradients are taken over so many standard deviations.
APART = 0.1


class Langevin:
    """Steps from one point to another. A point has a ``position`` ``(d,)``, its ``log_prob``, a
    number, and the ``gradient`` of it ``(d,)``, each in double precision."""

    def __init__(self, warmup_steps: int) -> None:
        self.warmup_steps, self.num_steps, self.num_accepted = warmup_steps, 0, 0
        self._num_learned, self._log_step = 0, 0.0
        self._hessian = self.inverse = self._root = torch.empty(0)

    def step(self, here: Any, at: Callable[[Tensor], Any]) -> Any:
        """The next point, ``here`` or one made by ``at``."""
        if self.num_steps == self.warmup_steps:
            self.num_accepted = 0
        learns = self.num_steps < self.warmup_steps or not len(self._hessian)
        # After 1, 2, 4, 8 ... steps, so that the way to the posterior is forgotten.
        if learns and not self.num_steps & (self.num_steps - 1):
            self.learn(here, at)
            self._num_learned = self.num_steps
        a = self.step_size
        width = math.sqrt(a * (2 - a))
        mean = here.position + a * self.inverse @ here.gradient
        there = at(mean + width * self._root @ torch.randn_like(mean))
        back = there.position + a * self.inverse @ there.gradient
        log_ratio = there.log_prob - here.log_prob
        log_ratio -= self._distance(here.position - back) / (2 * width**2)
        log_ratio += self._distance(there.position - mean) / (2 * width**2)
        probability = math.exp(min(log_ratio, 0.0)) if math.isfinite(log_ratio) else 0.0
        self.num_steps += 1
        if learns:
            self._log_step += (probability - ACCEPTED) / (self.num_steps - self._num_learned) ** 0.6
            self._log_step = min(self._log_step, math.log(LONGEST))
        accepted = torch.rand(()).item() < probability
        self.num_accepted += accepted
        return there if accepted else here

    def _distance(self, difference: Tensor) -> float:
        return (difference @ self._hessian @ difference).item()

    def learn(self, here: Any, at: Callable[[Tensor], Any]) -> None:
        """The mean of the Hessian, by differences of gradients, and of the one before."""
        known, size = len(self._hessian) > 0, len(here.position)
        scale = self.inverse.diag().sqrt() if known else torch.full_like(here.position, APART)
        steps = (APART * scale).diag()
        ends = [[at(here.position + sign * step).gradient for step in steps] for sign in (1, -1)]
        plus, minus = map(torch.stack, ends)
        found = (minus - plus) / (2 * APART * scale[:, None])
        values, vectors = torch.linalg.eigh((found + found.T) / 2)
        if not values.isfinite().all():
            values, vectors = torch.ones_like(values), torch.eye(size, dtype=values.dtype)
        # Where the density is no hill, its curvature is as good a scale with the other sign.
        found = vectors * values.abs().clamp(min=LEAST) @ vectors.T
        self._hessian = (self._hessian + found) / 2 if known else found
        self.inverse = torch.linalg.inv(self._hessian)
        self._root = torch.linalg.cholesky(self.inverse)

    @property
    def step_size(self) -> float:
        return math.exp(self._log_step)

    @property
    def acceptance(self) -> float:
        """Share of accepted steps after the warm-up."""
        after = self.num_steps - self.warmup_steps
        return self.num_accepted / max(1, after if after > 0 else self.num_steps)
