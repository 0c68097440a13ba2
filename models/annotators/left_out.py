# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_nmm.models.annotators.entries import Entries
from pyro_nmm.models.hidden import HiddenField, Values


class LeftOut(NamedTuple):
    """What is known about ``A`` answers without them."""

    evidence: Tensor  #: ``(N, C)`` of all answers at each node, in nats
    node: Tensor  #: ``(A,)`` the node that each answer is about
    others: Tensor  #: ``(A, C)`` evidence of the other answers at the node
    own: Tensor  #: ``(A, C)`` evidence of the answer itself
    same: Tensor  #: ``(A,)`` the share of the other answers that are the same


def left_out_answers(
    field: HiddenField, data: Tensor, probs: Tensor, part: Tensor, shrink: bool = True
) -> LeftOut:
    """
    The M-step without the answers of a part of the nodes, under label distributions ``(N, C)``,
    gives the evidence in that part.

    Rows of a confusion matrix have few answers each. Their noise makes answers that are left out
    look as if labels were uncertain, hence :meth:`Annotators.shrinking`.
    """
    fitted: Any = field.emission
    checked = fitted.check(field.hood, data)
    evidence, found = probs.new_zeros(probs.shape, dtype=torch.double), []
    for number in range(int(part.max()) + 1):
        here = part == number
        others, own = _at(checked, ~here), _at(checked, here)
        emission = fitted.shrinking(others, probs) if shrink else fitted
        values = _double(emission.maximise(others, probs, field.values))
        evidence[here] = emission.log_prob(values, own)[here]
        if values.keys() == {"confusion"}:  # evidence is a sum over annotators
            found.append(each_alone(values["confusion"], Entries.of(own), evidence))
            continue
        for annotator in range(data.shape[1]):
            node = (here & (data[:, annotator] >= 0)).nonzero()[:, 0]
            rest, alone = data[node].clone(), torch.full_like(data[node], -1)
            alone[:, annotator], rest[:, annotator] = data[node, annotator], -1
            tables = (emission.log_prob(values, answers) for answers in (rest, alone))
            equal = (rest == data[node, annotator, None]).sum(1, dtype=torch.double)
            found.append((node, *tables, equal / (rest >= 0).sum(1).clamp(min=1)))
    return LeftOut(evidence, *(torch.cat(each) for each in zip(*found, strict=True)))


def each_alone(confusion: Tensor, entries: Entries, evidence: Tensor) -> tuple:
    """Each answer, annotator by annotator, linear in the answers, where these are independent."""
    order = entries.annotator.argsort(stable=True)
    node, answer = entries.node[order], entries.answer[order]
    own = confusion.log()[entries.annotator[order], :, answer]
    number = entries.number()[node]
    others = (evidence[node] - own).masked_fill((number == 1)[:, None], 0)
    same = entries.votes(confusion.shape[-1])[node, answer].double() - 1
    return node, others, own, same / (number - 1).clamp(min=1)


def _at(data: Tensor | Entries, rows: Tensor) -> Tensor | Entries:
    """Answers about some nodes, as the emission takes them."""
    if isinstance(data, Entries):
        return data.at(rows)
    return data.masked_fill(~rows[:, None], -1)


def _double(values: Values) -> Values:
    return {name: value.double() for name, value in values.items()}
