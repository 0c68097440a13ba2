# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Accuracy and information of each annotator, with intervals."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_nmm.models.annotators.answers import Answers
from pyro_nmm.models.annotators.consensus import Consensus
from pyro_nmm.models.annotators.model import Annotators, shares
from pyro_nmm.models.hidden import HiddenField, Values


class Quality(NamedTuple):
    """Posterior means and ends of intervals, ``(M,)`` each."""

    mean: Tensor
    low: Tensor
    high: Tensor


def accuracy(field: HiddenField | Consensus, level: float = 0.9) -> Quality:
    r"""Accuracy of every annotator, :math:`\sum_k \pi_k P_{mkk}`, with :math:`\pi` the labels'
    shares among the nodes. On a graph it is judged by the labels around the nodes.

    >>> hood = Neighborhood(torch.empty(2, 0, dtype=torch.long), num_nodes=200)
    >>> truth = torch.arange(200) % 2
    >>> wrong = torch.rand(200, 3) < torch.tensor([0.05, 0.1, 0.4])
    >>> consensus = Annotators(2).fit(hood, truth[:, None] ^ wrong.long())
    >>> accuracy(consensus).mean.argmin()
    tensor(2)

    :param field: a :class:`Consensus`, or a field fitted to :class:`Annotators`, whose answers name
        labels.
    :param float level: the probability with which intervals hold the accuracy.
    :return: means and ends of intervals, ``(M,)``. Cost of a consensus of ``A`` answers: 100 times
        20 steps of EM, :math:`O(N C + A C)` each.
    :raises ValueError: if answers name no labels, and for a ``level`` outside of (0, 1).
    """
    must = "annotators whose answers name labels, aligned and without num_types: see information"
    confusion, share = _by_label(field, f"accuracy needs {must}", named=True)
    right = confusion.diagonal(dim1=-2, dim2=-1)
    return _quality((right * share[:, None, : right.shape[-1]]).sum(-1), level)


def information(field: HiddenField | Consensus, level: float = 0.9) -> Quality:
    r"""The mutual information of an answer and the label, in nats. Answers need not name labels.

    .. math::

        I(a_m; u) = \sum_{k, a} \pi_k P_{mka} \log \frac{P_{mka}}{\sum_l \pi_l P_{mla}}

    >>> hood = Neighborhood(torch.empty(2, 0, dtype=torch.long), num_nodes=200)
    >>> truth = torch.arange(200) % 2
    >>> noise = torch.randint(2, (200,))
    >>> answers = torch.stack([truth, 1 - truth, noise], 1)
    >>> consensus = Annotators(2, aligned=False).fit(hood, answers)
    >>> information(consensus).mean > 0.5  # of log 2 = 0.69 nats
    tensor([ True,  True, False])

    :param field: as for :func:`accuracy`.
    :return: ``(M,)`` means and ends, as of :func:`accuracy`, at the same cost.
    :raises ValueError: for a field of another emission, and a ``level`` outside of (0, 1).
    """
    confusion, share = _by_label(field, "information needs a field fitted to Annotators")
    joint = confusion * share[:, None, :, None]
    parts = joint, joint.sum(-1), joint.sum(-2)
    whole, labels, answers = (torch.special.entr(part).flatten(2).sum(-1) for part in parts)
    return _quality(labels + answers - whole, level)


def _quality(draws: Tensor, level: float) -> Quality:
    """Of draws ``(T, M)``."""
    if not 0 < level < 1:
        raise ValueError(f"level must lie between 0 and 1, got {level}")
    ends = draws.new_tensor([(1 - level) / 2, (1 + level) / 2])
    return Quality(draws.mean(0), *draws.quantile(ends, dim=0))


def _by_label(
    fitted: HiddenField | Consensus, must: str, named: bool = False
) -> tuple[Tensor, Tensor]:
    """``(T, M, C, K)`` confusion matrices as drawn, and ``(T, C)`` the labels' shares."""
    field = fitted.field if isinstance(fitted, Consensus) else fitted
    emission = field.emission
    if not isinstance(emission, Annotators) or (named and not emission.named):
        raise ValueError(must)
    if isinstance(fitted, Consensus):
        # Dependent errors lower the powers of the priors: their sum is at least 1.5 here.
        total = sum(power for name, power in fitted.powers.items() if name != "answers")
        around = max(1, 1.5 / total) * fitted.log_prior
        # Neighbours or a classifier tell nodes apart.
        if around.softmax(-1).std(0).max() > 1e-3:
            start = _of_labels(field.values).double()
            return _beside_neighbors(around, start, Answers.of(fitted.answers))
    confusion = _of_labels(field.draws)
    share = [(field.samples == k).to(confusion).mean(-1) for k in range(emission.num_labels)]
    return confusion, torch.stack(share, -1)


def _of_labels(values: Values) -> Tensor:
    """``(..., M, C, K)`` confusion matrices given labels, of those given types if there are any."""
    if "types" not in values:
        return values["confusion"]
    return values["types"].unsqueeze(-3) @ values["confusion"]


def _beside_neighbors(around: Tensor, start: Tensor, entries: Answers) -> tuple[Tensor, Tensor]:
    """Confusion matrices of each annotator alone, beside the labels around its nodes, so that
    shared errors raise no accuracy. The nodes' weights are random (Newton and Raftery 1994, JRSS B
    56), and so is the power of the labels around them: .4 is the standard deviation of its
    logarithm. If errors repeat a common guess in 0, 30 and 60 % of the answers, intervals of 90 %
    hold 94, 98 and 90 % of the accuracies, and those of the field's draws 87, 70 and 0 %.
    """
    matrices, share, num_answers = [], [], start.shape[-1]
    for _ in range(100):
        weight = torch.empty(len(around), 1).exponential_().to(around)
        labels = (math.exp(0.4 * torch.randn(()).item()) * around).softmax(-1) * weight
        share.append(labels.sum(0) / labels.sum())
        labels, weight = labels[entries.node], weight[entries.node]
        # A prior of .3 answers, because rows that are pulled to the middle bias accuracies. It is
        # random, as the nodes' weights: few answers leave a wide interval.
        prior = torch._standard_gamma(0.3 * (start / 2 + 1 / (2 * num_answers))).clamp(min=1e-30)
        confusion = start
        for _ in range(20):
            joint = labels * confusion[entries.annotator, :, entries.answer]
            joint = joint * (weight / joint.sum(-1, keepdim=True))
            confusion = shares(entries.confusion(joint, num_answers) + prior)
        matrices.append(confusion)
    return torch.stack(matrices), torch.stack(share)
