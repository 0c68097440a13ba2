# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Do annotators agree more often than independent errors explain?"""

from typing import NamedTuple

import torch
from torch import Tensor

from pyro_nmm.models.latent.field import HiddenField

#: Neighbours predict the label with this power while annotators' errors are compared.
POWER = 1.5
#: Steps of EM for the confusion matrices given the neighbours, and answers a row of their prior.
NUM_STEPS, STRENGTH = 20, 0.3


class Dependence(NamedTuple):
    r"""
    Agreement of annotators at the same node, beyond what their accuracies explain.

    Each annotator's confusion matrix is fitted to the labels around its nodes, without any other
    annotator. So the expected agreement of independent errors does not depend on the consensus.

    .. math::

        \rho = \frac{\text{observed} - \text{expected}}{\text{largest} - \text{expected}}

    The largest expected agreement has the Bhattacharyya coefficient of two rows in place of the
    probability of the same answer.
    """

    excess: float  #: :math:`\rho`, zero if errors are independent
    error: float  #: its standard error over nodes
    number: float  #: mean number of answers of an answered node

    @property
    def found(self) -> bool:
        """Whether the excess is above .05 by three standard errors."""
        return self.excess > 0.05 + 3 * self.error

    def __str__(self) -> str:
        if self.number <= 1:
            return "dependence of annotators: unknown with one answer a node"
        verdict = "errors are dependent" if self.found else "no dependence found"
        return f"excess agreement {self.excess:.3f} ± {self.error:.3f}: {verdict}"


def excess_agreement(field: HiddenField, answers: Tensor, around: Tensor) -> Dependence:
    """
    :param Tensor around: ``(N, C)`` label distributions of the neighbours.
    :return: see :class:`Dependence`. Cost: :math:`O(N M C K)`.
    """
    there = answers >= 0
    number = there.sum(1)
    mean = number[number > 0].double().mean().item()
    if mean == 1:
        return Dependence(0.0, 0.0, 1.0)
    labels = powered(around, POWER)
    node, annotator = there.nonzero(as_tuple=True)
    given = answers[node, annotator]
    confusion = fit_confusion(marginal_confusion(field), labels[node], annotator, given)
    votes = labels.new_zeros(len(answers), confusion.shape[-1])
    votes.index_put_((node, given), votes.new_ones(()), accumulate=True)
    observed = (votes * (votes - 1)).sum(1) / 2
    same, most = (_pairs(rows, there, labels) for rows in (confusion, confusion.sqrt()))
    more = observed - same
    room = (most - same).sum().clamp(min=torch.finfo(more.dtype).tiny)
    error = more.square().sum().sqrt() / room
    return Dependence((more.sum() / room).item(), error.item(), mean)


def powered(around: Tensor, power: float) -> Tensor:
    """Label distributions to a power, in double precision."""
    found = around.double().pow(power)
    return found / found.sum(-1, keepdim=True)


def marginal_confusion(field: HiddenField) -> Tensor:
    """``(M, C, K)`` fitted probabilities of each annotator's answers given the label."""
    confusion = field.values["confusion"].double()
    return field.values["types"].double() @ confusion if "types" in field.values else confusion


def fit_confusion(start: Tensor, labels: Tensor, annotator: Tensor, given: Tensor) -> Tensor:
    """``(M, C, K)`` by EM, each annotator alone, from ``A`` answers ``given`` at nodes whose label
    distributions are ``(A, C)``, times weights of the nodes."""
    size = num_annotators, _, num_answers = start.shape
    confusion, flat = start, annotator * num_answers + given
    weight = labels.sum(-1, keepdim=True)
    # Little, for rows that are pulled to the middle let few answers look dependent.
    prior = STRENGTH * (start / 2 + 1 / (2 * num_answers))
    for _ in range(NUM_STEPS):
        joint = labels * confusion[annotator, :, given]
        joint = joint * (weight / joint.sum(-1, keepdim=True))
        counts = labels.new_zeros(num_annotators * num_answers, size[1]).index_add_(0, flat, joint)
        counts = counts.view(num_annotators, num_answers, size[1]).mT + prior
        confusion = counts / counts.sum(-1, keepdim=True)
    return confusion


def _pairs(rows: Tensor, there: Tensor, labels: Tensor) -> Tensor:
    """``(N,)``: sums over pairs of a node's annotators of products of their rows, given labels."""
    given = there.to(rows)
    sums = (given @ rows.flatten(1)).unflatten(1, rows.shape[1:])
    squares = given @ rows.square().sum(-1)
    return ((sums.square().sum(-1) - squares) / 2 * labels).sum(-1)
