# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Memberships of nodes in communities: relaxed bits, and their mixture over neighbours."""

import math
from collections.abc import Sequence
from typing import Literal

import torch
from pyro.distributions import Independent, Logistic
from pyro.ops.provenance import track_provenance
from torch import Size, Tensor
from torch.distributions import constraints
from torch.nn import functional as F

from pyro_nmm.arguments import check_positive, expect, expect_all
from pyro_nmm.blocks import rows_at
from pyro_nmm.distributions.base import GraphDistribution
from pyro_nmm.distributions.factors import NeighborChoice
from pyro_nmm.model_arguments import check_hood, check_logits, check_scores
from pyro_nmm.neighborhood import Neighborhood
from pyro_nmm.provenance import untracked


class RelaxedLogits(Logistic):
    """Logistic variables whose draws are finite in single precision too."""

    def rsample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        shape = self._extended_shape(Size(sample_shape))
        info = torch.finfo(self.loc.dtype)
        u = torch.rand(shape, dtype=self.loc.dtype, device=self.loc.device)
        return self.loc + self.scale * u.clamp(info.eps, 1 - info.eps).logit()


def relaxed_logits(log_odds: Tensor, temperature: float) -> RelaxedLogits:
    """The log-odds of relaxed Bernoulli variables (Maddison, Mnih and Teh, 2017)."""
    return RelaxedLogits(log_odds / temperature, 1 / temperature)


class MembershipMixture(GraphDistribution):
    r"""Relaxed binary vectors with the log-odds of a chosen neighbour, the paper's section 5.3.

    .. math::

        c_i \sim \mathrm{Categorical}(L_i), \qquad
        s_{ik} \sim \mathrm{Logistic}(\lambda_{c_i k} / \tau, 1 / \tau), \qquad
        b_{ik} = \sigma(s_{ik})

    Rounded, :math:`b_{ik} \sim \mathrm{Bernoulli}(\sigma(\lambda_{c_i k}))` exactly. Samples are
    log-odds :math:`s`, of event shape ``(N, K)``. Given :math:`\lambda`, nodes are independent:

    .. math::

        \log p(s) = \sum_i \log \sum_{j \in n(i)} L_{ij}
            \prod_k \mathrm{Logistic}(s_{ik}; \lambda_{jk} / \tau, 1 / \tau)

    **Gradient.** Samples are reparameterised, exactly towards :math:`\lambda`. ``estimator`` sets
    the derivatives towards the attention. ``"linear"`` takes the loss to be linear between
    neighbours, :math:`\partial s_i / \partial L_{ij} = \lambda_j / \tau`: biased, of little
    variance. ``"detached"`` leaves them to the caller, such as
    :class:`~pyro_nmm.guides.DGLFRMGuide`.

    >>> hood = Neighborhood(torch.tensor([[0, 1], [1, 0]]), num_nodes=2)
    >>> mixture = MembershipMixture(hood, torch.randn(2, 5), torch.zeros(hood.num_edges))
    >>> s = mixture.rsample()
    >>> s.shape, mixture.log_prob(s).shape
    (torch.Size([2, 5]), torch.Size([]))

    Cost: :math:`O(E K)` a sample, a ``log_prob`` and a gradient. ``hood`` and ``logits`` are as for
    :class:`~pyro_nmm.NeighborMixture`.

    :param Tensor log_odds: ``(..., N, K)``, :math:`\lambda`.
    :param float temperature: :math:`\tau`.
    :raises ValueError: for wrong shapes, log-odds that are not finite, a ``temperature`` that is
        not positive, and an unknown ``estimator``.
    """

    has_rsample = True
    support = constraints.independent(constraints.real, 2)
    shown = "hood", "num_memberships", "temperature", "estimator"

    def __init__(
        self,
        hood: Neighborhood,
        log_odds: Tensor,
        logits: Tensor,
        temperature: float = 1.0,
        estimator: Literal["linear", "detached"] = "linear",
        *,
        validate_args: bool | None = None,
    ) -> None:
        check_hood(hood)
        logits = check_logits(hood, logits)
        shape = "...", hood.num_sources, "K"
        expect("log_odds", log_odds, shape, kind="float", like=hood, note="one row per source")
        check_positive(temperature=temperature)
        if estimator not in ("linear", "detached"):
            raise ValueError(f'estimator must be "linear" or "detached", got {estimator!r}')
        self.hood, self.log_odds, self.logits = hood, log_odds, logits
        self.temperature, self.estimator = temperature, estimator
        self.num_memberships = log_odds.shape[-1]
        batch_shape = torch.broadcast_shapes(log_odds.shape[:-2], logits.shape[:-1])
        event_shape = Size([hood.num_rows, self.num_memberships])
        super().__init__(batch_shape, event_shape, validate_args=validate_args)
        if self._validate_args:
            check_scores(hood, logits)
            (plain,), _ = untracked(log_odds)
            expect_all("log_odds", plain, plain.isfinite(), "be finite")

    def given(self, c: Tensor) -> Independent:
        """The distribution of ``s`` given choices ``(..., N)``."""
        batch = torch.broadcast_shapes(self.log_odds.shape[:-2], c.shape[:-1])
        index = c[..., None].expand(*batch, -1, self.log_odds.shape[-1])
        chosen = self.log_odds.expand(*batch, -1, -1).gather(-2, index)
        return relaxed_logits(chosen, self.temperature).to_event(2)

    def choices(self, value: Tensor) -> NeighborChoice:
        """The choices given ``s``, independent of each other."""
        scores = self.logits + self._log_densities(value, self.log_odds)
        return NeighborChoice(self.hood, scores, validate_args=False)

    def log_prob(self, value: Tensor) -> Tensor:
        """``(...)``: the log-density of vectors ``(..., N, K)``, choices summed out."""
        if self._validate_args:
            self._validate_sample(value)
        (log_odds, logits, value), provenance = untracked(self.log_odds, self.logits, value)
        log_joint = self.hood.log_softmax(logits) + self._log_densities(value, log_odds)
        log_prob = self.hood.logsumexp(log_joint).sum(-1)
        shape = torch.broadcast_shapes(log_prob.shape, self.batch_shape)
        return track_provenance(log_prob.expand(shape), provenance)

    def rsample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """``(*sample_shape, ..., N, K)``: reparameterised draws, see ``estimator``."""
        batch = self._extended_shape(Size(sample_shape))[:-2]
        (log_odds, logits), provenance = untracked(self.log_odds, self.logits)
        hood = self.hood
        with torch.no_grad():
            choice = NeighborChoice(hood, logits, validate_args=False)
            (value,), _ = untracked(self.given(choice.expand(batch).sample()).sample())
            log_joint = hood.log_softmax(logits) + self._log_densities(value, log_odds)
            share = hood.softmax(log_joint)
        if self.estimator == "linear":
            attention = hood.softmax(logits)
            share = share + attention - attention.detach()
        # Zero, whose derivatives are those of the draws.
        moved = share[..., None] * rows_at(log_odds, hood.source) / self.temperature
        moved = torch.zeros_like(value).index_add(-2, hood.row, moved - moved.detach())
        return track_provenance(value + moved, provenance)

    def _log_densities(self, value: Tensor, log_odds: Tensor) -> Tensor:
        """``(..., E)``: of each row's vector under each of its neighbours' log-odds."""
        value, hood = self.temperature * value, self.hood
        # What is linear in the gap is summed before there is one for every edge.
        linear = log_odds.sum(-1).index_select(-1, hood.source)
        linear = linear - value.sum(-1).index_select(-1, hood.row)
        gap = rows_at(log_odds, hood.source) - rows_at(value, hood.row)
        curved = F.softplus(gap).sum(-1)
        log_densities = linear - 2 * curved + value.shape[-1] * math.log(self.temperature)
        # Log densities are at most -curved, and inf - inf would be NaN.
        return log_densities.masked_fill(curved.isinf(), -torch.inf)
