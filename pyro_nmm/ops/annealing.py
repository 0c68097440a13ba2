# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

r"""Annealing [1] of choices from some parameters to others.

Concentrations move in equal steps, one before each of :math:`K` sweeps and one after the last.
Attention and evidence of a row, :math:`L_i` and :math:`e_i`, move by :math:`1 / K` when a sweep
draws the row. With :math:`f` the joint probability, and :math:`r_{ijk}` the share of label
:math:`k` among the choices of :math:`j` by all other rows and its concentrations,

.. math::

    \log w = \sum_{k=0}^{K} \log \frac{f(c_k; \alpha_{k+1})}{f(c_k; \alpha_k)}
        + \sum_{k=1}^{K} \sum_i \log
        \frac{\sum_{jl} L_{ij}^{(k)} r_{ijl} e^{e_{ijl}^{(k)}}}
             {\sum_{jl} L_{ij}^{(k-1)} r_{ijl} e^{e_{ijl}^{(k-1)}}} , \qquad
    E[w] = \frac{p(y \mid \theta')}{p(y \mid \theta)} .

A row's weight is a sum over what it may choose, because it is drawn at once after [2], so it does
not have the noise of the choice. The second half of the sweeps takes the rows in reverse. So the
way back is the same procedure from the other end, and :math:`w` is a Metropolis ratio of parameters
and choices together [3].

[1] Radford M. Neal (2001) "Annealed importance sampling", Statistics and Computing 11,
https://doi.org/10.1023/A:1008923215028.
[2] Pierre Del Moral, Arnaud Doucet, Ajay Jasra (2006) "Sequential Monte Carlo samplers", Journal of
the Royal Statistical Society B 68, https://doi.org/10.1111/j.1467-9868.2006.00553.x.
[3] Radford M. Neal (2005) "Taking Bigger Metropolis Steps by Dragging Fast Variables",
https://arxiv.org/abs/math/0502099.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_nmm.neighborhood import Neighborhood
from pyro_nmm.ops.counts import ranks
from pyro_nmm.ops.entries import Draw, Entries, picked, shift_evidence
from pyro_nmm.ops.sampling import uniforms_of


class Annealed(NamedTuple):
    """``B`` draws after annealing, and their weights ``(B,)``."""

    states: Any  #: the last draw
    #: The log weight, above its value for the way from the first to the last draw at once,
    #: log f_end(c_K) - log f_start(c_0). At the end the first draw may be impossible.
    gain: Tensor


@torch.no_grad()
def anneal(
    rows: Neighborhood, start: Entries, end: Entries, draw: Draw, num_sweeps: int
) -> Annealed:
    """Draws carried to other parameters. Cost: as of ``num_sweeps``, or one more if it is odd, with
    a number in memory for each sweep and row."""
    from pyro_nmm.compiled import draws

    num_sweeps += num_sweeps % 2
    start, end = (
        shift_evidence(rows, entries.map(lambda t: t.double() if t.is_floating_point() else t))[0]
        for entries in (start, end)
    )
    uniforms = uniforms_of(rows, num_sweeps, len(draw.edges))
    edges, labels, rise = draws.anneal(rows, start, end, draw, uniforms)
    last = Draw(edges, labels)
    return Annealed(last, _log_joint(rows, start, draw) + rise - _log_joint(rows, end, last))


def _log_joint(rows: Neighborhood, entries: Entries, draw: Draw) -> Tensor:
    choices, size = rows.source[draw.edges], entries.num_classes
    same, every = ranks(choices, draw.labels, rows.num_sources, size)[0]
    log_prob, places = picked(entries.log_attention, draw.edges), (draw.edges, draw.edges)
    if not entries.observed:
        places, of = (choices * size + draw.labels, choices), draw.edges
        if entries.data.shape[1] != rows.num_edges:
            of = torch.arange(rows.num_rows, device=rows.device)
        log_prob = log_prob + picked(entries.data, of * size + draw.labels)
    above, below = picked(entries.alpha, places[0]) + same, picked(entries.total, places[1]) + every
    return (log_prob + (above / below).log()).sum(-1)
