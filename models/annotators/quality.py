# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""How good each annotator is: accuracy and information, with intervals."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_nmm.models.annotators.answers import Entries
from pyro_nmm.models.annotators.consensus import Consensus
from pyro_nmm.models.annotators.model import Annotators
from pyro_nmm.models.hidden import HiddenField

#: Draws of confusion matrices beside the neighbours.
NUM_DRAWS = 100
#: The least sum of the priors' powers there, which dependent errors lower, and the standard
#: deviation of the logarithm of all powers.
POWER, UNSURE = 1.5, 0.4
#: Steps of EM for these matrices, and answers that the prior of a row counts for.
NUM_STEPS, STRENGTH = 20, 0.3


class Quality(NamedTuple):
    """Posterior means and ends of intervals, ``(M,)`` each."""

    mean: Tensor
    low: Tensor
    high: Tensor


def accuracy(field: HiddenField | Consensus, level: float = 0.9) -> Quality:
    r"""Accuracy of every annotator, :math:`\sum_k \pi_k P_{mkk}`, with :math:`\pi` the labels'
    shares among the nodes. Confusion matrices of a consensus on a graph do not come from the
    agreement of annotators, but from the labels around the nodes that each one answered.

    >>> hood = Neighborhood(torch.empty(2, 0, dtype=torch.long), num_nodes=200)
    >>> truth = torch.arange(200) % 2
    >>> wrong = torch.rand(200, 3) < torch.tensor([0.05, 0.1, 0.4])
    >>> consensus = Annotators(2).fit(hood, truth[:, None] ^ wrong.long())
    >>> accuracy(consensus).mean.argmin()
    tensor(2)

    :param field: a :class:`Consensus`, or a field fitted to :class:`Annotators`, whose answers name
        labels.
    :param float level: the probability with which intervals hold the accuracy.
    :return: means and ends of intervals, ``(M,)``. Cost: :math:`O(T (N + M C K))` for ``T`` draws;
        on a consensus EM of ``A`` answers for each, :math:`O(T (N C + S A C))` with 20 steps ``S``.
    """
    emission = _emission(field, level)
    if not isinstance(emission, Annotators) or not emission.named:
        must = "annotators whose answers name labels, aligned and without num_types"
        raise ValueError(f"accuracy needs {must}: see information")
    confusion, share = _by_label(field)
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
    """
    if not isinstance(_emission(field, level), Annotators):
        raise ValueError("information needs a field fitted to Annotators")
    confusion, share = _by_label(field)
    joint = confusion * share[:, None, :, None]
    parts = joint, joint.sum(-1), joint.sum(-2)
    whole, labels, answers = (torch.special.entr(part).flatten(2).sum(-1) for part in parts)
    return _quality(labels + answers - whole, level)


def _emission(field: HiddenField | Consensus, level: float) -> object:
    if not 0 < level < 1:
        raise ValueError(f"level must lie between 0 and 1, got {level}")
    return (field.field if isinstance(field, Consensus) else field).emission


def _by_label(fitted: HiddenField | Consensus) -> tuple[Tensor, Tensor]:
    """``(T, M, C, K)`` confusion matrices as drawn, and ``(T, C)`` the labels' shares."""
    if isinstance(fitted, Consensus) and fitted.log_prior.softmax(-1).std(0).max() > 1e-3:
        return _beside_neighbors(fitted)
    field = fitted.field if isinstance(fitted, Consensus) else fitted
    confusion, size = field.draws["confusion"], field.emission.num_labels
    if "types" in field.draws:
        confusion = field.draws["types"][:, None] @ confusion
    parts = [(field.samples == k).sum(-1) / field.hood.num_nodes for k in range(size)]
    return confusion, torch.stack(parts, -1).to(confusion)


def _beside_neighbors(consensus: Consensus) -> tuple[Tensor, Tensor]:
    """Confusion matrices of each annotator alone, beside the labels around its nodes. Their power
    and the nodes' weights are random (Newton and Raftery 1994, JRSS B 56)."""
    values, entries, draws = consensus.field.values, Entries.of(consensus.answers), []
    start = values["confusion"].double()
    if "types" in values:
        start = values["types"].double() @ start
    total = sum(power for name, power in consensus.powers.items() if name != "answers")
    around = max(1, POWER / total) * consensus.log_prior
    for _ in range(NUM_DRAWS):
        weight = torch.empty(len(around), 1).exponential_().to(around)
        labels = (math.exp(UNSURE * torch.randn(()).item()) * around).softmax(-1) * weight
        confusion = fit_confusion(start, labels[entries.node], entries, random=True)
        draws.append((confusion, labels.sum(0) / weight.sum()))
    matrices, shares = zip(*draws, strict=True)
    return torch.stack(matrices), torch.stack(shares)


def _quality(draws: Tensor, level: float) -> Quality:
    ends = draws.new_tensor([(1 - level) / 2, (1 + level) / 2])
    return Quality(draws.mean(0), *draws.quantile(ends, dim=0))


def fit_confusion(start: Tensor, labels: Tensor, entries: Entries, random: bool = False) -> Tensor:
    """``(M, C, K)`` by EM, each annotator alone, from label distributions ``(A, C)`` times weights
    of the nodes; the prior's weights may be random."""
    confusion, num_answers = start, start.shape[-1]
    weight = labels.sum(-1, keepdim=True)
    # A weak prior, because rows that are pulled to the middle bias accuracies.
    prior = STRENGTH * (start / 2 + 1 / (2 * num_answers))
    if random:  # as those of the nodes: few answers leave a wide interval
        prior = torch._standard_gamma(prior).clamp(min=1e-30)
    for _ in range(NUM_STEPS):
        joint = labels * confusion[entries.annotator, :, entries.answer]
        joint = joint * (weight / joint.sum(-1, keepdim=True))
        counts = entries.confusion(joint, num_answers) + prior
        confusion = counts / counts.sum(-1, keepdim=True)
    return confusion
