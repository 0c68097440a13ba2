# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
Labels of nodes that share label distributions: by drawing these, or from urns [1].

[1] David Blackwell, James B. MacQueen (1973) "Ferguson Distributions via Polya Urn Schemes", Annals
of Statistics 1, https://doi.org/10.1214/aos/1176342372.
"""

import torch
from torch import Tensor

from pyro_nmm.concentrations import (
    Concentrations,
    OrdinalConcentrations,
    draw_labels,
    gather,
    totals,
)
from pyro_nmm.ops.counts import Groups


@torch.no_grad()
def draw_given_choices(alpha: Concentrations, choices: Tensor) -> Tensor:
    r"""
    A draw of :math:`p(y \mid c)`, with every :math:`z_j \sim \mathrm{Dirichlet}(\alpha_j)` written
    out, or from urns where :math:`\alpha` is a formula.

    :param alpha: ``(..., N, C)``; a table may lack batch dimensions of ``choices``.
    :param Tensor choices: ``(..., n)`` node ids.
    :return: ``(..., n)`` labels. Cost: :math:`O(N C)` a draw; from urns :math:`O(n (C + \log n))`.
    """
    if isinstance(alpha, OrdinalConcentrations):
        return draw_from_urns(alpha, choices)
    log_z = _log_dirichlet(alpha.expand(*choices.shape[:-1], *alpha.shape[-2:]))
    index = choices[..., None].expand(*choices.shape, alpha.shape[-1])
    # Unchecked: the checks fail where there are no draws, and alpha was checked before.
    return torch.distributions.Categorical(
        logits=log_z.gather(-2, index), validate_args=False
    ).sample()


def _log_dirichlet(alpha: Tensor) -> Tensor:
    """
    Logits of Dirichlet draws. A Gamma variate of small shape underflows, and a Dirichlet whose
    variates have all done so would be uniform instead of one-hot; its logarithm does not:
    :math:`G_\\alpha = G_{\\alpha + 1} U^{1 / \\alpha}` in distribution.
    """
    gamma = torch._standard_gamma(alpha + 1).log()
    return gamma + torch.rand_like(gamma).clamp(min=1e-30).log() / alpha


@torch.no_grad()
def draw_from_urns(alpha: Concentrations, choices: Tensor, known: Tensor | None = None) -> Tensor:
    r"""
    A draw of :math:`p(y \mid c)` without any label distribution: the entry of rank :math:`t`
    among those that chose :math:`j`, counted from zero,

    .. math::

        \text{copies one of the } t \text{ earlier labels with probability }
        \frac{t}{A_j + t}, \qquad \text{or else is drawn from } \alpha_j / A_j .

    :param Tensor choices: ``(..., n)`` node ids.
    :param Tensor known: ``(..., m)`` labels of the first ``m`` entries, which stay. A table
        ``alpha`` with ``known`` has no batch dimensions.
    :return: ``(..., n)`` labels. Cost: :math:`O(n (C + \log n))`.
    """
    groups = Groups(choices.reshape(-1, choices.shape[-1]), alpha.shape[-2])
    total = gather(totals(alpha), choices).flatten()
    rank = groups.rank - groups.first
    copies = torch.rand_like(total) * (total + rank) < rank
    first = 0 if known is None else known.shape[-1]
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
