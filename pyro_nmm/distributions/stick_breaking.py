# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The stick-breaking construction of the Indian buffet process (Teh, Görür, Ghahramani, 2007)."""

import torch
from pyro.distributions import Kumaraswamy
from torch import Size, Tensor
from torch.distributions import register_kl


class StickShares(Kumaraswamy):
    """Kumaraswamy variables with finite densities and derivatives in single precision."""

    def rsample(self, sample_shape=()) -> Tensor:
        shape = self._extended_shape(Size(sample_shape))
        a, b = self.concentration1, self.concentration0
        info = torch.finfo(a.dtype)
        u = torch.rand(shape, dtype=a.dtype, device=a.device).clamp(info.eps, 1 - info.eps)
        # v = (1 - u^(1/b))^(1/a)
        v = ((-(u.log() / b).expm1()).log() / a).exp()
        return v.clamp(info.tiny, 1 - info.eps)

    def log_prob(self, value: Tensor) -> Tensor:
        if self._validate_args:
            self._validate_sample(value)
        a, b = self.concentration1, self.concentration0
        log_v = value.clamp(max=1 - torch.finfo(value.dtype).eps).log()
        return (a * b).log() + (a - 1) * log_v + (b - 1) * (-(a * log_v).expm1()).log()


def stick_logits(v: Tensor) -> Tensor:
    r"""
    ``(..., K)``: finite log-odds of :math:`\pi_k = \prod_{m \le k} v_m` for shares ``(..., K)``.

    >>> stick_logits(torch.tensor([0.8, 0.5])).sigmoid()
    tensor([0.8000, 0.4000])
    """
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
