# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

r"""
Which costs a choice is charged with: the score-function half of the bound's gradient.

The bound is :math:`E_q \sum_i f_i` with :math:`f_i = \log p(y_i \mid \text{earlier rows})`,
and its gradient

.. math::

    E_q \Big[ \sum_i \nabla f_i + \sum_i \nabla \log q(c_i) \, (D_i - b_i) \Big] ,

where :math:`D_i` is the cost that :math:`c_i` can change. Each estimator is a choice of
:math:`D_i`; the baseline :math:`b_i` is the mean of :math:`D_i` over the other draws of the same
order, node by node: leave-one-out, [1] and [2]. With the whole bound for :math:`D_i` it is
REINFORCE [3].

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

import torch
from pyro.distributions.score_parts import ScoreParts
from torch import Size, Tensor

from pyro_nmm import backend
from pyro_nmm.neighborhood import Neighborhood
from pyro_nmm.ops.counts import Groups, choice_groups, on_edges
from pyro_nmm.ops.sampling import Draw, EdgeTerms


class ScoreEstimator(StrEnum):
    """What a choice is charged with in the gradient, see :class:`OrderedConditional`."""

    REWARD_TO_GO = "reward_to_go"  #: unbiased
    ONE_STEP_CREDIT = "one_step_credit"  #: nearly so, with far less variance
    NO_SCORE = "no_score"  #: without the score, as in EM
    REINFORCE = "reinforce"  #: textbook REINFORCE


def score_parts(
    estimator: ScoreEstimator, log_choice: Tensor, costs: Tensor, charge: Callable[[], Tensor]
) -> ScoreParts:
    r"""
    What Pyro's losses ask of :math:`q`. ``TraceGraph_ELBO`` adds score times cost with the whole
    bound for its cost. The score of a row has mean zero given the past, so any cost that its choice
    does not change may be subtracted again, row by row, in the entropy term.

    :param Tensor log_choice: ``(..., n)``, :math:`\log q(c_i \mid \text{earlier rows})`.
    :param Tensor costs: ``(..., n)``, :math:`f_i` without gradient.
    :param charge: makes ``(..., n)``, :math:`D_i - b_i`, where the estimator charges any.
    """
    log_prob = log_choice.sum(-1)
    if estimator is ScoreEstimator.REINFORCE:
        # As stock distributions have it.
        return ScoreParts(log_prob, log_prob, 0)  # type: ignore[arg-type]
    excess = costs.sum(-1, keepdim=True)
    if estimator is not ScoreEstimator.NO_SCORE:
        excess = excess - charge()
    variate = (log_choice * excess).sum(-1)
    # Zero with a derivative: some losses take the entropy term's value for the bound's.
    return ScoreParts(log_prob, log_prob, log_prob + (variate - variate.detach()))


def costs_to_go(component: Tensor, log_label: Tensor) -> Tensor:
    r"""
    :math:`D_i = \sum_{i' > i} f_{i'}` over the rows connected to row ``i``: other
    components are independent of it, so leaving them out has no bias.

    :param Tensor component: ``(n,)`` from :meth:`~pyro_nmm.Neighborhood.components`.
    :param Tensor log_label: ``(B, n)``, :math:`f_i`.
    """
    return Groups(component[None], len(component)).later(log_label.double())


def one_step_credits(
    rows: Neighborhood,
    terms: EdgeTerms,
    draw: Draw,
    log_label: Tensor,
    labels: Tensor,
    num_classes: int,
) -> Tensor:
    r"""
    What :math:`c_i = j` changes at first hand: for the later rows that have :math:`j` as
    a neighbour, :math:`f_{i'}` minus its value without the one count that row ``i`` added.

    .. math::

        D_i = \sum_{i' > i : j \in n(i')} f_{i'} - f_{i'}^{\setminus i}

    A count changes :math:`f_{i'}` in one of two ways, with an equal or another label, so
    all differences are two sums over the later edges of :math:`j`. Cost: :math:`O(B E)`.
    """
    if backend.compiled and rows.device.type == "cpu":
        return backend.compiled.one_step_credits(rows, terms, draw, log_label, labels, num_classes)
    attention, alpha, total = (t.double() for t in terms)
    attention = attention.exp()
    above, below = alpha + draw.same_label, total + draw.any_label
    scale = attention / log_label.double().exp().index_select(1, rows.row)
    now = above / below
    # Where no earlier row chose the source, no count can be taken away, and the value is not used.
    fewer = (below - 1).where(draw.any_label > 0, below)
    other = -torch.log1p(scale * (above / fewer - now))
    equal_count = (above - 1).where(draw.same_label > 0, above)
    equal = -torch.log1p(scale * (equal_count / fewer - now))
    by_source, by_label = choice_groups(rows, on_edges(rows, labels), num_classes)
    later = by_source.later(other) + by_label.later(equal - other)
    return later.gather(1, draw.edges)


def less_baseline(costs: Tensor, own: Size, fresh: Callable[[], Tensor]) -> Tensor:
    """
    Costs ``(..., n)`` less their mean over the other draws, or less that of one more draw.

    :param Size own: the batch shape of the parameters: draws along dimensions of size one share
        them.
    :param fresh: the costs of one more draw, for where there are no others.
    """
    baseline = others_mean(costs, [d for d, size in enumerate(own) if size == 1])
    return costs - (fresh() if baseline is None else baseline)


def others_mean(costs: Tensor, dims: list[int]) -> Tensor | None:
    """
    Leave-one-out means of ``costs`` over ``dims``, the batch dimensions whose draws share
    all parameters; ``None`` if there is only one such draw.
    """
    count = prod(costs.shape[d] for d in dims)
    if count < 2:
        return None
    return (costs.sum(dims, keepdim=True) - costs) / (count - 1)
