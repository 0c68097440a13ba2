# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Agreement of annotators: beyond independent errors, and against a consensus."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributions import Categorical

from pyro_nmm.models.annotators.answers import Entries

#: Replicates with independent errors, and draws of all labels for the answers and for each of them.
NUM_REPLICATES, NUM_DRAWS = 10, (10, 2)
#: Nodes that are compared, at random.
MOST_NODES = 20_000
#: Answers that the prior of a row of a confusion matrix counts for.
STRENGTH = 0.3
#: Replicates draw answers at all places of a table with an answer in ten of them or more. Twice as
#: much doubles the cost of sparse tables, half as much makes more tables count as sparse.
DENSE = 10
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

        \kappa = \frac{\text{observed} - \text{by chance}}{\text{all pairs of answers} -
        \text{by chance}},

    where by chance is the agreement after each annotator's answers about nodes of the same label
    have been permuted. Labels are drawn from the consensus. If they are uncertain, independent
    errors have a positive value too, which replicates of the answers show.
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


def count_all(answers: Entries, num_answers: int) -> Tensor:
    """Pairs of equal answers, over all annotators."""
    votes = answers.votes(num_answers)
    return (votes * (votes - 1)).sum().double() / 2


def count_pairs(answers: Entries, num_answers: int) -> Tensor:
    """``(M, M)``: equal answers of each pair of annotators, zeros on the diagonal."""
    table = answers.table()
    pairs = torch.zeros(table.shape[1], table.shape[1]).double().to(table.device)
    for answered in ((table == k).double() for k in range(num_answers)):
        pairs += answered.mT @ answered
    return pairs.fill_diagonal_(0)


def excess_agreement(
    probs: Tensor, log_prior: Tensor, power: float, answers: Tensor,
    count: Callable[[Entries, int], Tensor] = count_all,
) -> Dependence:  # fmt: skip
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
    :param count: all pairs together, or each one.
    :return: see :class:`Dependence`. Cost: :math:`O(A K)` for ``A`` answers, for pairs
        :math:`O(N M^2 K)`.
    """
    entries, size = Entries.of(answers), int(answers.max()) + 1
    several = entries.number() > 1
    rows = several.nonzero()[:, 0]
    rows = rows[torch.randperm(len(rows), device=rows.device)[:MOST_NODES]]
    if not len(rows):
        unknown = torch.full_like(count(entries.at(several), 1), torch.nan)
        return Dependence(unknown, unknown, unknown)
    confusion = matrices(probs, entries, size)
    probs, log_prior, entries = probs[rows].double(), log_prior[rows], Entries.of(answers[rows])
    excess = []
    for _ in range(NUM_REPLICATES):
        labels = Categorical(probs, validate_args=False).sample()
        drawn = replace(entries, answer=_draw(confusion, labels, entries))
        evidence = power * confusion[entries.annotator, :, drawn.answer].log()
        evidence = log_prior.index_add(0, entries.node, evidence.to(log_prior))
        excess.append(_excess(drawn, evidence.softmax(-1), size, NUM_DRAWS[1], count))
    observed, replicates = _excess(entries, probs, size, NUM_DRAWS[0], count), torch.stack(excess)
    # Pairs of annotators with few common nodes have a value in some replicates only.
    mean, number = replicates.nanmean(0), replicates.isfinite().sum(0)
    error = ((replicates - mean).square().nansum(0) / (number - 1).clamp(min=0)).sqrt()
    return Dependence(observed, mean, error)


def _draw(confusion: Tensor, labels: Tensor, entries: Entries) -> Tensor:
    """``(A,)`` answers with independent errors, given labels of the nodes."""
    node, annotator = entries.node, entries.annotator
    if len(node) * DENSE < entries.shape[0] * entries.shape[1]:
        rows = confusion[annotator, labels[node]]
        return Categorical(rows, validate_args=False).sample()
    # Random numbers of a table that is not sparse do not depend on which answers are missing.
    rows = confusion.transpose(0, 1)[labels]
    return Categorical(rows, validate_args=False).sample()[node, annotator]


def _excess(answers: Entries, probs: Tensor, size: int, num_draws: int, count: Callable) -> Tensor:
    equal = replace(answers, answer=torch.zeros_like(answers.answer))
    observed, pairs = count(answers, size), count(equal, 1)
    draws = Categorical(probs, validate_args=False).sample((num_draws,))
    chance = torch.stack([count(permuted(answers, labels), size) for labels in draws]).mean(0)
    room = pairs - chance  # none where all answers would agree by chance
    return ((observed - chance) / room).where(room > 1e-9, torch.nan)


def permuted(answers: Entries, labels: Tensor) -> Entries:
    """Each annotator's answers about the nodes of each label in a random order."""
    group = answers.annotator * (labels.max() + 1) + labels[answers.node]
    # A stable sort after a random order: random within each group.
    mixed = torch.randperm(len(group), device=group.device)
    there, here = mixed[group[mixed].argsort(stable=True)], group.argsort(stable=True)
    mixed_answers = answers.answer.clone()
    mixed_answers[here] = answers.answer[there]
    return replace(answers, answer=mixed_answers)


def matrices(probs: Tensor, answers: Tensor | Entries, size: int) -> Tensor:
    """``(M, C, K)`` confusion matrices, given label distributions of all nodes."""
    entries = Entries.of(answers)
    counts = entries.confusion(probs[entries.node], size).mT
    # Rare answers are as frequent as over all labels.
    share = counts.sum(-1, keepdim=True) / counts.sum((1, 2), keepdim=True)
    counts = (counts + STRENGTH * share).mT
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
    label. Chance comes from confusion matrices and labels beside the neighbours, without a node's
    own answers. So a common error is not taken for the label.

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
    votes = entries.votes(values["confusion"].shape[-1]).double()
    pairs, equal, found = number * (number - 1), (votes * (votes - 1)).sum(1), []
    for confusion, labels in beside_neighbors(log_prior, power, values, entries, NUM_FEW):
        rows = confusion[entries.annotator]
        sums = rows.new_zeros(len(number), *rows.shape[1:]).index_add(0, entries.node, rows)
        own = rows.new_zeros(sums.shape[:2]).index_add(0, entries.node, rows.square().sum(-1))
        chance = (labels * (sums.square().sum(-1) - own)).sum()
        of_pairs, of_equal = labels.sum(1) @ pairs, labels.sum(1) @ equal
        found.append(((of_equal - chance) / (of_pairs - chance)).clamp(0, 1))
    mean, low, high = Quality.of(torch.stack(found), level)
    size = number[number > 1].mean()
    return Quality(*(size / (1 + (size - 1) * rho) for rho in (mean, high, low)))
