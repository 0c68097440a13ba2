# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

r"""Annealing [1] of choices from some parameters to others.

The logarithms of attention and concentrations, and the evidence, move in equal steps. With
:math:`f_k` the joint probability at step :math:`k`, and a sweep at each,

.. math::

    \log w = \sum_{k=1}^{K+1} \log \frac{f_k(c_{k-1})}{f_{k-1}(c_{k-1})} , \qquad
    E[w] = \frac{p(y \mid \theta_{K+1})}{p(y \mid \theta_0)} .

The second half of the sweeps takes the rows in reverse. So the way back is the same procedure from
the other end, and :math:`w` is a Metropolis ratio of parameters and choices together [2].

[1] Radford M. Neal (2001) "Annealed importance sampling", Statistics and Computing 11,
https://doi.org/10.1023/A:1008923215028.
[2] Radford M. Neal (2005) "Taking Bigger Metropolis Steps by Dragging Fast Variables",
https://arxiv.org/abs/math/0502099.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_nmm import backend
from pyro_nmm.blocks import blocks
from pyro_nmm.neighborhood import Neighborhood
from pyro_nmm.ops.entries import (
    Draw,
    Entries,
    drawn_terms,
    picked,
    shift_evidence,
)
from pyro_nmm.ops.gibbs import sweep
from pyro_nmm.ops.sampling import uniforms_of


class Annealed(NamedTuple):
    """``B`` draws after annealing, and their weights ``(B,)``."""

    states: Any  #: the last draw
    #: How much the log weight is above its value without sweeps, log f_end(c_0) - log f_start(c_0).
    gain: Tensor
    rise: Tensor  #: log f_end of the last draw, above that of the first


@torch.no_grad()
def anneal(
    rows: Neighborhood, start: Entries, end: Entries, draw: Draw, num_sweeps: int
) -> Annealed:
    """Draws carried to other parameters. Cost: as of ``num_sweeps``, or one more if it is odd."""
    num_sweeps += num_sweeps % 2
    start, end = (
        shift_evidence(rows, entries.map(lambda t: t.double() if t.is_floating_point() else t))[0]
        for entries in (start, end)
    )
    if loops := backend.loops_on(rows.device):
        gain = rise = torch.zeros(len(draw.edges), dtype=torch.double)
        for part in blocks(num_sweeps, draw.edges.numel()):
            uniforms = uniforms_of(rows, part.stop - part.start, len(draw.edges))
            inputs = rows, start, end, draw, uniforms, part.start, num_sweeps
            *states, more, higher = loops.anneal(*inputs)
            draw, gain, rise = Draw(*states), gain + more, rise + higher
        return Annealed(draw, gain, rise)
    below, first = start, _log_joint(rows, end, draw)
    gain = _log_joint(rows, start, draw) - first
    for k in range(num_sweeps):
        if 2 * k == num_sweeps:
            back = rows.take(torch.arange(rows.num_rows, device=rows.device).flip(0))
            start, end, below = (_reverse(rows, back, part) for part in (start, end, below))
            draw = Draw(back.within.argsort()[draw.edges].flip(1), draw.labels.flip(1))
            rows = back
        above = _between(start, end, (k + 1) / (num_sweeps + 1))
        gain += _log_joint(rows, above, draw) - _log_joint(rows, below, draw)
        uniforms = uniforms_of(rows, 1, len(draw.edges))
        uniforms = uniforms if 2 * k < num_sweeps else uniforms.flip(-1)  # of the same rows
        draw = sweep(rows, above, draw, uniforms).draw
        below = above
    last = _log_joint(rows, end, draw)
    gain += last - _log_joint(rows, below, draw)
    draw = Draw(rows.within[draw.edges].flip(1), draw.labels.flip(1))
    return Annealed(draw, gain, last - first)


def _reverse(rows: Neighborhood, back: Neighborhood, entries: Entries) -> Entries:
    """Entries of the rows in reverse."""
    by_edge = entries.data.shape[1] == rows.num_edges
    data = entries.data[:, back.within] if by_edge else entries.data.flip(1)
    log_attention, alpha, total = entries[:3]
    if entries.observed:
        alpha, total = alpha[:, back.within], total[:, back.within]
    return Entries(log_attention[:, back.within], alpha, total, data, entries.num_classes)


def _log_joint(rows: Neighborhood, entries: Entries, draw: Draw) -> Tensor:
    """``(B,)``: the log-probability of choices, labels and evidence."""
    above, below, same, every = drawn_terms(rows, entries, draw)
    log_joint = picked(entries.log_attention, draw.edges) + ((above + same) / (below + every)).log()
    if not entries.observed:
        by_edge = entries.data.shape[1] == rows.num_edges
        place = draw.edges if by_edge else torch.arange(rows.num_rows, device=rows.device)
        log_joint = log_joint + picked(entries.data, place * entries.num_classes + draw.labels)
    return log_joint.sum(-1)


def _between(start: Entries, end: Entries, share: float) -> Entries:
    def mix(first: Tensor, last: Tensor) -> Tensor:
        return (1 - share) * first + share * last

    def mix_logs(first: Tensor, last: Tensor) -> Tensor:
        return first * (last / first).pow(share)

    return start._replace(
        log_attention=mix(start.log_attention, end.log_attention),
        alpha=mix_logs(start.alpha, end.alpha),
        total=mix_logs(start.total, end.total),
        data=start.data if start.observed else mix(start.data, end.data),
    )
