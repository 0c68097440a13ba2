# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Scores of predicted probabilities, for nodes and for pairs of nodes."""

import torch
from torch import Tensor
from torch.nn import functional as F


def mean_log_prob(probs: Tensor, y: Tensor) -> Tensor:
    r"""
    :math:`\frac1n \sum_i \log p(y_i)` of labels ``(n,)`` under ``probs`` ``(n, C)``, in nats.

    >>> mean_log_prob(torch.tensor([[0.5, 0.5], [0.2, 0.8]]), torch.tensor([0, 1]))
    tensor(-0.4581)
    """
    return probs.gather(-1, y[:, None]).log().mean()


def brier(probs: Tensor, y: Tensor) -> Tensor:
    r"""
    :math:`\frac1n \sum_{ik} (p_{ik} - \delta(y_i = k))^2` of labels ``(n,)``, ``probs`` ``(n, C)``.

    >>> brier(torch.tensor([[0.5, 0.5], [0.2, 0.8]]), torch.tensor([0, 1]))
    tensor(0.2900)
    """
    return (probs - F.one_hot(y, probs.shape[-1])).square().sum(-1).mean()


def pair_log_likelihood(table: Tensor, y: Tensor, pairs: Tensor) -> Tensor:
    r"""
    :math:`\frac1P \sum_{(i,j)} \log p(y_i, y_j)`, the paper's PLL, in nats per pair, of a table
    ``(P, C, C)`` for pairs ``(2, P)`` of node ids, and labels ``(N,)``.

    >>> pairs, probs = torch.tensor([[0], [1]]), torch.tensor([[0.5, 0.5], [0.2, 0.8]])
    >>> pair_log_likelihood(independent_pairs(probs, pairs), torch.tensor([0, 1]), pairs).exp()
    tensor(0.4000)
    """
    first, second = y[pairs]
    return table[torch.arange(len(first), device=y.device), first, second].log().mean()


def independent_pairs(probs: Tensor, pairs: Tensor) -> Tensor:
    """
    ``(P, C, C)``: products of marginals ``(N, C)`` for pairs ``(2, P)`` of node ids.

    >>> probs = torch.tensor([[0.5, 0.5], [0.2, 0.8]])
    >>> independent_pairs(probs, torch.tensor([[0], [1]]))
    tensor([[[0.1000, 0.4000],
             [0.1000, 0.4000]]])
    """
    first, second = probs[pairs]
    return first[:, :, None] * second[:, None, :]
