# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from pyro_nmm.edges import check_mask


def temperature_scaling(scores: Tensor, y: Tensor, held_out: Tensor) -> float:
    r"""
    The temperature :math:`t` of :math:`\mathrm{softmax}(\text{scores} / t)` that maximises the
    likelihood of the held-out labels (Guo et al. 2017, "On Calibration of Modern Neural
    Networks", ICML): the baseline that :class:`~pyro_nmm.models.StackedNMM` contains.

    >>> scores, y = torch.tensor([[2.0, 0.0]]).repeat(4, 1), torch.tensor([0, 0, 0, 1])
    >>> found = temperature_scaling(scores, y, held_out=torch.ones(4, dtype=torch.bool))
    >>> (scores[0] / found).softmax(0)  # right in three of four cases
    tensor([0.7500, 0.2500])

    :param Tensor scores: ``(N, C)`` logits.
    :param Tensor y: ``(N,)`` labels.
    :param Tensor held_out: ``(N,)`` boolean mask.
    :raises ValueError: for node ids, for a mask of integers, and for one that selects nothing.
    """
    check_mask(held_out, len(scores), scores.device, "held_out", beside="scores")
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
