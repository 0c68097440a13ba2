# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Labels that share label distributions, drawn from urns (Blackwell and MacQueen, 1973)."""

from __future__ import annotations

import torch
from torch import Tensor

from pyro_nmm.concentrations import Concentrations, draw_labels, gather, totals
from pyro_nmm.ops.counts import Groups


@torch.no_grad()
def draw_from_urns(alpha: Concentrations, choices: Tensor, known: Tensor | None = None) -> Tensor:
    r"""
    A draw of :math:`p(y \mid c)` without any label distribution: the entry of rank :math:`t`
    among those that chose :math:`j`, counted from zero,

    .. math::

        \text{copies one of the } t \text{ earlier labels with probability }
        \frac{t}{A_j + t}, \qquad \text{or else is drawn from } \alpha_j / A_j .

    :param Tensor choices: ``(..., n)`` node ids.
    :param Tensor known: ``(m,)`` labels of the first ``m`` entries, which stay. A table ``alpha``
        with ``known`` has no batch dimensions.
    :return: ``(..., n)`` labels. Cost: :math:`O(n (C + \log n))`.
    """
    groups = Groups(choices.reshape(-1, choices.shape[-1]), alpha.shape[-2])
    total = gather(totals(alpha), choices).flatten()
    rank = groups.rank - groups.first
    copies = torch.rand_like(total) * (total + rank) < rank
    first = 0 if known is None else len(known)
    if first:
        copies.view_as(choices)[..., :first] = False
    # In double precision: a place among millions has more digits than single precision.
    share = torch.rand_like(total, dtype=torch.double)
    earlier = groups.order[groups.first + (share * rank).long()]
    place = torch.arange(len(rank), device=rank.device)
    origin = torch.where(copies, earlier, place)
    while True:  # from copy to copy, twice as far each time
        further = origin[origin]
        if torch.equal(further, origin):
            fresh = draw_labels(alpha, choices[..., first:])
            if known is not None:
                fresh = torch.cat([known.expand(*choices.shape[:-1], -1), fresh], -1)
            return fresh.flatten()[origin].view_as(choices)
        origin = further
