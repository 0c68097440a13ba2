# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Annotators who copy each other: an emission that counts copied answers once."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributions import Categorical, Dirichlet, constraints
from torch.nn.functional import one_hot

from pyro_nmm import Neighborhood
from pyro_nmm.models import Annotators
from pyro_nmm.models.hidden import Values


def shares(counts: Tensor) -> Tensor:
    return counts / counts.sum(-1, keepdim=True)


@dataclass(frozen=True)
class CopyingAnnotators(Annotators):
    r"""
    :class:`Annotators` of which some repeat what another one answers.

    .. math::

        & a_{im} \mid u_i = k, a_{i1}, \dots, a_{i,m-1} \\
        & \sim \rho_{mm} \, \mathrm{Categorical}(P_{mk}) + \sum_{l < m} \rho_{ml} \, \delta(a_{il})

    With probability :math:`\rho_{ml}` annotator :math:`m` repeats annotator :math:`l`, if :math:`l`
    answered. The prior of :math:`\rho` expects a tenth of the answers to be copied. List the copied
    annotator first; otherwise both accuracies are biased. Confusion matrices, ``(M, C, K)``, and
    :func:`~pyro_nmm.models.accuracy` are about an annotator's own answers. A step costs
    :math:`O(N M (C + M))`.
    """

    support: ClassVar = {
        "confusion": constraints.independent(constraints.simplex, 2),
        "copies": constraints.independent(constraints.simplex, 1),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.named:
            must = "answers that name labels: aligned=True, no num_types"
            raise ValueError(f"CopyingAnnotators need {must}")

    def check(self, hood: Neighborhood, data: Any) -> Tensor:
        """Answers ``(N, M)``: each annotator is compared with all columns before."""
        return super().check(hood, data).table()

    def start(self, data: Any, hood: Neighborhood) -> Values:
        """Half of the answers are copied, so that agreement counts for little at first."""
        values = super().start(data, hood)
        others = self._copy_counts(data.shape[1], values["confusion"]).tril(-1) / 2
        return values | {"copies": others + torch.diag(1 - others.sum(-1))}

    def log_prob(self, values: Values, data: Any) -> Tensor:
        log_prob = values["confusion"].new_zeros(len(data), self.num_labels)
        for m in range(data.shape[1]):
            column = _Column(values, data, m)
            log_prob = log_prob + torch.where(column.there[:, None], column.both, 1.0).log()
        return log_prob

    def log_prior(self, values: Values, data: Any) -> Tensor:
        copies = values["copies"]
        counts = self._copy_counts(len(copies), copies)
        log_prob = (counts * copies.clamp(min=torch.finfo(copies.dtype).tiny).log()).sum()
        return super().log_prior(values, data) + log_prob

    def maximise(self, data: Any, probs: Tensor, values: Values) -> Values:
        if not values:
            return super().maximise(data, probs, values)
        confusion, copies = [], self._copy_counts(data.shape[1], values["copies"])
        for m in range(data.shape[1]):
            column = _Column(values, data, m)
            uncopied = probs * column.uncopied_share()
            confusion.append(self._counts(data[:, m, None], uncopied)[0])
            copies[m, : m + 1] += column.whose(uncopied.sum(-1), probs.sum(-1)).sum(0)
        return {"confusion": shares(torch.stack(confusion)), "copies": shares(copies)}

    def draw(self, data: Any, labels: Tensor, values: Values) -> Values:
        """From their posterior, after drawing which answers are copies."""
        probs = one_hot(labels, self.num_labels).to(values["confusion"])
        confusion, copies = [], self._copy_counts(data.shape[1], values["copies"])
        drawn = torch.zeros_like(copies)
        for m in range(data.shape[1]):
            column = _Column(values, data, m)
            uncopied = probs * torch.bernoulli(column.uncopied_share())
            confusion.append(Dirichlet(self._counts(data[:, m, None], uncopied)[0]).sample())
            whose = column.whose(uncopied.sum(-1), probs.sum(-1))[column.there]
            seen = Categorical(whose, validate_args=False).sample().bincount(minlength=m + 1)
            drawn[m, : m + 1] = Dirichlet(copies[m, : m + 1] + seen).sample()
        return {"confusion": torch.stack(confusion), "copies": drawn}

    @staticmethod
    def _copy_counts(size: int, like: Tensor) -> Tensor:
        """``(M, M)``: ten answers, one of them copied from any of the annotators before."""
        before = torch.arange(size, device=like.device, dtype=like.dtype)[:, None]
        counts = (1 / before.clamp(min=1)).expand(-1, size).tril(-1)
        return counts + torch.diag(torch.full_like(before[:, 0], 9.0))


class _Column:
    """Terms of annotator ``m``'s answers, which are copies of those before, or not."""

    def __init__(self, values: Values, data: Tensor, m: int) -> None:
        answers, before, self.rates = data[:, m], data[:, :m], values["copies"][m, : m + 1]
        self.there = answers >= 0  # (N,)
        self.silent = before < 0  # (N, m)
        self.same = (before == answers[:, None]) & self.there[:, None]  # (N, m)
        self.copied = self.same.to(self.rates) @ self.rates[:m]  # (N,)
        self.free = self.rates[m] + self.silent.to(self.rates) @ self.rates[:m]  # (N,)
        likelihood = values["confusion"][m].mT.index_select(0, answers.clamp(min=0))
        self.uncopied = self.free[:, None] * likelihood  # (N, C), of an answer of one's own
        self.both = self.uncopied + self.copied[:, None]

    def uncopied_share(self) -> Tensor:
        """``(N, C)``: the probability that the answer is one's own, given the label."""
        return self.uncopied / self.both

    def whose(self, uncopied: Tensor, whole: Tensor) -> Tensor:
        """``(N, m + 1)``: the probability that ``m`` meant to copy each one before, or none."""
        none = torch.zeros_like(self.there[:, None])
        free, same = torch.cat([self.silent, ~none], 1), torch.cat([self.same, none], 1)
        free, same = free.to(self.rates) * self.rates, same.to(self.rates) * self.rates
        copied = self.copied.clamp(min=torch.finfo(self.copied.dtype).tiny)
        probs = (uncopied / self.free)[:, None] * free
        probs = probs + ((whole - uncopied) / copied)[:, None] * same
        return probs * self.there[:, None]
