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

from collections.abc import Callable
from enum import StrEnum
from math import prod

from pyro.distributions.score_parts import ScoreParts
from torch import Tensor

from pyro_nmm.ops.counts import Groups


class ScoreEstimator(StrEnum):
    """What a choice is charged with in the gradient, see :class:`OrderedConditional`."""

    REWARD_TO_GO = "reward_to_go"  #: unbiased
    NO_SCORE = "no_score"  #: without the score, as in EM
    REINFORCE = "reinforce"  #: textbook REINFORCE


def score_parts(
    estimator: ScoreEstimator, log_choice: Tensor, costs: Tensor, charge: Callable[[], Tensor]
) -> ScoreParts:
    r"""Score parts of :math:`q` for Pyro's losses, which add score times the whole bound. The score
    of a row has mean zero given the past, so the entropy term may subtract costs that its choice
    does not change. ``costs`` are :math:`f_i` ``(..., n)``, and ``charge`` makes :math:`D_i - b_i`.
    """
    log_prob = log_choice.sum(-1)
    if estimator is ScoreEstimator.REINFORCE:
        return ScoreParts(log_prob, log_prob, 0)  # type: ignore[arg-type]
    excess = costs.sum(-1, keepdim=True)
    if estimator is not ScoreEstimator.NO_SCORE:
        excess = excess - charge()
    variate = (log_choice * excess).sum(-1)
    # Zero with a derivative, because some losses add the entropy term to the bound's value.
    return ScoreParts(log_prob, log_prob, log_prob + (variate - variate.detach()))


def costs_to_go(component: Tensor, log_label: Tensor) -> Tensor:
    r"""``(B, n)``: :math:`D_i = \sum_{i' > i} f_{i'}` over the rows of row ``i``'s component."""
    return Groups(component[None], len(component)).later(log_label.double())


def others_mean(costs: Tensor, dims: list[int]) -> Tensor | None:
    """Leave-one-out means over the draws along ``dims``; ``None`` if there is one draw."""
    count = prod(costs.shape[d] for d in dims)
    if count < 2:
        return None
    return (costs.sum(dims, keepdim=True) - costs) / (count - 1)
