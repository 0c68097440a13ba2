# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""How good predicted probabilities are, for nodes and for pairs of nodes."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def log_likelihood(probs: Tensor, y: Tensor) -> Tensor:
    r"""
    :math:`\frac1n \sum_i \log p(y_i)`, in nats per node.

    :param Tensor probs: ``(n, C)``.
    :param Tensor y: ``(n,)``.
    """
    return probs.gather(-1, y[:, None]).log().mean()


def brier(probs: Tensor, y: Tensor) -> Tensor:
    r"""
    :math:`\frac1n \sum_i \sum_k (p_{ik} - \delta(y_i = k))^2`, between 0 and 2.

    :param Tensor probs: ``(n, C)``.
    :param Tensor y: ``(n,)``.
    """
    return (probs - F.one_hot(y, probs.shape[-1])).square().sum(-1).mean()


def pair_log_likelihood(table: Tensor, y: Tensor, pairs: Tensor) -> Tensor:
    r"""
    :math:`\frac1P \sum_{(i,j)} \log p(y_i, y_j)`, the paper's PLL, in nats per pair.

    :param Tensor table: ``(P, C, C)``, from ``pairwise`` or :func:`independent_pairs`.
    :param Tensor y: ``(N,)``.
    :param Tensor pairs: ``(2, P)`` node ids.
    """
    return (
        table[torch.arange(pairs.shape[1], device=y.device), y[pairs[0]], y[pairs[1]]].log().mean()
    )


def independent_pairs(probs: Tensor, pairs: Tensor) -> Tensor:
    """
    Products of marginals: what a model without correlation says of pairs.

    :param Tensor probs: ``(N, C)``.
    :param Tensor pairs: ``(2, P)`` node ids.
    :return: ``(P, C, C)``.
    """
    first, second = probs[pairs]
    return first[:, :, None] * second[:, None, :]


def temperature_scaling(scores: Tensor, y: Tensor, held_out: Tensor) -> float:
    r"""
    The temperature :math:`t` of :math:`\mathrm{softmax}(\text{scores} / t)` that maximises the
    likelihood of the held-out labels (Guo et al. 2017, "On Calibration of Modern Neural
    Networks", ICML): the baseline that :class:`~pyro_nmm.models.StackedNMM` contains.

    :param Tensor scores: ``(N, C)`` logits.
    :param Tensor y: ``(N,)`` labels.
    :param Tensor held_out: ``(N,)`` boolean mask.
    """
    if not held_out.any():
        raise ValueError("held_out selects no node: at least one entry must be True")
    scores = scores.detach()
    log_scale = torch.zeros((), dtype=scores.dtype, device=scores.device, requires_grad=True)
    optimizer = torch.optim.LBFGS([log_scale], max_iter=100, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        loss = F.cross_entropy(scores[held_out] * log_scale.exp(), y[held_out])
        loss.backward()
        return loss

    optimizer.step(closure)
    return (-log_scale).exp().item()
