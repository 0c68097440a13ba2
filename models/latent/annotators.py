# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributions import Categorical, Dirichlet, constraints
from torch.nn.functional import one_hot

from pyro_nmm import Neighborhood
from pyro_nmm.expect import expect_device
from pyro_nmm.models.latent.field import HiddenField, Values, check_num_labels
from pyro_nmm.models.latent.fit import fit_field
from pyro_nmm.models.latent.mixture_em import draw_places, mixture_em, source_counts
from pyro_nmm.validation import check_integers, check_positive


@dataclass(frozen=True)
class Annotators:
    r"""
    Answers of annotators about latent labels: the model of Dawid and Skene [1] with an NMM for the
    labels' prior, so that neighbours help one another.

    .. math::

        u \sim \mathrm{NMM}, \qquad a_{im} \mid u_i = k \sim \mathrm{Categorical}(P_{mk}), \qquad
        P_{mk} \sim \mathrm{Dirichlet}

    Every annotator :math:`m` has a confusion matrix :math:`P_m`. Answers are ``(N, M)`` integers,
    in which -1 is missing. They are people, clusterings, classifiers or language models.

    >>> from pyro_nmm import sources
    >>> hood = sources.grid(12, 12, stride=3)
    >>> truth = (torch.arange(144) % 12 >= 6).long()
    >>> wrong = torch.rand(144, 3) < 0.25
    >>> answers = torch.where(wrong, 1 - truth[:, None], truth[:, None])
    >>> answers[::7, 0] = -1
    >>> field = Annotators(num_labels=2).fit(hood, answers)
    >>> majority = (answers == 1).sum(1) > (answers == 0).sum(1)
    >>> bool((field.predict() == truth).sum() > (majority == truth).sum())
    True

    **Annotators that err together** are worth less than they are many. With ``num_types=H`` they
    do not see the label, but the node's type, which depends on the label,

    .. math::

        h_i \mid u_i = k \sim \mathrm{Categorical}(R_k), \qquad
        a_{im} \mid h_i \sim \mathrm{Categorical}(P_{m h_i}) :

    what they share at a node is its type, and no matter how many they are, they say no more of
    the label than the type does. The labels are what is smooth in the graph of what they share.

    [1] A. P. Dawid, A. M. Skene (1979) "Maximum Likelihood Estimation of Observer Error-Rates Using
    the EM Algorithm", Journal of the Royal Statistical Society C 28.

    :param int num_labels: ``C``.
    :param int num_answers: ``K``; default ``num_labels`` where answers name labels, else one more
        than the largest answer.
    :param int num_types: ``H``, for annotators that err together; default none.
    :param bool aligned: whether answer ``k`` means label ``k``, which annotators are then expected
        to be right about half of the time; false for clusterings, whose numbers mean nothing, and
        always so with types.
    :param float strength: how many answers the prior of a row of a confusion matrix is worth.
        Default one where answers name labels, half of which is for the right one; else half an
        answer of every kind, as Jeffreys has it.
    """

    num_labels: int
    num_answers: int | None = None
    num_types: int | None = None
    aligned: bool = True
    strength: float | None = None
    support: ClassVar = {
        "confusion": constraints.independent(constraints.simplex, 2),
        "types": constraints.independent(constraints.simplex, 1),
    }

    def __post_init__(self) -> None:
        check_num_labels(self.num_labels)
        if self.strength is not None:
            check_positive(strength=self.strength)
        if self.num_types is not None:
            check_integers(2, num_types=self.num_types)
        if self.num_answers is not None:
            check_integers(2, num_answers=self.num_answers)

    def fit(
        self, hood: Neighborhood, answers: Tensor, edge_attr: Tensor | None = None, **options
    ) -> HiddenField:
        """:func:`~pyro_nmm.models.fit_field`, whose ``options`` these are."""
        return fit_field(self, hood, answers, edge_attr, **options)

    def check(self, hood: Neighborhood, data: Any) -> Tensor:
        """Answers ``(N, M)`` as ``torch.long``, or an error that names what is wrong."""
        good = isinstance(data, Tensor) and data.dim() == 2 and len(data) == hood.num_nodes
        if not good or data.is_floating_point() or data.dtype == torch.bool:
            got = f"{data.dtype} of {tuple(data.shape)}" if isinstance(data, Tensor) else type(data)
            raise ValueError(
                f"answers must be integers of shape ({hood.num_nodes}, M), a row for every node of "
                f"hood and a column for every annotator, -1 if missing, got {got}; see "
                f"torch.from_numpy"
            )
        expect_device("answers", data, hood.device)
        answers = data.long()
        silent = (answers < 0).all(0)
        if not answers.numel() or silent.any():
            name = int(silent.nonzero()[0]) if answers.numel() else 0
            raise ValueError(f"answers has none of annotator {name}: leave that column out")
        top, number = int(answers.max()), self._num_answers(answers)
        if int(answers.min()) < -1 or top >= number:
            wrong = top if top >= number else int(answers.min())
            raise ValueError(
                f"answers holds {wrong}, but must lie in 0..{number - 1}, or be -1 for a missing "
                f"one: give num_answers if there are more"
            )
        return answers

    def start(self, data: Tensor, hood: Neighborhood) -> Values:
        """
        The majority vote of aligned annotators; else without the graph, from random nodes. Types
        are fitted without the graph too; then their counts at the sources are a mixture of as many
        kinds as there are labels.
        """
        if self.named:
            votes = torch.stack([(data == k).sum(1) for k in range(self.num_labels)], 1)
            votes = votes.to(torch.get_default_dtype()) + 1 / self.num_labels
            return self.maximise(data, votes / votes.sum(1, keepdim=True), {})
        if self.num_types is None:
            return mixture_em(self, data, self._seeds(data))[0]
        plain = Annotators(self.num_types, self._num_answers(data), None, False, self.strength)
        values, probs = mixture_em(plain, data, plain._seeds(data))
        counts = source_counts(hood, probs)
        kinds = _Counts(self.num_labels)
        seeds = counts[draw_places(len(counts), self.num_labels, data.device)] + 1
        found = mixture_em(kinds, counts, {"types": seeds / seeds.sum(-1, keepdim=True)})[0]
        return values | found

    def log_prob(self, values: Values, data: Tensor) -> Tensor:
        """``(N, C)``: of all answers about a node, in nats; summed over its type."""
        log_prob = _log_likelihood(values["confusion"], data)
        if self.num_types is None:
            return log_prob
        top = log_prob.detach().amax(-1, keepdim=True)
        return ((log_prob - top).exp() @ values["types"].mT).log() + top

    def log_prior(self, values: Values, data: Tensor) -> Tensor:
        """Of the rows of all matrices, as densities of log-odds."""
        found = (self._pseudo_counts(values["confusion"]) * values["confusion"].log()).sum()
        if self.num_types is not None:
            found = found + (values["types"].log() / self.num_types).sum()
        return found

    def maximise(self, data: Tensor, probs: Tensor, values: Values) -> Values:
        """Counts of answers, expected under ``probs``, ``(N, C)``, and under those of types."""
        if self.num_types is None:
            return {"confusion": _shares(self._counts(data, probs))}
        log_prob = _log_likelihood(values["confusion"], data)
        likelihood = (log_prob - log_prob.amax(-1, keepdim=True)).exp()
        share = probs / (likelihood @ values["types"].mT)
        types = values["types"] * (share.mT @ likelihood) + 1 / self.num_types
        of_types = likelihood * (share @ values["types"])
        return {"confusion": _shares(self._counts(data, of_types)), "types": _shares(types)}

    def draw(self, data: Tensor, labels: Tensor, values: Values) -> Values:
        """From the Dirichlet posterior of every row; types are drawn first."""
        seen, found = labels, {}
        if self.num_types is not None:
            log_prob = _log_likelihood(values["confusion"], data)
            logits = log_prob + values["types"].log().index_select(0, labels)
            seen = Categorical(logits=logits, validate_args=False).sample()
            pairs = (labels * self.num_types + seen).bincount(
                minlength=self.num_labels * self.num_types
            )
            counts = pairs.view(self.num_labels, -1) + 1 / self.num_types
            found["types"] = Dirichlet(counts.to(log_prob)).sample()
        probs = one_hot(seen, self.num_types or self.num_labels).to(values["confusion"])
        return {"confusion": Dirichlet(self._counts(data, probs)).sample()} | found

    @property
    def named(self) -> bool:
        """Whether answers name labels."""
        return self.aligned and self.num_types is None

    def _num_answers(self, data: Tensor) -> int:
        if self.num_answers is not None:
            return self.num_answers
        return self.num_labels if self.named else int(data.max()) + 1

    def _seeds(self, data: Tensor) -> Values:
        """
        As if a node drawn at random were seen ten times for every label: nodes with different
        answers, for EM cannot tell labels apart that start alike.
        """
        answered = data[(data >= 0).any(1)].unique(dim=0)
        answers = answered[draw_places(len(answered), self.num_labels, data.device)]
        seen = 10 * torch.eye(self.num_labels, device=data.device).to(torch.get_default_dtype())
        return {"confusion": _shares(self._counts(answers, seen, self._num_answers(data)))}

    def _counts(self, data: Tensor, probs: Tensor, number: int | None = None) -> Tensor:
        """``(M, C, K)``: answers counted with probabilities ``(N, C)``, and the prior's."""
        number = self._num_answers(data) if number is None else number
        # In double precision: a million small shares, one after the other, lose three digits.
        counts = probs.new_zeros(data.shape[1], number + 1, probs.shape[1], dtype=torch.double)
        for annotator, answers in enumerate(data.unbind(1)):
            counts[annotator].index_add_(0, answers + 1, probs.double())
        counts = counts[:, 1:].mT.to(probs)
        return counts + self._pseudo_counts(counts)

    def _pseudo_counts(self, like: Tensor) -> Tensor:
        """``(C, K)``: of equal shares; or one half for the label itself, where answers name it."""
        rows, columns = like.shape[-2:]
        default = 1.0 if self.named else columns / 2
        strength = default if self.strength is None else self.strength
        if not self.named:
            return like.new_full((rows, columns), strength / columns)
        prior = like.new_full((rows, columns), strength / 2 / (columns - 1))
        return prior.fill_diagonal_(strength / 2)


def _log_likelihood(confusion: Tensor, answers: Tensor) -> Tensor:
    """``(N, C)``: of all answers about a node."""
    log = confusion.log()
    table = torch.cat([log.new_zeros(*log.shape[:-1], 1), log], -1)  # a missing one says nothing
    found = log.new_zeros(len(answers), log.shape[-2])
    for annotator, column in enumerate(answers.unbind(1)):
        found = found + table[annotator].index_select(-1, column + 1).mT
    return found


def _shares(counts: Tensor) -> Tensor:
    return counts / counts.sum(-1, keepdim=True)


@dataclass(frozen=True)
class _Counts:
    """Counts of types, as a multinomial of the kind of source that they were counted at."""

    num_labels: int

    def log_prob(self, values: Values, data: Tensor) -> Tensor:
        return data @ values["types"].log().mT

    def maximise(self, data: Tensor, probs: Tensor, values: Values) -> Values:
        return {"types": _shares(probs.mT @ data + 1 / data.shape[1])}
