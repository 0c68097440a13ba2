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
    hood, alpha = posterior.hood, posterior.mixture.table
    rows = hood.take(order)
    attention = posterior.mixture.attention[rows.edge]
    total = alpha.sum(-1).index_select(-1, rows.source)
    mean = posterior.log_weights.exp()
    groups = Groups(rows.source[None], rows.num_nodes)
    uniforms = torch.rand(
        len(alpha), len(order), dtype=torch.double, device=order.device, generator=generator
    )
    shape = (len(alpha), rows.num_edges)
    chosen = torch.zeros(shape, dtype=torch.int32, device=order.device)
    labels, edges = torch.full_like(order, -1), torch.full_like(uniforms, -1, dtype=torch.long)
    while True:
        below = total + groups.earlier(chosen)
        weight = []
        for k in range(posterior.num_classes):
            same = groups.earlier(chosen * (labels == k)[rows.row])
            above = alpha[..., k].index_select(-1, rows.source) + same
            weight.append(attention * above / below)
        new_labels = torch.stack([mean @ rows.sum(w) for w in weight], -1).argmax(-1)
        own = new_labels[rows.row].expand(1, *shape)
        new_edges = pick(rows, torch.stack(weight).gather(0, own)[0], uniforms)
        if torch.equal(new_labels, labels) and torch.equal(new_edges, edges):
            return labels
        labels, edges = new_labels, new_edges
        chosen = indicator(edges, rows.num_edges)
