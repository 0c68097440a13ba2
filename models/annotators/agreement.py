# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Agreement of annotators: beyond independent errors, and against a consensus."""

from collections.abc import Callable
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
