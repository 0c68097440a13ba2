# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

r"""The effective sample size of Markov chains.

With :math:`\rho_t` the autocorrelation at lag :math:`t` and :math:`P_k = \rho_{2k} + \rho_{2k+1}`,
the sum of :math:`P_k` ends before its first negative term, and no term exceeds an earlier one [1].

[1] Charles J. Geyer (1992) "Practical Markov Chain Monte Carlo", Statistical Science 7,
https://doi.org/10.1214/ss/1177011137.
"""

import math

import torch
from pyro.ops.stats import autocovariance
from torch import Tensor


@torch.no_grad()
def effective_size(draws: Tensor) -> Tensor:
    r"""Effective sample size ``shape`` of draws ``(B, S, *shape)`` of ``B`` chains, NaN if draws
    never change. Cost: :math:`O(B S \log S)`, in memory :math:`O(B S)`. Pyro's
    ``effective_sample_size`` takes memory :math:`O(S^2)`, and is negative for opposite draws.
    """
    num_chains, size = draws.shape[:2]
    covariance = autocovariance(draws, 1).mean(0)
    if num_chains > 1:
        within = draws.var(1).mean(0)
        between = draws.mean(1).var(0) - within / size
        rho = (between + covariance) / (between + within)
    else:
        rho = covariance / covariance[0]
    rho[0] = 1.0
    pairs = rho[: size // 2 * 2].unflatten(0, (-1, 2)).sum(1)
    pairs[1:] = pairs[1:].clamp(min=0).cummin(0).values
    # Stan's bound: at most log10(B S) times as many as there are.
    number = num_chains * size
    return number / (2 * pairs.sum(0) - 1).clamp(min=1 / math.log10(max(number, 10)))
