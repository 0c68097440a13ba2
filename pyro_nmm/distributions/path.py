# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

r"""
Path sampling [1] of :math:`\log p(y)` over the concentration.

With all concentrations times :math:`e^s` labels are independent as :math:`s \to \infty`, and

.. math::

    \frac{d}{ds} \log p(y \mid e^s \alpha) = E_{p(c \mid y, e^s \alpha)} \sum_i
        \frac{S_i}{e^s A_{c_i} + S_i} - \frac{s_i}{e^s \alpha_{c_i y_i} + s_i} ,

where :math:`s_i` counts the earlier rows that chose the source :math:`c_i` with the same label, and
:math:`S_i` with any. Gibbs chains carry their states from one concentration to the next.

[1] Andrew Gelman, Xiao-Li Meng (1998) "Simulating Normalizing Constants: From Importance Sampling
to Bridge Sampling to Path Sampling", Statistical Science 13,
https://doi.org/10.1214/ss/1028905934.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_nmm.neighborhood import Neighborhood
from pyro_nmm.ops.counts import ranks
from pyro_nmm.ops.entries import Draw, Entries, Wide, shift_evidence
from pyro_nmm.ops.gibbs import sweep
from pyro_nmm.ops.sampling import draw_entries

#: The mean concentration where a path starts. Beyond it the slope falls as its inverse: half or
#: twice of it change an estimate for 20,000 nodes by .01 nats.
START = 1e4


class PathEstimate(NamedTuple):
    """An estimate by path sampling, in nats."""

    log_likelihood: Tensor
    #: of the chains, and of the grid: a third of the difference to a grid of half as many points
    standard_error: Tensor


@torch.no_grad()
def path_likelihood(
    rows: Neighborhood, entries: Entries, num_chains: int, num_points: int, num_sweeps: int
) -> PathEstimate:
    """Of each of ``B`` batch elements of ``entries``. Cost: points times sweeps times chains."""
    entries = entries.map(lambda part: part.detach().double() if part.is_floating_point() else part)
    batch = max(len(part) for part in entries[:4])
    entries = entries.map(lambda part: part.expand(batch, *part.shape[1:]))
    start = independent(rows, entries)
    entries = entries.map(lambda part: part.repeat_interleave(num_chains, 0))
    top = math.log(max(START / entries.total.mean().item(), 10.0))
    grid, draw, slopes = torch.linspace(top, 0.0, num_points, dtype=torch.double), None, []

    def uniforms(*size: int) -> Tensor:
        shape = *size, batch * num_chains, rows.num_rows
        return torch.rand(shape, dtype=torch.double, device=rows.device)

    for point in grid.tolist():
        scale = math.exp(point)
        scaled = entries._replace(alpha=entries.alpha * scale, total=entries.total * scale)
        draw = draw_entries(rows, scaled, uniforms()) if draw is None else draw
        slope = torch.zeros((), dtype=torch.double)
        for _ in range(num_sweeps):
            draw = sweep(rows, scaled, draw, uniforms(1)).draw
            slope = slope + slope_of(rows, scaled, draw) / num_sweeps
        slopes.append(slope.view(batch, num_chains))
    values, grid = torch.stack(slopes, -1), grid.to(rows.device)
    fine, coarse = (torch.trapezoid(values[..., ::k], grid[::k]) for k in (1, 2))
    # Beyond the start the slope is in inverse proportion to the concentration.
    chains = fine - values[..., 0]
    spread = chains.var(-1) / num_chains if num_chains > 1 else torch.full_like(start, math.nan)
    error = (spread + ((fine - coarse).mean(-1) / 3).square()).sqrt()
    return PathEstimate(start + chains.mean(-1), error)


def independent(rows: Neighborhood, entries: Entries) -> Tensor:
    """``(B,)``: the log-likelihood of independent rows, at infinite concentration."""
    entries, top = shift_evidence(rows, entries)
    wide = Wide(rows, entries)
    terms = wide.rows.sum(wide.log_weight.exp() * wide.alpha / wide.total).log() + top
    return terms.sum(-1)


def slope_of(rows: Neighborhood, entries: Entries, draw: Draw) -> Tensor:
    """``(B,)``: the derivative of log p(y, c) with respect to the log of all concentrations."""
    choices, labels = rows.source[draw.edges], draw.labels
    if entries.observed:
        above, below = (table.gather(1, draw.edges) for table in (entries.alpha, entries.total))
    else:
        index = choices * entries.num_classes + labels
        above, below = entries.alpha.flatten(1).gather(1, index), entries.total.gather(1, choices)
    same, every = ranks(choices, labels, rows.num_sources, entries.num_classes)
    return (every / (below + every) - same / (above + same)).sum(-1)
