# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Emissions, the distributions of observations given a latent label, and EM without a graph."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.distributions import Gamma, Normal, constraints
from torch.nn.functional import one_hot

from pyro_nmm import Neighborhood
from pyro_nmm.arguments import as_tensor, check_each_call, check_integers, expect, expect_all
from pyro_nmm.model_arguments import check_hood, in_single

Values = dict[str, Tensor]


class Emission(Protocol):
    r"""The observation model of a label, :math:`p(w_i \mid u_i = k, \theta)`, a table ``(N, C)``.
    Its parameters :math:`\theta` are a dictionary of tensors. :func:`~pyro_nmm.models.fit_field`
    fits any class with these methods.

    >>> emission: Emission = NormalEmission(num_labels=2)
    >>> features = torch.tensor([[-1.0], [1.1], [0.9]])
    >>> emission.log_prob(emission.start(features, Neighborhood.grid(1, 3)), features).shape
    torch.Size([3, 2])
    """

    support: ClassVar[dict]  #: the constraint of every parameter

    @property
    def num_labels(self) -> int:
        """``C``."""

    def check(self, hood: Neighborhood, data: Any) -> Any:
        """``data`` as the other methods take it.

        :raises ValueError: names what is wrong.
        """

    def start(self, data: Any, hood: Neighborhood) -> Values:
        """Parameters to begin a fit with, at random where there is a choice."""

    def log_prob(self, values: Values, data: Any) -> Tensor:
        """``(N, C)``: :math:`\\log p(w_i \\mid u_i = k, \\theta)` in nats; missing is zero."""

    def log_prior(self, values: Values, data: Any) -> Tensor:
        """:math:`\\log p(\\theta)` up to a constant, a density of logarithms and log-odds."""

    def maximise(self, data: Any, probs: Tensor, values: Values) -> Values:
        """The M-step, given probabilities ``(N, C)`` of labels at the old ``values``."""

    def draw(self, data: Any, labels: Tensor, values: Values) -> Values:
        """Parameters from their posterior given labels ``(N,)``: a Gibbs step from ``values``."""


def mixture_em(
    emission: Emission, data: Any, values: Values, num_steps: int = 100
) -> tuple[Values, Tensor]:
    """Expectation maximisation without a graph, from ``values``: labels of nodes are independent,
    of learned shares. With :class:`~pyro_nmm.models.Annotators` it is the method of Dawid and
    Skene. It ends when the mean log-likelihood rises by less than a millionth of a nat.

    :param data: observations, as the emission's ``log_prob`` takes them.
    :return: the emission's parameters, and ``(N, C)`` the probabilities of labels. Cost: the
        emission's ``maximise`` and ``log_prob``, for at most ``num_steps`` times.
    """
    evidence, size = emission.log_prob(values, data), emission.num_labels
    log_share, old = evidence.new_full((size,), -math.log(size)), -torch.inf
    for _ in range(num_steps):
        joint = evidence + log_share
        bound = joint.logsumexp(-1).mean().item()
        if bound - old < 1e-6:
            break
        probs, old = joint.softmax(-1), bound
        values = emission.maximise(data, probs, values)
        evidence = emission.log_prob(values, data)
        log_share = ((probs.sum(0) + 1) / (len(probs) + size)).log()
    return values, (evidence + log_share).softmax(-1)


@dataclass(frozen=True)
class NormalEmission:
    r"""Features that are Normal given the label, such as principal components, or colors of pixels.

    .. math::

        x_{id} \mid u_i = k \sim \mathrm{Normal}(\mu_{kd}, \sigma_{kd}^2), \qquad
        \sigma_{kd}^2 \sim \mathrm{InverseGamma}(1, s_d^2), \quad
        \mu_{kd} \mid \sigma_{kd} \sim \mathrm{Normal}(m_d, \sigma_{kd}^2)

    where :math:`m_d` and :math:`s_d^2` are the data's mean and variance: the prior counts for one
    node. Data are ``(N, D)`` floats, in which NaN is missing. Cost: :math:`O(N D C)` a step.

    >>> emission = NormalEmission(num_labels=2)
    >>> x = torch.tensor([[0.0], [0.2], [4.0], [torch.nan]])
    >>> values = {"mean": torch.tensor([[0.0], [4.0]]), "variance": torch.ones(2, 1)}
    >>> emission.log_prob(values, x).softmax(-1)[:, 0].round(decimals=3)
    tensor([1.0000, 0.9990, 0.0000, 0.5000])

    :param int num_labels: ``C``.
    :raises ValueError: for fewer than two labels; in methods for data of a wrong shape, infinite,
        or missing, constant, or beyond the range of its type in a whole column.
    """

    num_labels: int
    support: ClassVar = {
        "mean": constraints.independent(constraints.real, 2),
        "variance": constraints.independent(constraints.positive, 2),
    }

    def __post_init__(self) -> None:
        check_integers(2, num_labels=self.num_labels)

    def check(self, hood: Neighborhood, data: Any) -> Tensor:
        """Features ``(N, D)``, neither missing nor equal in a whole column."""
        check_hood(hood)
        data, note = as_tensor("data", data, hood.device), "a row for every node of hood"
        expect("data", data, (hood.num_nodes, "D"), kind="float", like=hood, note=note)
        expect_all("data", data, ~data.isinf(), "be finite or NaN")
        mean, variance = _centre(data.double())
        floor = 1e-12 * mean.square().clamp(min=torch.finfo(torch.double).tiny)
        if not (good := variance > floor).all():  # NaN where nothing is there
            column = int((~good).nonzero()[0])
            raise ValueError(f"data is missing or the same everywhere in column {column}")
        single = in_single(data)
        spread = _centre(single)[1]
        if not (good := spread.isfinite() & (spread > 0)).all():
            column = int((~good).nonzero()[0])
            raise ValueError(f"data of column {column} is too large or small: standardise it")
        return single

    def start(self, data: Tensor, hood: Neighborhood) -> Values:
        """A mixture without a graph, from the features of nodes drawn at random."""
        data = self.check(hood, data)
        place = torch.randint(len(data), (self.num_labels,), device=data.device)
        if len(data) >= self.num_labels:
            place = torch.randperm(len(data), device=data.device)[: self.num_labels]
        centre, variance = _centre(data)
        mean = torch.where(data[place].isnan(), centre, data[place])
        return mixture_em(self, data, {"mean": mean, "variance": variance.expand_as(mean)})[0]

    def log_prob(self, values: Values, data: Tensor) -> Tensor:
        """``(N, C)``: of all features of a node, in nats."""
        expect("data", data, ("N", values["mean"].shape[-1]), kind="float")
        check_each_call("data", data, lambda x: ~x.isinf(), "be finite or NaN")
        sd, log_prob = values["variance"].sqrt(), values["mean"].new_zeros(())
        for d in range(data.shape[1]):
            x = data[:, d, None]
            law = Normal(values["mean"][:, d], sd[:, d], validate_args=False)
            log_prob = log_prob + law.log_prob(x.nan_to_num()).where(~x.isnan(), 0.0)
        return log_prob

    def log_prior(self, values: Values, data: Tensor) -> Tensor:
        """Log prior of means and variances, as a density of means and of logarithms."""
        mean, variance = values["mean"], values["variance"]
        centre, spread = _centre(data)
        off = spread + (mean - centre).square() / 2
        return -(1.5 * variance.log() + off / variance).sum()

    def maximise(self, data: Tensor, probs: Tensor, values: Values) -> Values:
        """Posterior modes, of nodes weighted by ``probs``, ``(N, C)``."""
        weight, mean, squares, spread = self._posterior(data, probs)
        return {"mean": mean, "variance": (squares + 2 * spread) / (weight + 3)}

    def draw(self, data: Tensor, labels: Tensor, values: Values) -> Values:
        """From the Normal-inverse-gamma posterior of every feature and label."""
        probs = one_hot(labels, self.num_labels).to(data)
        weight, mean, squares, spread = self._posterior(data, probs)
        variance = 1 / Gamma(1 + weight / 2, spread + squares / 2).sample()
        mean = Normal(mean, (variance / (weight + 1)).sqrt()).sample()
        return {"mean": mean, "variance": variance}

    def _posterior(self, data: Tensor, probs: Tensor) -> tuple[Tensor, ...]:
        """Weights, posterior means and squares about them, ``(C, D)``; and the data's variance."""
        seen, (centre, spread) = (~data.isnan()).to(data), _centre(data)
        off = (data - centre).nan_to_num()
        weight, sums = probs.T @ seen, probs.T @ off
        shift = sums / (weight + 1)
        squares = (probs.T @ off.square() - sums * shift).clamp(min=0)
        return weight, centre + shift, squares, spread


def _centre(data: Tensor) -> tuple[Tensor, Tensor]:
    """``(D,)``: mean and variance of the entries that are not missing."""
    mean = data.nanmean(0)
    return mean, (data - mean).square().nanmean(0)
