# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Do annotators agree more often than independent errors explain?"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributions import Categorical

#: Replicates with independent errors, and draws of all labels for the answers and for each of them.
NUM_REPLICATES, NUM_DRAWS = 10, (10, 2)
#: Nodes that are compared, at random.
MOST_NODES = 20_000
#: Answers that the prior of a row of a confusion matrix counts for.
STRENGTH = 0.3


class Dependence(NamedTuple):
    r"""
    Dependence of annotators who answer about the same node, beyond what the node's label explains,

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
        excess, expected, error = (each.item() for each in self)
        beside = f"{expected:.3f} ± {error:.3f} if errors are independent"
        return f"excess agreement {excess:.3f} ({beside}): {verdict}"


def count_all(answers: Tensor, num_answers: int) -> Tensor:
    """Pairs of equal answers, over all annotators."""
    votes = torch.stack([(answers == k).sum(1) for k in range(num_answers)])
    return (votes * (votes - 1)).sum().double() / 2


def count_pairs(answers: Tensor, num_answers: int) -> Tensor:
    """``(M, M)``: equal answers of each pair of annotators, zeros on the diagonal."""
    found = torch.zeros(answers.shape[1], answers.shape[1]).double().to(answers.device)
    for given in ((answers == k).double() for k in range(num_answers)):
        found += given.mT @ given
    return found.fill_diagonal_(0)


def excess_agreement(
    probs: Tensor, log_prior: Tensor, power: float, answers: Tensor,
    count: Callable[[Tensor, int], Tensor] = count_all,
) -> Dependence:  # fmt: skip
    """
    Excess agreement of annotators, given label distributions of the nodes.

    >>> truth = torch.arange(600) % 2
    >>> probs = torch.eye(2).double()[truth]
    >>> wrong = torch.rand(600, 2) < 0.3
    >>> answers = torch.stack([truth, truth], 1) ^ wrong[:, [0, 0]].long()  # one copies the other
    >>> found = excess_agreement(probs, probs.clamp(min=1e-9).log(), 1.0, answers)
    >>> bool(found.excess > 0.9), bool(found.found)
    (True, True)

    :param Tensor probs: ``(N, C)``, the consensus: ``log_prior`` and evidence of the answers
        times ``power``.
    :param count: all pairs together, or each one.
    :return: see :class:`Dependence`. Cost: :math:`O(N M K)`, for pairs :math:`O(N M^2 K)`.
    """
    rows = ((answers >= 0).sum(1) > 1).nonzero()[:, 0]
    rows = rows[torch.randperm(len(rows), device=rows.device)[:MOST_NODES]]
    if not len(rows):
        unknown = torch.full_like(count(answers[:0], 1), torch.nan)
        return Dependence(unknown, unknown, unknown)
    size = int(answers.max()) + 1
    confusion = matrices(probs, answers, size)
    probs, log_prior, answers = probs[rows].double(), log_prior[rows], answers[rows]
    found = []
    for _ in range(NUM_REPLICATES):
        labels = Categorical(probs, validate_args=False).sample()
        rows_of = confusion.transpose(0, 1)[labels]
        drawn = Categorical(rows_of, validate_args=False).sample().masked_fill(answers < 0, -1)
        evidence = log_prior.clone()
        for annotator, column in enumerate(drawn.unbind(1)):
            there = column >= 0
            evidence[there] += power * confusion[annotator, :, column[there]].log().mT
        found.append(_excess(drawn, evidence.softmax(-1), size, NUM_DRAWS[1], count))
    observed, each = _excess(answers, probs, size, NUM_DRAWS[0], count), torch.stack(found)
    # Pairs of annotators with few common nodes have a value in some replicates only.
    mean, number = each.nanmean(0), each.isfinite().sum(0)
    error = ((each - mean).square().nansum(0) / (number - 1).clamp(min=0)).sqrt()
    return Dependence(observed, mean, error)


def _excess(answers: Tensor, probs: Tensor, size: int, num_draws: int, count: Callable) -> Tensor:
    observed, pairs = count(answers, size), count(answers.clamp(max=0), 1)
    draws = Categorical(probs, validate_args=False).sample((num_draws,))
    chance = torch.stack([count(permuted(answers, labels), size) for labels in draws]).mean(0)
    room = pairs - chance  # none where all answers would agree by chance
    return ((observed - chance) / room).where(room > 1e-9, torch.nan)


def permuted(answers: Tensor, labels: Tensor) -> Tensor:
    """Each annotator's answers about the nodes of each label in a random order."""
    node, annotator = (answers >= 0).nonzero(as_tuple=True)
    group = annotator * (labels.max() + 1) + labels[node]
    # A stable sort after a random order: random within each group.
    mixed = torch.randperm(len(node), device=node.device)
    there, here = mixed[group[mixed].argsort(stable=True)], group.argsort(stable=True)
    found = answers.clone()
    found[node[here], annotator[here]] = answers[node[there], annotator[there]]
    return found


def matrices(probs: Tensor, answers: Tensor, size: int) -> Tensor:
    """``(M, C, K)`` confusion matrices, given label distributions of all nodes."""
    node, annotator = (answers >= 0).nonzero(as_tuple=True)
    counts = probs.new_zeros(answers.shape[1] * size, probs.shape[1], dtype=torch.double)
    counts.index_add_(0, annotator * size + answers[node, annotator], probs[node].double())
    counts = counts.view(-1, size, probs.shape[1])
    # Rare answers are as frequent as over all labels.
    share = counts.sum(-1, keepdim=True) / counts.sum((1, 2), keepdim=True)
    counts = (counts + STRENGTH * share).mT
    return counts / counts.sum(-1, keepdim=True)
