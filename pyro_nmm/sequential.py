# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Predictions one by one, each merged into the known labels before the next."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pyro_nmm.counts import Groups, indicator
from pyro_nmm.sampling import pick

if TYPE_CHECKING:
    from pyro_nmm.posterior import Posterior


@torch.no_grad()
def predict_in_turn(posterior: Posterior, order: Tensor, generator=None) -> Tensor:
    r"""
    The rule for a large set of nodes at the end of the paper's section 3.6: in the given
    order, node ``i`` takes the mode of :math:`p(y_i \mid y_\tau, \hat y_{<i})`, and each of
    the ``T`` samples draws a choice for it, which changes what later nodes see.

    As in :mod:`pyro_nmm.sampling`, the loop over nodes is the fixed point of doing all
    nodes at once, and is reached after at most as many sweeps as there are levels of
    dependent nodes. Cost: :math:`O(T E C)` a sweep, ``E`` the edges into ``order``.

    :param Posterior posterior: from :meth:`NeighborMixture.condition`.
    :param Tensor order: ``(n,)`` unobserved node ids.
    :return: ``(n,)`` labels in that order.
    """
    hood, alpha = posterior.hood, posterior.mixture.alpha
    rows = hood.take(order)
    attention = posterior.mixture.attention[rows.edge]
    total = alpha.sum(-1).index_select(-1, rows.source)
    weights = posterior.log_weights.exp()
    groups = Groups(rows.source[None], rows.num_nodes)
    uniforms = torch.rand(
        len(alpha), len(order), dtype=torch.double, device=order.device, generator=generator
    )
    chosen = torch.zeros(len(alpha), rows.num_edges, dtype=torch.int32, device=order.device)
    labels = edges = None
    while True:
        below = total + groups.earlier(chosen)
        score, by_label = [], []
        for k in range(posterior.num_classes):
            same = groups.earlier(chosen * (labels == k)[rows.row]) if edges is not None else chosen
            by_label.append(attention * (alpha[..., k].index_select(-1, rows.source) + same) / below)
            score.append(weights @ rows.sum(by_label[-1]))
        new_labels = torch.stack(score, -1).argmax(-1)
        picked = torch.stack(by_label).gather(
            0, new_labels[rows.row].expand(1, len(alpha), -1)
        )
        new_edges = pick(rows, picked[0], uniforms)
        if edges is not None and torch.equal(new_labels, labels) and torch.equal(new_edges, edges):
            return labels
        labels, edges = new_labels, new_edges
        chosen = indicator(edges, rows.num_edges)
