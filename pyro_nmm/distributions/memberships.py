# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Communities of nodes: sticks, relaxed memberships, and their mixture over neighbours."""

import math
from collections.abc import Sequence
from enum import StrEnum

import torch
from pyro.distributions import Independent, Kumaraswamy, Logistic
from pyro.ops.provenance import track_provenance
from torch import Size, Tensor
from torch.autograd.function import once_differentiable
from torch.distributions import constraints, register_kl
from torch.nn import functional as F

from pyro_nmm.arguments import as_member, check_positive, expect, expect_all
from pyro_nmm.blocks import rows_at
from pyro_nmm.distributions.base import GraphDistribution
from pyro_nmm.distributions.factors import NeighborChoice
from pyro_nmm.graph_arguments import check_hood, check_logits, check_scores
from pyro_nmm.neighborhood import Neighborhood
from pyro_nmm.provenance import untracked


class StickShares(Kumaraswamy):
    """Kumaraswamy variables with finite densities and derivatives in single precision."""

    def rsample(self, sample_shape=()) -> Tensor:
        shape = self._extended_shape(Size(sample_shape))
        a, b = self.concentration1, self.concentration0
        info = torch.finfo(a.dtype)
        u = torch.rand(shape, dtype=a.dtype, device=a.device).clamp(info.eps, 1 - info.eps)
        # v = (1 - u^(1/b))^(1/a)
        return ((-(u.log() / b).expm1()).log() / a).exp().clamp(info.tiny, 1 - info.eps)

    def log_prob(self, value: Tensor) -> Tensor:
        if self._validate_args:
            self._validate_sample(value)
        a, b = self.concentration1, self.concentration0
        log_v = value.clamp(max=1 - torch.finfo(value.dtype).eps).log()
        return (a * b).log() + (a - 1) * log_v + (b - 1) * (-(a * log_v).expm1()).log()


def stick_logits(v: Tensor) -> Tensor:
    r"""``(..., K)``: finite log-odds of :math:`\pi_k = \prod_{m \le k} v_m`, shares :math:`v`."""
    info = torch.finfo(v.dtype)
    log_pi = v.clamp(info.tiny, 1 - info.eps).log().cumsum(-1)
    return log_pi - (-log_pi.expm1()).log()


@register_kl(torch.distributions.Kumaraswamy, torch.distributions.Kumaraswamy)
def _kl_from_beta(p: torch.distributions.Kumaraswamy, q: torch.distributions.Kumaraswamy) -> Tensor:
    """Where ``q`` is Beta(alpha, 1), the prior of the sticks (Nalisnick and Smyth, 2017)."""
    parameters = p.concentration1, p.concentration0, q.concentration1, q.concentration0
    a, b, alpha, one = (_distinct(parameter) for parameter in parameters)
    if not (one == 1).all():
        raise NotImplementedError("in closed form for Kumaraswamy(alpha, 1) = Beta(alpha, 1) alone")
    euler = -torch.digamma(torch.ones((), dtype=a.dtype, device=a.device))
    share = (a - alpha) / a * (-euler - torch.digamma(b) - 1 / b)
    divergence = share + (a * b).log() - alpha.log() - (b - 1) / b
    return divergence.expand(torch.broadcast_shapes(p.batch_shape, q.batch_shape))


def _distinct(x: Tensor) -> Tensor:
    """One of the elements that ``expand`` repeats along a dimension."""
    for dim, stride in enumerate(x.stride()):
        x = x.narrow(dim, 0, 1) if stride == 0 and x.shape[dim] else x
    return x


class _AttentionEstimator(StrEnum):
    """How a sample's derivative follows the attention, see :class:`MembershipMixture`."""

    PATHWISE = "pathwise"
    LINEAR = "linear"
    DETACHED = "detached"


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
    r"""Relaxed binary vectors of nodes, each drawn with the log-odds of a chosen neighbour.

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
    the derivatives towards the attention. ``"pathwise"`` is unbiased, with a variance that grows
    with every dimension in which neighbours differ. ``"linear"`` takes the loss to be linear
    between neighbours, :math:`\partial s_i / \partial L_{ij} = \lambda_j / \tau`: biased, of little
    variance. ``"detached"`` leaves them to the caller.

    >>> hood = Neighborhood(torch.tensor([[0, 1], [1, 0]]), num_nodes=2)
    >>> mixture = MembershipMixture(hood, torch.randn(2, 5), torch.zeros(hood.num_edges))
    >>> s = mixture.rsample()
    >>> s.shape, mixture.log_prob(s).shape
    (torch.Size([2, 5]), torch.Size([]))

    Cost: :math:`O(E K)` a sample, a ``log_prob`` and a gradient. ``hood`` and ``logits`` are as for
    :class:`~pyro_nmm.NeighborMixture`.

    :param Tensor log_odds: ``(..., N, K)``, :math:`\lambda`.
    :param float temperature: :math:`\tau`.
    """

    has_rsample = True
    support = constraints.independent(constraints.real, 2)
    shown = "hood", "num_memberships", "temperature", "estimator"

    def __init__(
        self, hood: Neighborhood, log_odds: Tensor, logits: Tensor, temperature: float = 1.0,
        estimator: str = "linear", *, validate_args=None,
    ) -> None:  # fmt: skip
        check_hood(hood)
        logits = check_logits(hood, logits)
        shape = "...", hood.num_sources, "K"
        expect("log_odds", log_odds, shape, kind="float", like=hood, note="one row per source")
        check_positive(temperature=temperature)
        self.hood, self.log_odds, self.logits = hood, log_odds, logits
        self.temperature, self.num_memberships = temperature, log_odds.shape[-1]
        self.estimator = as_member(_AttentionEstimator, estimator=estimator)
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

    def choices(self, value: Tensor, order: Tensor | None = None) -> NeighborChoice:
        """The choices given ``s``: independent, so that there is no need for an ``order``."""
        scores = self.logits + self._log_densities(value, self.log_odds)
        return NeighborChoice(self.hood, scores, validate_args=False)

    def log_prob(self, value: Tensor) -> Tensor:
        """``(...)``: the log-density of vectors ``(..., N, K)``, choices summed out."""
        if self._validate_args:
            self._validate_sample(value)
        return self.node_log_prob(value).sum(-1)

    def node_log_prob(self, value: Tensor) -> Tensor:
        """``(..., N)``: the log-density of every node's vector."""
        (log_odds, logits, value), provenance = untracked(self.log_odds, self.logits, value)
        log_joint = self.hood.log_softmax(logits) + self._log_densities(value, log_odds)
        log_prob = self.hood.logsumexp(log_joint)
        shape = torch.broadcast_shapes(log_prob.shape[:-1], self.batch_shape)
        return track_provenance(log_prob.expand(*shape, -1), provenance)

    def rsample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """``(*sample_shape, ..., N, K)``: reparameterised draws, see ``estimator``."""
        batch = self._extended_shape(Size(sample_shape))[:-2]
        (log_odds, logits), provenance = untracked(self.log_odds, self.logits)
        with torch.no_grad():
            choice = NeighborChoice(self.hood, logits, validate_args=False)
            value, _ = untracked(self.given(choice.expand(batch).sample()).sample())
        log_attention = self.hood.log_softmax(logits).expand(*batch, -1)
        value = _Reparameterised.apply(*value, log_odds.expand(*batch, -1, -1), log_attention, self)
        return track_provenance(value, provenance)

    def _log_densities(self, value: Tensor, log_odds: Tensor) -> Tensor:
        """``(..., E)``: of each row's vector under each of its neighbours' log-odds."""
        value, hood = self.temperature * value, self.hood
        # What is linear in the gap is summed before there is one for every edge.
        linear = log_odds.sum(-1).index_select(-1, hood.source)
        linear = linear - value.sum(-1).index_select(-1, hood.row)
        curved = F.softplus(self._gap(log_odds, value)).sum(-1)
        log_densities = linear - 2 * curved + value.shape[-1] * math.log(self.temperature)
        # Log densities are at most -curved, and inf - inf would be NaN.
        return log_densities.masked_fill(curved.isinf(), -torch.inf)

    def _gap(self, log_odds: Tensor, value: Tensor) -> Tensor:
        """``(..., E, K)``: the neighbour's log-odds minus the node's value."""
        hood = self.hood
        return rows_at(log_odds, hood.source) - rows_at(value, hood.row)


class _Reparameterised(torch.autograd.Function):
    """Samples with derivatives ``v``, ``dq + div(q v) = 0`` (Jankowiak and Obermeyer, 2018)."""

    @staticmethod
    def forward(ctx, value: Tensor, log_odds: Tensor, log_attention: Tensor, mixture) -> Tensor:
        ctx.mixture = mixture
        ctx.save_for_backward(value, log_odds, log_attention)
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream: Tensor):
        value, log_odds, log_attention = ctx.saved_tensors
        mixture, hood = ctx.mixture, ctx.mixture.hood
        upstream = upstream / mixture.temperature
        g = rows_at(upstream, hood.row)
        log_joint = log_attention + mixture._log_densities(value, log_odds)
        log_posterior = hood.log_softmax(log_joint)
        grad_odds = torch.zeros_like(log_odds)
        grad_odds.index_add_(-2, hood.source, log_posterior.exp()[..., None] * g)
        if mixture.estimator is _AttentionEstimator.DETACHED:
            return None, grad_odds, None, None
        attention = log_attention.exp()
        if mixture.estimator is _AttentionEstimator.LINEAR:
            shift = rows_at(log_odds, hood.source)
        else:
            # Weight goes from a component to one at the mean log-odds, dimension by dimension:
            # those before k have gone already, those after have not.
            mean = hood.sum((attention[..., None] * rows_at(log_odds, hood.source)).mT).mT
            mean_gap = rows_at(mean - mixture.temperature * value, hood.row)
            gap = mixture._gap(log_odds, mixture.temperature * value)
            constant = math.log(mixture.temperature)
            before, terms = (x - 2 * F.softplus(x) + constant for x in (mean_gap, gap))
            before = before.cumsum(-1) - before
            after = terms.flip(-1).cumsum(-1).flip(-1) - terms
            ratio = before + after - hood.logsumexp(log_joint).index_select(-1, hood.row)[..., None]
            change = mean_gap.neg().sigmoid() - gap.neg().sigmoid()
            shift = mixture.temperature * ratio.clamp(max=80).exp() * change
        # Towards the attention itself, and from there to its logarithm.
        return None, grad_odds, attention * (shift * g).sum(-1), None
