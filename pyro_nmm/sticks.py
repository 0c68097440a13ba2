# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The stick-breaking construction of the Indian buffet process (Teh, Görür, Ghahramani, 2007)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributions import Beta, Kumaraswamy, register_kl


def stick_logits(v: Tensor) -> Tensor:
    r"""
    The log-odds of what is left of a stick that is broken again and again,
    :math:`\log \frac{\pi_k}{1 - \pi_k}` with :math:`\pi_k = \prod_{m \le k} v_m`.

    >>> stick_logits(torch.tensor([0.8, 0.5])).sigmoid()
    tensor([0.8000, 0.4000])

    :param Tensor v: ``(..., K)`` shares in [0, 1].
    :return: ``(..., K)``, finite also where a share rounds to 0 or 1.
    """
    eps = torch.finfo(v.dtype).eps
    log_pi = v.clamp(min=eps, max=1 - eps).log().cumsum(-1)
    return log_pi - (-log_pi.expm1()).log()


@register_kl(Kumaraswamy, Beta)
def _kl_kumaraswamy_beta(p: Kumaraswamy, q: Beta) -> Tensor:
    """In closed form for Beta(alpha, 1), the prior of the sticks (Nalisnick and Smyth, 2017)."""
    if not (q.concentration0 == 1).all():
        raise NotImplementedError("in closed form for Beta(alpha, 1) alone")
    a, b, alpha = p.concentration1, p.concentration0, q.concentration1
    euler = -torch.digamma(torch.ones((), dtype=a.dtype, device=a.device))
    share = (a - alpha) / a * (-euler - torch.digamma(b) - 1 / b)
    return share + (a * b).log() - alpha.log() - (b - 1) / b
