# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

r"""Path sampling [1] of :math:`\log p(y)` over the concentration.

With all concentrations times :math:`e^s` labels are independent as :math:`s \to \infty`, and

.. math::

    \frac{d}{ds} \log p(y \mid e^s \alpha) = E_{p(c \mid y, e^s \alpha)} \sum_i
        \frac{S_i}{e^s A_{c_i} + S_i} - \frac{s_i}{e^s \alpha_{c_i y_i} + s_i} ,

where :math:`s_i` counts the earlier rows that chose the source :math:`c_i` with the same label, and
:math:`S_i` with any. Gibbs chains carry their states from one concentration to the next, down to
:math:`s = 0` and up again. Their states lag behind, with opposite signs on both ways.

[1] Andrew Gelman, Xiao-Li Meng (1998) "Simulating Normalizing Constants: From Importance Sampling
to Bridge Sampling to Path Sampling", Statistical Science 13, https://doi.org/10.1214/ss/1028905934.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_nmm.arguments import check_integers
from pyro_nmm.neighborhood import Neighborhood
from pyro_nmm.ops.counts import ranks
from pyro_nmm.ops.entries import Draw, Entries, Wide, picked, shift_evidence
from pyro_nmm.ops.sampling import draw_entries, uniforms_of
from pyro_nmm.ops.sweeps import sweep

#: The error, in nats, of the tail beyond the first concentration.
TAIL = 0.001


class PathEstimate(NamedTuple):
    """An estimate by path sampling, in nats."""

    log_likelihood: Tensor
    #: of the chains' ways down and up, which differ by noise and lag, and of Simpson's rule
    standard_error: Tensor


@torch.no_grad()
def path_likelihood(
    rows: Neighborhood, entries: Entries, num_chains: int, num_points: int, num_sweeps: int
) -> PathEstimate:
    """Estimates for ``B`` batch elements of ``entries``. Cost: points times sweeps times chains."""
    check_integers(1, num_chains=num_chains, num_sweeps=num_sweeps, num_points=num_points)
    if num_points < 5 or num_points % 4 != 1:
        raise ValueError(f"num_points must be one of 5, 9, 13, ..., got {num_points}")
    entries = entries.map(lambda part: part.detach().double() if part.is_floating_point() else part)
    start, top = independent(rows, entries)
    size = len(start) * num_chains
    entries = entries.map(lambda t: t if len(t) == 1 else t.repeat_interleave(num_chains, 0))
    grid = torch.linspace(top, 0.0, num_points, dtype=torch.double)
    draw, slopes = None, []
    for point in [*grid.tolist(), *grid.flip(0).tolist()]:
        scale = math.exp(point)
        scaled = entries._replace(alpha=entries.alpha * scale, total=entries.total * scale)
        draw = draw or draw_entries(rows, scaled, uniforms_of(rows, size))
        slope = torch.zeros((), dtype=torch.double)
        for _ in range(num_sweeps):
            draw, *_ = sweep(rows, scaled, draw, uniforms_of(rows, 1, size))
            slope = slope + slope_of(rows, scaled, draw) / num_sweeps
        slopes.append(slope)
    down, up = torch.stack(slopes, -1).view(len(start), num_chains, 2, num_points).unbind(2)
    values = torch.cat([down, up.flip(-1)], 1)  # (B, ways, points)
    step = top / (num_points - 1)
    fine, coarse = (_simpson(values[..., ::k]) * (k * step) for k in (1, 2))
    # Beyond the first point the slope is in inverse proportion to the concentration.
    ways = -fine - values[..., 0]
    spread, rule = ways.var(-1) / ways.shape[-1], (fine - coarse).mean(-1) / 15
    if num_chains > 1:  # a slow chain's two ways have errors in common
        spread = spread.maximum(ways.view(len(start), 2, num_chains).mean(1).var(-1) / num_chains)
    return PathEstimate(start + ways.mean(-1), (spread + rule.square()).sqrt())


def _simpson(values: Tensor) -> Tensor:
    """Simpson's rule with steps of one, over the last dimension."""
    inner = 4 * values[..., 1:-1:2].sum(-1) + 2 * values[..., 2:-1:2].sum(-1)
    return (values[..., 0] + inner + values[..., -1]) / 3


def independent(rows: Neighborhood, entries: Entries) -> tuple[Tensor, float]:
    r"""``(B,)``: the log-likelihood of independent rows; and the largest :math:`s`, where the
    slope's second term, about :math:`\sum_{jk} s_{jk}^3 / 3 \alpha_{jk}^2`, is small.
    """
    entries, shift = shift_evidence(rows, entries)
    wide = Wide(rows, entries)
    summands = wide.log_weight.exp() * wide.alpha / wide.total
    sums = wide.rows.sum(summands)
    share = summands / sums.index_select(1, wide.rows.row)
    key = (wide.rows.source * entries.num_classes + wide.labels).expand_as(share)
    number = rows.num_sources * entries.num_classes
    expected = share.new_zeros(len(share), number).scatter_add_(1, key, share).gather(1, key)
    tail = (share * (expected / 4 + expected.square() / 6) / wide.alpha.square()).sum(-1).max()
    top = 0.5 * math.log(tail.item() / TAIL) if tail > 0 else 0.0
    return (sums.log() + shift).sum(-1), max(top, 1.0)


def slope_of(rows: Neighborhood, entries: Entries, draw: Draw) -> Tensor:
    """``(B,)``: the derivative of log p(y, c) with respect to the log of all concentrations."""
    choices, size = rows.source[draw.edges], entries.num_classes
    same, every = ranks(choices, draw.labels, rows.num_sources, size)[0]
    places = (draw.edges,) * 2 if entries.observed else (choices * size + draw.labels, choices)
    above, below = picked(entries.alpha, places[0]), picked(entries.total, places[1])
    return (every / (below + every) - same / (above + same)).sum(-1)
