# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
Labels of nodes that share label distributions, which are drawn or summed out by urns [1].

[1] David Blackwell, James B. MacQueen (1973) "Ferguson Distributions via Polya Urn Schemes", Annals
of Statistics 1, https://doi.org/10.1214/aos/1176342372.
"""

import torch
from torch import Tensor

from pyro_nmm.concentrations import Concentrations, draw_labels, gather, totals
from pyro_nmm.ops.counts import Groups

#: On a CPU urns take a third of the time of z from about so many labels on.
MANY = 2**16


@torch.no_grad()
def draw_given_choices(alpha: Concentrations, choices: Tensor) -> Tensor:
    r"""``(..., n)``: labels of :math:`p(y \mid c)`; from a table's :math:`z`, or from urns."""
    if not isinstance(alpha, Tensor):
        return draw_from_urns(alpha, choices)
    if alpha.dim() == 2 and choices.numel() >= MANY and alpha.device.type == "cpu":
        return draw_from_urns(alpha, choices)
    log_z = _log_dirichlet(alpha.expand(*choices.shape[:-1], *alpha.shape[-2:]))
    index = choices[..., None].expand(*choices.shape, alpha.shape[-1])
    # Unchecked: the checks fail without draws.
    law = torch.distributions.Categorical(logits=log_z.gather(-2, index), validate_args=False)
    return law.sample()


def _log_dirichlet(alpha: Tensor) -> Tensor:
    # Gamma variates of small shape underflow, but not the logarithm of G_(a + 1) U^(1 / a).
    gamma = torch._standard_gamma(alpha + 1).log()
    return gamma + torch.rand_like(gamma).clamp(min=1e-30).log() / alpha


@torch.no_grad()
def draw_from_urns(alpha: Concentrations, choices: Tensor, known: Tensor | None = None) -> Tensor:
    r"""
    ``(..., n)``: labels of :math:`p(y \mid c)` without any label distribution. The entry of rank
    :math:`t` among those that chose :math:`j`, counted from zero,

    .. math::

        \text{copies one of the } t \text{ earlier labels with probability }
        \frac{t}{A_j + t}, \qquad \text{or else is drawn from } \alpha_j / A_j .

    The first labels ``known``, ``(..., m)``, stay. Cost: :math:`O(n (C + \log n))`.
    """
    groups = Groups(choices.reshape(-1, choices.shape[-1]), alpha.shape[-2])
    total = gather(totals(alpha), choices).flatten()
    rank = groups.rank - groups.first
    copies = torch.rand_like(total) * (total + rank) < rank
    first = 0 if known is None else known.shape[-1]
    if first:
        copies.view_as(choices)[..., :first] = False
    # Single precision has too few digits for a place among millions.
    share = torch.rand_like(total, dtype=torch.double)
    earlier = groups.order[groups.first + (share * rank).long()]
    place = torch.arange(len(rank), device=rank.device)
    origin = torch.where(copies, earlier, place)
    while not torch.equal(further := origin[origin], origin):  # twice as far each time
        origin = further
    labels = draw_labels(alpha, choices[..., first:])
    if known is not None:
        labels = torch.cat([known.expand(*choices.shape[:-1], -1), labels], -1)
    return labels.flatten()[origin].view_as(choices)
