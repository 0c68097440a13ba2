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
from pyro_nmm.arguments import (
    as_tensor,
    check_each_call,
    check_integers,
    check_positive,
    expect,
    expect_all,
)
from pyro_nmm.graph_arguments import check_hood, in_single

Values = dict[str, Tensor]
COUNTS = "be integer counts, with -1 for missing ones"


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
        """``data`` as the other methods take it, or an error that names what is wrong."""

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
    emission: Emission, data: Any, values: Values, num_steps: int = 100, tolerance: float = 1e-6
) -> tuple[Values, Tensor]:
    """Expectation maximisation without a graph, from ``values``: labels of nodes are independent,
    of learned shares. With :class:`~pyro_nmm.models.Annotators` it is the method of Dawid and
    Skene.

    :param data: observations, as the emission's ``log_prob`` takes them.
    :param float tolerance: rise of the mean log-likelihood, in nats, below which it stops.
    :return: the emission's parameters, and ``(N, C)`` the probabilities of labels. Cost: the
        emission's ``maximise`` and ``log_prob``, for at most ``num_steps`` times.
    """
    evidence, size = emission.log_prob(values, data), emission.num_labels
    log_share, old = evidence.new_full((size,), -math.log(size)), -torch.inf
    for _ in range(num_steps):
        joint = evidence + log_share
        bound = joint.logsumexp(-1).mean().item()
        if bound - old < tolerance:
            break
        probs, old = joint.softmax(-1), bound
        values = emission.maximise(data, probs, values)
        evidence = emission.log_prob(values, data)
        log_share = ((probs.sum(0) + 1) / (len(probs) + size)).log()
    return values, (evidence + log_share).softmax(-1)


@dataclass(frozen=True)
class _Columns:
    num_labels: int
    strength: float = 1.0

    def __post_init__(self) -> None:
        check_integers(2, num_labels=self.num_labels)
        check_positive(strength=self.strength)


class NormalEmission(_Columns):
    r"""Features that are Normal given the label, such as principal components, or colors of pixels.

    .. math::

        x_{id} \mid u_i = k \sim \mathrm{Normal}(\mu_{kd}, \sigma_{kd}^2), \qquad
        \sigma_{kd}^2 \sim \mathrm{InverseGamma}(a, a s_d^2), \quad
        \mu_{kd} \mid \sigma_{kd} \sim \mathrm{Normal}(m_d, \sigma_{kd}^2 / a)

    where :math:`m_d` and :math:`s_d^2` are the data's mean and variance. Data are ``(N, D)``
    floats, in which NaN is missing.

    >>> emission = NormalEmission(num_labels=2)
    >>> x = torch.tensor([[0.0], [0.2], [4.0], [torch.nan]])
    >>> values = {"mean": torch.tensor([[0.0], [4.0]]), "variance": torch.ones(2, 1)}
    >>> emission.log_prob(values, x).softmax(-1)[:, 0].round(decimals=3)
    tensor([1.0000, 0.9990, 0.0000, 0.5000])

    :param int num_labels: ``C``.
    :param float strength: :math:`a`, how many nodes the prior is worth.
    """

    support: ClassVar = {
        "mean": constraints.independent(constraints.real, 2),
        "variance": constraints.independent(constraints.positive, 2),
    }

    def check(self, hood: Neighborhood, data: Any) -> Tensor:
        """Features ``(N, D)``, neither missing nor equal in a whole column."""
        data = _rows(data, hood)
        if not data.is_floating_point():
            raise ValueError(f"data must be floats, NaN if missing, got {data.dtype}")
        expect_all("data", data, ~data.isinf(), "be finite or NaN")
        _check_columns(data.isnan(), "is missing everywhere")
        mean, variance = _centre(data.double())
        floor = 1e-12 * mean.square().clamp(min=torch.finfo(torch.double).tiny)
        _check_columns((variance <= floor)[None], "is the same everywhere")
        return in_single(data)

    def start(self, data: Tensor, hood: Neighborhood) -> Values:
        """A mixture without a graph, from the features of nodes drawn at random."""
        data = self.check(hood, data)
        mean = _seeds(data, self.num_labels)
        values = {"mean": mean, "variance": _centre(data)[1].expand_as(mean)}
        return mixture_em(self, data, values)[0]

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
        """Of means and variances, as a density of means and of logarithms."""
        mean, variance = values["mean"], values["variance"]
        centre, spread = _centre(data)
        off = spread + (mean - centre).square() / 2
        return -((self.strength + 0.5) * variance.log() + self.strength * off / variance).sum()

    def maximise(self, data: Tensor, probs: Tensor, values: Values) -> Values:
        """Posterior modes, of nodes weighted by ``probs``, ``(N, C)``."""
        weight, mean, squares, spread = self._posterior(data, probs)
        spread = squares + 2 * self.strength * spread
        return {"mean": mean, "variance": spread / (weight + 1 + 2 * self.strength)}

    def draw(self, data: Tensor, labels: Tensor, values: Values) -> Values:
        """From the Normal-inverse-gamma posterior of every feature and label."""
        probs, a = one_hot(labels, self.num_labels).to(data), self.strength
        weight, mean, squares, spread = self._posterior(data, probs)
        variance = 1 / Gamma(a + weight / 2, a * spread + squares / 2).sample()
        mean = Normal(mean, (variance / (weight + a)).sqrt()).sample()
        return {"mean": mean, "variance": variance}

    def _posterior(self, data: Tensor, probs: Tensor) -> tuple[Tensor, ...]:
        """Weights, posterior means and squares about them, ``(C, D)``; and the data's variance."""
        seen, (centre, spread) = (~data.isnan()).to(data), _centre(data)
        off = (data - centre).nan_to_num()
        weight, sums = probs.T @ seen, probs.T @ off
        shift = sums / (weight + self.strength)
        squares = (probs.T @ off.square() - sums * shift).clamp(min=0)
        return weight, centre + shift, squares, spread


class PoissonEmission(_Columns):
    r"""Counts that are Poisson given the label.

    .. math::

        x_{id} \mid u_i = k \sim \mathrm{Poisson}(\lambda_{kd}), \qquad
        \lambda_{kd} \sim \mathrm{Gamma}(a, a / m_d)

    where :math:`m_d` is the data's mean. Data are ``(N, D)`` integers, in which -1 is missing.
    Parameters as for :class:`NormalEmission`.

    >>> emission = PoissonEmission(num_labels=2)
    >>> values = {"rate": torch.tensor([[1.0], [9.0]])}
    >>> log_prob = emission.log_prob(values, torch.tensor([[0], [8], [-1]]))
    >>> log_prob.softmax(-1)[:, 0].round(decimals=3)
    tensor([1.0000, 0.0000, 0.5000])
    """

    support: ClassVar = {"rate": constraints.independent(constraints.positive, 2)}

    def check(self, hood: Neighborhood, data: Any) -> Tensor:
        """Counts ``(N, D)``, not missing everywhere in a column."""
        data = _rows(data, hood)
        if data.is_floating_point() or data.is_complex() or data.dtype == torch.bool:
            raise ValueError(f"data must {COUNTS}, got dtype {data.dtype}")
        expect_all("data", data, data >= -1, COUNTS)
        _check_columns(data < 0, "is missing everywhere")
        return data

    def start(self, data: Tensor, hood: Neighborhood) -> Values:
        """A mixture without a graph, from the counts of nodes drawn at random."""
        counts = _floats(data := self.check(hood, data))
        rate = (_seeds(counts, self.num_labels) + _mean(counts)) / 2
        return mixture_em(self, data, {"rate": rate})[0]

    def log_prob(self, values: Values, data: Tensor) -> Tensor:
        """``(N, C)``: of all counts of a node, in nats."""
        expect("data", data, ("N", values["rate"].shape[-1]), kind="integers")
        check_each_call("data", data, lambda x: x >= -1, COUNTS)
        seen, counts = (data >= 0).to(values["rate"]), data.clamp(min=0).to(values["rate"])
        log_prob = counts @ values["rate"].log().mT - seen @ values["rate"].mT
        return log_prob - (torch.lgamma(counts + 1) * seen).sum(-1, keepdim=True)

    def log_prior(self, values: Values, data: Tensor) -> Tensor:
        """Of the rates, as a density of their logarithms."""
        rate = values["rate"]
        return self.strength * (rate.log() - rate / _mean(_floats(data))).sum()

    def maximise(self, data: Tensor, probs: Tensor, values: Values) -> Values:
        """Posterior means, of nodes weighted by ``probs``, ``(N, C)``."""
        return {"rate": torch.div(*self._posterior(data, probs))}

    def draw(self, data: Tensor, labels: Tensor, values: Values) -> Values:
        """From the gamma posterior of every rate."""
        probs = one_hot(labels, self.num_labels).to(values["rate"])
        return {"rate": Gamma(*self._posterior(data, probs)).sample()}

    def _posterior(self, data: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        counts = _floats(data).to(probs)
        above = self.strength + probs.T @ counts.nan_to_num()
        return above, self.strength / _mean(counts) + probs.T @ (data >= 0).to(probs)


def _rows(data: Any, hood: Neighborhood) -> Tensor:
    check_hood(hood)
    data, note = as_tensor("data", data, hood.device), "a row for every node of hood"
    return expect("data", data, (hood.num_nodes, "D"), like=hood, note=note)


def _floats(counts: Tensor) -> Tensor:
    return torch.where(counts < 0, torch.nan, counts.to(torch.get_default_dtype()))


def _mean(counts: Tensor) -> Tensor:
    """``(D,)``: mean counts, positive in a column of zeros too."""
    return _centre(counts)[0].clamp(min=1e-6)


def _centre(data: Tensor) -> tuple[Tensor, Tensor]:
    """``(D,)``: mean and variance of the entries that are not missing."""
    mean = data.nanmean(0)
    return mean, (data - mean).square().nanmean(0)


def _seeds(data: Tensor, size: int) -> Tensor:
    """``(C, D)``: data of random nodes, with means for missing entries."""
    place = torch.randint(len(data), (size,), device=data.device)
    if len(data) >= size:
        place = torch.randperm(len(data), device=data.device)[:size]
    return torch.where(data[place].isnan(), _centre(data)[0], data[place])


def _check_columns(wrong: Tensor, what: str) -> None:
    columns = wrong.all(0)
    if columns.any():
        raise ValueError(f"data {what} in column {int(columns.nonzero()[0])}: leave it out")
