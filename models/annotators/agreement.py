# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Agreement of annotators: beyond independent errors, and against a consensus."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributions import Categorical

from pyro_nmm.models.annotators.answers import Entries

#: Replicates with independent errors. Half of them make three standard deviations uncertain.
NUM_REPLICATES = 10
#: Answers that the prior of a row of a confusion matrix counts for.
STRENGTH = 0.3
#: Draws of confusion matrices beside the neighbours for accuracies and for an effective number, and
#: steps of EM for each draw.
NUM_MATRICES, NUM_FEW, NUM_STEPS = 100, 40, 20
#: The least sum of the neighbours' powers there, and the standard deviation of its logarithm.
POWER, UNSURE = 1.5, 0.4


class Quality(NamedTuple):
    """Posterior means and ends of intervals, ``(M,)`` each, or of one number."""

    mean: Tensor
    low: Tensor
    high: Tensor

    @classmethod
    def of(cls, draws: Tensor, level: float) -> "Quality":
        """Of draws ``(T, ...)``."""
        ends = draws.new_tensor([(1 - level) / 2, (1 + level) / 2])
        return cls(draws.mean(0), *draws.quantile(ends, dim=0))


class Dependence(NamedTuple):
    r"""Dependence of annotators who answer about the same node, beyond what the node's label
    explains,

    .. math::

        \kappa = \frac{\text{equal pairs} - \text{by chance}}{\text{all pairs} - \text{by chance}},
        \qquad \text{by chance} = \sum_i \sum_{l < m} \sum_{k, a} p_{ik} P_{lka} P_{mka},

    with label distributions :math:`p_i` of the consensus, and confusion matrices :math:`P` under
    these. If labels are uncertain, independent errors have a positive value too, which replicates
    of the answers show.
    """

    excess: Tensor  #: :math:`\kappa`; all pairs together, or ``(M, M)``; NaN if nothing shows it
    expected: Tensor  #: its mean over replicates with independent errors
    error: Tensor  #: its standard deviation over these

    @property
    def found(self) -> Tensor:
        """Whether the excess is above the expected one by three standard deviations."""
        return self.excess > self.expected + 3 * self.error

    def __str__(self) -> str:
        if self.excess.dim():
            return f"excess agreement of each pair of {len(self.excess)} annotators"
        if self.excess.isnan():
            return "dependence of annotators: unknown with one answer a node"
        verdict = "errors are dependent" if self.found else "no dependence found"
        excess, expected, error = (value.item() for value in self)
        beside = f"{expected:.3f} ± {error:.3f} if errors are independent"
        return f"excess agreement {excess:.3f} ({beside}): {verdict}"


def excess_agreement(
    probs: Tensor, log_prior: Tensor, power: float, answers: Tensor, pairs: bool = False
) -> Dependence:
    """Excess agreement of annotators, given label distributions of the nodes.

    >>> truth = torch.arange(600) % 2
    >>> probs = torch.eye(2).double()[truth]
    >>> wrong = torch.rand(600, 2) < 0.3
    >>> answers = torch.stack([truth, truth], 1) ^ wrong[:, [0, 0]].long()  # one copies the other
    >>> dependence = excess_agreement(probs, probs.clamp(min=1e-9).log(), 1.0, answers)
    >>> bool(dependence.excess > 0.9), bool(dependence.found)
    (True, True)

    :param Tensor probs: ``(N, C)``, the consensus: ``log_prior`` and evidence of the answers
        times ``power``.
    :param bool pairs: of each pair of annotators, ``(M, M)``, instead of all together.
    :return: see :class:`Dependence`. Cost: :math:`O(A C K)` for ``A`` answers, for pairs
        :math:`O(N M^2 (C + K))`.
    """
    entries, size, probs = Entries.of(answers), int(answers.max()) + 1, probs.double()
    confusion, excess = matrices(probs, entries, size), []

    def found(entries: Entries, labels: Tensor) -> Tensor:
        # Without a prior: it would lower what is by chance.
        rows = matrices(labels, entries, size, 1e-9)
        return _share(*(_each if pairs else _together)(entries, labels, rows))

    for _ in range(NUM_REPLICATES):
        labels = Categorical(probs, validate_args=False).sample()
        rows = confusion[entries.annotator, labels[entries.node]]
        drawn = replace(entries, answer=Categorical(rows, validate_args=False).sample())
        given = (log_prior + power * drawn.evidence(confusion)).softmax(-1)
        excess.append(found(drawn, given))
    replicates = torch.stack(excess)
    # Pairs of annotators with few common nodes have a value in some replicates only.
    mean, number = replicates.nanmean(0), replicates.isfinite().sum(0)
    error = ((replicates - mean).square().nansum(0) / (number - 1).clamp(min=0)).sqrt()
    return Dependence(found(entries, probs), mean, error)


def _share(equal: Tensor, chance: Tensor, pairs: Tensor) -> Tensor:
    """NaN where all answers would agree by chance."""
    return ((equal - chance) / (pairs - chance)).where(pairs - chance > 1e-9, torch.nan)


def _together(entries: Entries, labels: Tensor, confusion: Tensor) -> tuple[Tensor, ...]:
    """Pairs of equal answers, those by chance, and all pairs, of nodes with weighted labels."""
    number, votes = entries.number().double(), entries.votes(confusion.shape[-1]).double()
    chance = number.new_zeros(())
    for table, weight in zip(confusion.unbind(1), labels.mT, strict=True):
        rows = table[entries.annotator]
        sums = rows.new_zeros(len(number), rows.shape[1]).index_add(0, entries.node, rows)
        chance += weight @ sums.square().sum(-1) - weight[entries.node] @ rows.square().sum(-1)
    weight = labels.sum(-1)
    return weight @ (votes * (votes - 1)).sum(-1), chance, weight @ (number * (number - 1))


def _each(entries: Entries, labels: Tensor, confusion: Tensor) -> tuple[Tensor, ...]:
    """The same of each pair of annotators, ``(M, M)``, zeros on the diagonal."""
    table = entries.table()
    there = (table >= 0).double()
    pairs = there.mT @ there
    equal, chance = torch.zeros_like(pairs), torch.zeros_like(pairs)
    for answered in ((table == k).double() for k in range(confusion.shape[-1])):
        equal += answered.mT @ answered
    for rows, weight in zip(confusion.unbind(1), labels.mT, strict=True):
        chance += (there.mT * weight @ there) * (rows @ rows.mT)
    return tuple(each.fill_diagonal_(0) for each in (equal, chance, pairs))


def matrices(
    probs: Tensor, answers: Tensor | Entries, size: int, strength: float = STRENGTH
) -> Tensor:
    """``(M, C, K)`` confusion matrices, given label distributions of all nodes."""
    entries = Entries.of(answers)
    counts = entries.confusion(probs[entries.node], size).mT
    # Rare answers are as frequent as over all labels.
    share = counts.sum(-1, keepdim=True) / counts.sum((1, 2), keepdim=True)
    counts = (counts + strength * share).mT
    return counts / counts.sum(-1, keepdim=True)


def around_nodes(log_prior: Tensor, power: float) -> Tensor:
    """Log priors ``(N, C)`` of a sum of powers, raised to POWER, which dependent errors lower."""
    return max(1, POWER / power) * log_prior


def informs(log_prior: Tensor, power: float) -> bool:
    """Whether neighbours, a classifier or observed labels tell nodes apart."""
    return bool(around_nodes(log_prior, power).softmax(-1).std(0).max() > 1e-3)


def beside_neighbors(
    log_prior: Tensor, power: float, values: dict[str, Tensor], entries: Entries,
    num_draws: int = NUM_MATRICES,
) -> Iterator[tuple[Tensor, Tensor]]:  # fmt: skip
    """Draws of confusion matrices ``(M, C, K)`` of each annotator alone, beside the labels around
    its nodes, and these labels ``(N, C)``, from priors of a sum of powers. This power and the
    nodes' weights are random (Newton and Raftery 1994, JRSS B 56)."""
    start = values["confusion"].double()
    if "types" in values:
        start = values["types"].double() @ start
    around = around_nodes(log_prior, power)
    for _ in range(num_draws):
        weight = torch.empty(len(around), 1).exponential_().to(around)
        labels = (math.exp(UNSURE * torch.randn(()).item()) * around).softmax(-1) * weight
        yield fit_confusion(start, labels[entries.node], entries), labels


def fit_confusion(start: Tensor, labels: Tensor, entries: Entries) -> Tensor:
    """``(M, C, K)`` by EM, each annotator alone, from label distributions ``(A, C)`` times weights
    of the nodes."""
    confusion, num_answers = start, start.shape[-1]
    weight = labels.sum(-1, keepdim=True)
    # A weak prior, because rows that are pulled to the middle bias accuracies.
    prior = STRENGTH * (start / 2 + 1 / (2 * num_answers))
    # Random, as the nodes' weights: few answers leave a wide interval.
    prior = torch._standard_gamma(prior).clamp(min=1e-30)
    place = entries.annotator * num_answers + entries.answer
    for _ in range(NUM_STEPS):
        joint = labels * confusion.mT.reshape(-1, confusion.shape[1]).index_select(0, place)
        joint = joint * (weight / joint.sum(-1, keepdim=True))
        counts = entries.confusion(joint, num_answers) + prior
        confusion = counts / counts.sum(-1, keepdim=True)
    return confusion


def effective_number(
    log_prior: Tensor, power: float, values: dict[str, Tensor], answers: Tensor, level: float = 0.9
) -> Quality:
    r"""Number of independent annotators whose mean error has the same variance as the mean error of
    the :math:`n` answers at a node, the effective sample size of a cluster (Kish 1965, "Survey
    Sampling"),

    .. math::

        n_{\text{eff}} = \frac{n}{1 + (n - 1) \rho}, \qquad
        \rho = \frac{\text{equal pairs} - \text{by chance}}{\text{all pairs} - \text{by chance}} .

    If annotators are equally accurate, :math:`\rho` is the mean correlation of two errors given the
    label. Chance is as in :class:`Dependence`, with labels and confusion matrices from the
    neighbours, without a node's own answers. So a common error is not taken for the label.

    **No true label is read.** An error that the neighbours share looks like the label, and the
    number is too high. Where neighbours are wrong, agreement on the label looks like a shared
    error, and it is too low. The interval has the uncertainty of matrices and of the neighbours'
    power only: it held the number given true labels for simulated judges, and not for people.

    >>> truth = torch.arange(3000) % 2
    >>> guess, own = ((truth + (torch.rand(3000) < 0.3).long()) % 2 for _ in range(2))
    >>> answers = torch.stack([guess, guess, guess, own], 1)  # three of the four are copies
    >>> log_prior = torch.eye(2)[truth].double().clamp(min=1e-9).log()
    >>> start = {"confusion": torch.full((4, 2, 2), 0.5)}
    >>> round(effective_number(log_prior, 1.0, start, answers).mean.item(), 1)
    1.6

    :param Tensor log_prior: ``(N, C)``, of each node without its own answers.
    :param float power: the sum of the powers of the priors in it.
    :param dict values: "confusion" ``(M, C, K)``, where EM starts.
    :param answers: ``(N, M)``, -1 for missing ones.
    :return: the number at the mean of :math:`\rho`, and ends of an interval. NaN if no node has two
        answers, or if the prior does not tell nodes apart. Cost: 800 steps of EM,
        :math:`O(A C K)` each for ``A`` answers.
    """
    entries = Entries.of(answers)
    number = entries.number().double()
    if not informs(log_prior, power) or number.max() < 2:
        return Quality(*number.new_full((3,), torch.nan))
    draws = beside_neighbors(log_prior, power, values, entries, NUM_FEW)
    found = [_share(*_together(entries, labels, matrix)).clamp(0, 1) for matrix, labels in draws]
    mean, low, high = Quality.of(torch.stack(found), level)
    size = number[number > 1].mean()
    return Quality(*(size / (1 + (size - 1) * rho) for rho in (mean, high, low)))
