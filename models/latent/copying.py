# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.distributions import Categorical, Dirichlet, constraints
from torch.nn.functional import one_hot

from pyro_nmm import Neighborhood
from pyro_nmm.models.latent.annotators import Annotators
from pyro_nmm.models.latent.field import Values


@dataclass(frozen=True)
class CopyingAnnotators(Annotators):
    r"""
    :class:`Annotators` of which some repeat what another one answers.

    .. math::

        a_{im} \mid u_i = k, a_{i1}, \dots, a_{i,m-1} \sim
        \rho_{mm} \, \mathrm{Categorical}(P_{mk}) + \sum_{l < m} \rho_{ml} \, \delta(a_{il})

    With probability :math:`\rho_{mm}` annotator :math:`m` gives an answer of their own, and with
    probability :math:`\rho_{ml}` they repeat annotator :math:`l`, if :math:`l` answered. A repeated
    answer is no evidence of the label. The prior of :math:`\rho` expects a tenth of the answers to
    be copied. List the copied annotator first; otherwise both accuracies are biased.

    Cost: :math:`O(N M (C + M))` a step. Answers are ``(N, M)`` integers, -1 if missing. Confusion
    matrices and :func:`~pyro_nmm.models.accuracy` are about answers of an annotator's own.

    >>> from pyro_nmm import sources
    >>> hood = sources.grid(20, 20, stride=4)
    >>> truth = (torch.arange(400) % 20 >= 10).long()
    >>> answers = torch.where(torch.rand(400, 4) < 0.3, 1 - truth[:, None], truth[:, None])
    >>> answers[:, 3] = answers[:, 2]
    >>> field = CopyingAnnotators(num_labels=2).fit(hood, answers)
    >>> bool(field.values["copies"][3, 2] > 0.7)
    True
    """

    support: ClassVar = {
        "confusion": constraints.independent(constraints.simplex, 2),
        "copies": constraints.independent(constraints.simplex, 1),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.named:
            raise ValueError(
                "CopyingAnnotators need answers that name labels: aligned=True, no num_types"
            )

    def start(self, data: Tensor, hood: Neighborhood) -> Values:
        """As if half of the answers were copied, so that agreement counts for little at first."""
        found = super().start(data, hood)
        others = self._copy_counts(data.shape[1], found["confusion"]).tril(-1) / 2
        return found | {"copies": others + torch.diag(1 - others.sum(-1))}

    def log_prob(self, values: Values, data: Tensor) -> Tensor:
        """``(N, C)``: of all answers about a node, in nats."""
        found = values["confusion"].new_zeros(len(data), self.num_labels)
        for part in _parts(values, data):
            found = found + part.log_prob()
        return found

    def log_prior(self, values: Values, data: Tensor) -> Tensor:
        """Of the rows of all matrices and of the shares, as densities of log-odds."""
        copies = values["copies"]
        counts = self._copy_counts(len(copies), copies)
        found = (counts * copies.clamp(min=torch.finfo(copies.dtype).tiny).log()).sum()
        return super().log_prior(values, data) + found

    def maximise(self, data: Tensor, probs: Tensor, values: Values) -> Values:
        """Counts of answers of one's own, and of copies, expected under ``probs``, ``(N, C)``."""
        if not values:
            return super().maximise(data, probs, values)
        confusion, copies = [], self._copy_counts(data.shape[1], values["copies"])
        for m, part in enumerate(_parts(values, data)):
            own = probs * part.own_share()
            confusion.append(self._own_counts(part, own))
            copies[m, : m + 1] += part.whose(own.sum(-1), probs.sum(-1)).sum(0)
        counts = torch.stack(confusion)
        return {
            "confusion": counts / counts.sum(-1, keepdim=True),
            "copies": copies / copies.sum(-1, keepdim=True),
        }

    def draw(self, data: Tensor, labels: Tensor, values: Values) -> Values:
        """From their posterior, after drawing which answers are copies."""
        probs = one_hot(labels, self.num_labels).to(values["confusion"])
        confusion, copies = [], self._copy_counts(data.shape[1], values["copies"])
        drawn = torch.zeros_like(copies)
        for m, part in enumerate(_parts(values, data)):
            own = probs * torch.bernoulli(part.own_share())
            confusion.append(Dirichlet(self._own_counts(part, own)).sample())
            whose = part.whose(own.sum(-1), probs.sum(-1))[part.there]
            seen = Categorical(whose, validate_args=False).sample().bincount(minlength=m + 1)
            drawn[m, : m + 1] = Dirichlet(copies[m, : m + 1] + seen).sample()
        return {"confusion": torch.stack(confusion), "copies": drawn}

    def _own_counts(self, part: _Part, own: Tensor) -> Tensor:
        """``(C, K)``: answers of one's own, with probabilities ``(N, C)``, and the prior's."""
        return self._counts(torch.where(part.there, part.answers, -1)[:, None], own)[0]

    @staticmethod
    def _copy_counts(size: int, like: Tensor) -> Tensor:
        """``(M, M)``: ten answers, one of which is copied from any of the annotators before."""
        before = torch.arange(size, device=like.device, dtype=like.dtype)[:, None]
        counts = (1 / before.clamp(min=1)).expand(-1, size).tril(-1)
        return counts + torch.diag(torch.full_like(before[:, 0], 9.0))


class _Part(NamedTuple):
    """Answers of an annotator, given those of the annotators before."""

    answers: Tensor  # (N,)
    there: Tensor  # (N,) whether there is one
    same: Tensor  # (N, m) whether it is that of another
    silent: Tensor  # (N, m) whether another has none
    rates: Tensor  # (m + 1,) of copying each of them, and of an answer of one's own
    copied: Tensor  # (N,) the probability of the answer as a copy
    free: Tensor  # (N,) the probability of an answer of one's own
    likelihood: Tensor  # (N, C) of the answer, if it is one's own

    def log_prob(self) -> Tensor:
        both = self.free[:, None] * self.likelihood + self.copied[:, None]
        return torch.where(self.there[:, None], both, 1.0).log()

    def own_share(self) -> Tensor:
        """``(N, C)``: the probability that the answer is one's own, given the label."""
        own = self.free[:, None] * self.likelihood
        return own / (own + self.copied[:, None])

    def whose(self, own: Tensor, whole: Tensor) -> Tensor:
        """
        ``(N, m + 1)``: the probability of having meant to copy each of those before, or none; for
        ``own`` of ``whole`` the answer is one's own, perhaps as the one who was meant had none.
        """
        none = torch.zeros_like(self.there[:, None])
        free, same = torch.cat([self.silent, ~none], 1), torch.cat([self.same, none], 1)
        free, same = free.to(self.rates) * self.rates, same.to(self.rates) * self.rates
        copied = self.copied.clamp(min=torch.finfo(self.copied.dtype).tiny)
        found = (own / self.free)[:, None] * free + ((whole - own) / copied)[:, None] * same
        return found * self.there[:, None]


def _parts(values: Values, data: Any) -> Iterator[_Part]:
    confusion, copies = values["confusion"], values["copies"]
    for m, answers in enumerate(data.unbind(1)):
        there, before = answers >= 0, data[:, :m]
        silent = before < 0
        same = (before == answers[:, None]) & ~silent & there[:, None]
        rates = copies[m, :m]
        copied = same.to(rates) @ rates
        free = copies[m, m] + silent.to(rates) @ rates
        likelihood = confusion[m].mT.index_select(0, answers.clamp(min=0))
        yield _Part(answers, there, same, silent, copies[m, : m + 1], copied, free, likelihood)
