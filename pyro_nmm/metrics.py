# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""How good predicted probabilities are, for nodes and for pairs of nodes."""

import torch
from torch import Tensor
from torch.nn import functional as F


def mean_log_prob(probs: Tensor, y: Tensor) -> Tensor:
    r"""
    :math:`\frac1n \sum_i \log p(y_i)`, in nats per node.

    >>> mean_log_prob(torch.tensor([[0.5, 0.5], [0.2, 0.8]]), torch.tensor([0, 1]))
    tensor(-0.4581)

    :param Tensor probs: ``(n, C)``.
    :param Tensor y: ``(n,)``.
    """
    return probs.gather(-1, y[:, None]).log().mean()


def brier(probs: Tensor, y: Tensor) -> Tensor:
    r"""
    :math:`\frac1n \sum_i \sum_k (p_{ik} - \delta(y_i = k))^2`, between 0 and 2.

    >>> brier(torch.tensor([[0.5, 0.5], [0.2, 0.8]]), torch.tensor([0, 1]))
    tensor(0.2900)

    :param Tensor probs: ``(n, C)``.
    :param Tensor y: ``(n,)``.
    """
    return (probs - F.one_hot(y, probs.shape[-1])).square().sum(-1).mean()


def pair_log_likelihood(table: Tensor, y: Tensor, pairs: Tensor) -> Tensor:
    r"""
    :math:`\frac1P \sum_{(i,j)} \log p(y_i, y_j)`, the paper's PLL, in nats per pair.

    >>> pairs, probs = torch.tensor([[0], [1]]), torch.tensor([[0.5, 0.5], [0.2, 0.8]])
    >>> pair_log_likelihood(independent_pairs(probs, pairs), torch.tensor([0, 1]), pairs).exp()
    tensor(0.4000)

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

    >>> probs = torch.tensor([[0.5, 0.5], [0.2, 0.8]])
    >>> independent_pairs(probs, torch.tensor([[0], [1]]))
    tensor([[[0.1000, 0.4000],
             [0.1000, 0.4000]]])

    :param Tensor probs: ``(N, C)``.
    :param Tensor pairs: ``(2, P)`` node ids.
    :return: ``(P, C, C)``.
    """
    first, second = probs[pairs]
    return first[:, :, None] * second[:, None, :]
