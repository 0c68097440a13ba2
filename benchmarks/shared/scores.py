# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Scores of predicted probabilities, of nodes and of pairs of nodes."""

from torch import Tensor
from torch.nn import functional as F


def mean_log_prob(probs: Tensor, y: Tensor) -> Tensor:
    r""":math:`\frac1n \sum_i \log p(y_i)` of ``y`` ``(n,)``, ``probs`` ``(n, C)``, in nats."""
    return probs.gather(-1, y[:, None]).clamp(min=0).log().mean()


def brier(probs: Tensor, y: Tensor) -> Tensor:
    r""":math:`\frac1n \sum_{ik} (p_{ik} - \delta(y_i = k))^2` of ``y``, ``probs`` ``(n, C)``."""
    return (probs - F.one_hot(y, probs.shape[-1])).square().sum(-1).mean()


def independent_pairs(probs: Tensor, pairs: Tensor) -> Tensor:
    """``(P, C, C)``: products of marginals ``(N, C)`` for pairs ``(2, P)`` of node ids."""
    first, second = probs[pairs]
    return first[:, :, None] * second[:, None, :]
