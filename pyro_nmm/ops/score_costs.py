# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

r"""Costs that choices are charged with: the score-function half of the bound's gradient.

The bound :math:`E_q \sum_i f_i` has the gradient

.. math::

    E_q \Big[ \sum_i \nabla f_i + \sum_i \nabla \log q(c_i) \, (D_i - b_i) \Big] .

Each estimator is a choice of :math:`D_i`, the cost that :math:`c_i` can change; for REINFORCE [3]
the whole bound. The baseline :math:`b_i` is the mean of :math:`D_i` over the other draws [1, 2].

[1] Andriy Mnih, Danilo J. Rezende (2016) "Variational Inference for Monte Carlo Objectives", ICML,
https://arxiv.org/abs/1602.06725.
[2] Wouter Kool, Herke van Hoof, Max Welling (2019) "Buy 4 REINFORCE Samples, Get a Baseline for
Free!", ICLR workshop, https://openreview.net/forum?id=r1lgTGL5DE.
[3] Ronald J. Williams (1992) "Simple Statistical Gradient-Following Algorithms for Connectionist
Reinforcement Learning", Machine Learning 8, https://doi.org/10.1007/BF00992696.
"""

from enum import StrEnum
from math import prod
from typing import Literal

from torch import Tensor

from pyro_nmm.ops.counts import Groups


class ScoreEstimator(StrEnum):
    """What a choice is charged with in the gradient, see :class:`OrderedConditional`."""

    REWARD_TO_GO = "reward_to_go"  #: unbiased
    NO_SCORE = "no_score"  #: without the score, as in EM
    REINFORCE = "reinforce"  #: textbook REINFORCE


#: Values of :class:`ScoreEstimator`, for type checkers.
Estimator = Literal["reward_to_go", "no_score", "reinforce"]


def costs_to_go(component: Tensor, costs: Tensor) -> Tensor:
    r"""``(B, n)``: :math:`D_i = \sum_{i' > i} f_{i'}`, of costs :math:`f`, over the rows of row
    ``i``'s component."""
    return Groups(component[None], len(component)).later(costs.double())


def others_mean(costs: Tensor, dims: list[int]) -> Tensor | None:
    """Leave-one-out means over the draws along ``dims``; ``None`` if there is one draw."""
    count = prod(costs.shape[d] for d in dims)
    if count < 2:
        return None
    return (costs.sum(dims, keepdim=True) - costs) / (count - 1)
