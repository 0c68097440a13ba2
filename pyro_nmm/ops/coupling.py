# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

r"""Chains that meet: how many Gibbs sweeps are enough.

Two chains, of which one is ``L`` sweeps ahead, draw each row from a coupling of their conditionals
in which it has the same choice as often as can be. Once all rows agree they stay together. If they
are together :math:`\tau` sweeps after the first one's start, then the distance in total variation
between a chain's state after ``t`` sweeps and its limit is at most [1]

.. math::

    E \max\Big(0, \Big\lceil \frac{\tau - L - t}{L} \Big\rceil\Big) .

[1] Niloy Biswas, Pierre Jacob, Paul Vanetti (2019) "Estimating Convergence of Markov chains with
L-Lag Couplings", NeurIPS, https://arxiv.org/abs/1905.09971.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from pyro_nmm.arguments import check_integers, check_positive
from pyro_nmm.neighborhood import Neighborhood
from pyro_nmm.ops.entries import Draw, Entries, shift_evidence
from pyro_nmm.ops.sampling import uniforms_of
from pyro_nmm.ops.sweeps import sweep


class Meetings(NamedTuple):
    """Numbers of sweeps until two chains meet."""

    times: Tensor  #: ``(P,)`` of pairs, by the chain that is ahead; ``inf`` if they did not meet
    lag: int  #: by how many sweeps it is ahead

    def distance(self, num_sweeps: int) -> float:
        """A bound on the total variation between states after so many sweeps and the posterior,
        the mean over pairs."""
        check_integers(0, num_sweeps=num_sweeps)
        late = ((self.times - self.lag - num_sweeps) / self.lag).ceil().clamp(min=0)
        return late.mean().item()

    def num_sweeps(self, distance: float = 0.01) -> int:
        """The least number of sweeps with such a bound."""
        check_positive(distance=distance)
        if self.times.isinf().any():
            raise ValueError("chains did not meet: raise max_sweeps")
        number = 0
        while self.distance(number) > distance:
            number += 1
        return number


@torch.no_grad()
def meeting_time(
    rows: Neighborhood, entries: Entries, draw: Draw, lag: int, max_sweeps: int
) -> float:
    """Meeting time of chains from two draws. Cost: twice as many sweeps, :math:`O(E C)` each."""
    from pyro_nmm.compiled.coupling import coupled

    entries, _ = shift_evidence(rows, entries)
    first = Draw(draw.edges[:1], draw.labels[:1])
    ahead, *_ = sweep(rows, entries, first, uniforms_of(rows, lag, 1))
    edges, labels = (
        torch.cat([one, two[1:]]).cpu().numpy().copy()
        for one, two in ((ahead.edges, draw.edges), (ahead.labels, draw.labels))
    )
    for start in range(0, max_sweeps, lag):
        uniforms = uniforms_of(rows, min(lag, max_sweeps - start), 3)
        if met := coupled(rows, entries, edges, labels, uniforms):
            return float(lag + start + met)
    return torch.inf
