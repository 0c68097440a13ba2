# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Scores of predicted probabilities, for nodes and for pairs of nodes."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from pyro_nmm.arguments import as_expected, check_range, expect, expect_all
from pyro_nmm.labels import in_label_order

__all__ = ["brier", "independent_pairs", "mean_log_prob", "pair_log_likelihood"]

#: How far a rounded probability may lie outside of 0 to 1.
_ROUNDING = 1e-3


def mean_log_prob(probs: Tensor, y: Tensor) -> Tensor:
    r""":math:`\frac1n \sum_i \log p(y_i)` of labels ``(n,)`` under ``probs`` ``(n, C)``, in nats.

    >>> mean_log_prob(torch.tensor([[0.5, 0.5], [0.2, 0.8]]), torch.tensor([0, 1]))
    tensor(-0.4581)
    """
    probs, y = _scored(probs, y)
    return probs.gather(-1, y[:, None]).clamp(min=0).log().mean()


def brier(probs: Tensor, y: Tensor) -> Tensor:
    r""":math:`\frac1n \sum_{ik} (p_{ik} - \delta(y_i = k))^2` of ``y``, ``probs`` ``(n, C)``.

    >>> brier(torch.tensor([[0.5, 0.5], [0.2, 0.8]]), torch.tensor([0, 1]))
    tensor(0.2900)
    """
    probs, y = _scored(probs, y)
    return (probs - F.one_hot(y, probs.shape[-1])).square().sum(-1).mean()


def pair_log_likelihood(table: Tensor, y: Tensor, pairs: Tensor) -> Tensor:
    r""":math:`\frac1P \sum_{(i,j)} \log p(y_i, y_j)`, the paper's PLL, in nats per pair, of a table
    ``(P, C, C)`` for pairs ``(2, P)`` of node ids, and labels ``(N,)``.

    >>> pairs, probs = torch.tensor([[0], [1]]), torch.tensor([[0.5, 0.5], [0.2, 0.8]])
    >>> pair_log_likelihood(independent_pairs(probs, pairs), torch.tensor([0, 1]), pairs).exp()
    tensor(0.4000)
    """
    table = as_expected("table", table, ("P", "C", "C"), kind="float")
    y = as_expected("y", y, ("N",), kind="labels", like=table).long()
    pairs = _pairs(pairs, len(y), table)
    size = table.shape[-1]
    expect("table", table, (pairs.shape[1], size, size), note="one table per pair")
    first, second = labels = y[pairs]
    _check_values("table", table, "y[pairs]", labels)
    return table[torch.arange(len(first), device=y.device), first, second].clamp(min=0).log().mean()


def independent_pairs(probs: Tensor, pairs: Tensor) -> Tensor:
    """``(P, C, C)``: products of marginals ``(N, C)`` for pairs ``(2, P)`` of node ids.

    >>> probs = torch.tensor([[0.5, 0.5], [0.2, 0.8]])
    >>> independent_pairs(probs, torch.tensor([[0], [1]]))
    tensor([[[0.1000, 0.4000],
             [0.1000, 0.4000]]])
    """
    probs = _by_label(probs)
    pairs = _pairs(pairs, len(probs), probs)
    expect_all("probs", probs, _are_probabilities(probs), "hold probabilities")
    first, second = probs[pairs]
    return first[:, :, None] * second[:, None, :]


def _scored(probs: Any, y: Any) -> tuple[Tensor, Tensor]:
    probs = _by_label(probs)
    note = "one label per row of probs"
    y = as_expected("y", y, (len(probs),), kind="labels", like=probs, note=note).long()
    _check_values("probs", probs, "y", y)
    return probs, y


def _by_label(probs: Any) -> Tensor:
    return as_expected("probs", in_label_order("probs", probs), ("n", "C"), kind="float")


def _pairs(pairs: Any, num_nodes: int, like: Tensor) -> Tensor:
    pairs = as_expected("pairs", pairs, (2, "P"), kind="integers", like=like).long()
    check_range("pairs", pairs, num_nodes)
    return pairs


def _check_values(name: str, probs: Tensor, whose: str, labels: Tensor) -> None:
    """Refuse values that are no probabilities, and labels beyond the columns. A GPU waits once."""
    good, num_classes = _are_probabilities(probs), probs.shape[-1]
    known = (labels >= 0) & (labels < num_classes)
    if not good.all() & known.all():
        expect_all(name, probs, good, "hold probabilities")
        expect_all(whose, labels, known, f"hold labels 0..{num_classes - 1}")


def _are_probabilities(probs: Tensor) -> Tensor:
    return (probs > -_ROUNDING) & (probs < 1 + _ROUNDING)  # NaN is none
