# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""What one model gains on another over pairs of nodes, pair by pair: means may rest on hubs."""

from __future__ import annotations

import torch
from torch import Tensor


def pair_log_probs(table: Tensor, y: Tensor, pairs: Tensor) -> Tensor:
    """``(P,)`` values of log p(y_i, y_j), from ``(P, C, C)`` tables."""
    rows = torch.arange(pairs.shape[1], device=y.device)
    return table[rows, y[pairs[0]], y[pairs[1]]].double().clamp(min=1e-24).log()


def summary(gain: Tensor, pairs: Tensor, nodes: Tensor, num_resamples: int = 1000) -> dict:
    r"""
    The mean of the gain in nats per pair and a 95 % interval of it, the median pair, the share of
    pairs that gain, and the most that any two nodes add to the mean.

    The interval is a bootstrap over *nodes* (Snijders and Borgatti 1999, "Non-parametric standard
    errors and tests for network statistics", Connections 22): pairs that share a node are not
    independent, so nodes are drawn with replacement, and a pair weighs the product of how often
    its two ends were drawn. It stands for one split, not for the spread over splits.

    :param Tensor gain: ``(P,)``.
    :param Tensor pairs: ``(2, P)`` distinct node ids a pair, each pair once.
    :param Tensor nodes: ``(N,)`` boolean mask of the nodes that are drawn.
    """
    gain, where = gain.cpu(), (nodes.cumsum(0) - 1)[pairs].cpu()
    size = int(nodes.sum())
    # Its own generator: what is measured after this draws what it did without.
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(size, (num_resamples, size), generator=generator)
    counts = torch.zeros(num_resamples, size, dtype=gain.dtype)
    counts.scatter_add_(1, drawn, torch.ones_like(counts))
    weights = counts[:, where[0]] * counts[:, where[1]]
    means = (weights @ gain) / weights.sum(1)
    low, high = means.quantile(torch.tensor([0.025, 0.975], dtype=gain.dtype)).tolist()
    return {
        "mean": gain.mean().item(), "low": low, "high": high, "median": gain.median().item(),
        "share": (gain > 0).double().mean().item(), "two nodes": two_nodes(gain, where, size),
    }  # fmt: skip


def two_nodes(gain: Tensor, pairs: Tensor, size: int) -> float:
    """The largest sum of the gains of all pairs that two nodes take part in, over ``P``."""
    table = torch.zeros(size, size, dtype=gain.dtype)
    table.index_put_((pairs[0], pairs[1]), gain, accumulate=True)
    table = table + table.T
    own = table.sum(1)
    together = own[:, None] + own - table
    together.fill_diagonal_(-torch.inf)
    return together.max().item() / len(gain)
