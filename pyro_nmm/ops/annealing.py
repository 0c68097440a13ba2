# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

r"""
Annealed importance sampling [1] from a conditional of some parameters to one of others.

Parameters move in equal steps of the logarithms of attention and concentrations, and of the
evidence. With :math:`f_k` the joint probability at step :math:`k`, and a sweep at each step,

.. math::

    \log w = \sum_{k=1}^K \log \frac{f_k(c_{k-1})}{f_{k-1}(c_{k-1})} , \qquad
    E[w] = \frac{p(y \mid \theta_K)}{p(y \mid \theta_0)} .

[1] Radford M. Neal (2001) "Annealed importance sampling", Statistics and Computing 11,
https://doi.org/10.1023/A:1008923215028.
"""

import torch
from torch import Tensor

from pyro_nmm.neighborhood import Neighborhood
from pyro_nmm.ops.counts import ranks
from pyro_nmm.ops.entries import Draw, Entries
from pyro_nmm.ops.gibbs import sweep


@torch.no_grad()
def anneal(
    rows: Neighborhood, start: Entries, end: Entries, draw: Draw, num_sweeps: int
) -> tuple[Draw, Tensor]:
    r"""
    The last draw, and by how much :math:`\log w` is above :math:`\log f_K(c_0) - \log f_0(c_0)`,
    the weight without a sweep, ``(B,)``. Cost: as of the sweeps.
    """
    start, end = (
        entries.map(lambda part: part.double() if part.is_floating_point() else part)
        for entries in (start, end)
    )
    below, log_weight = start, -_rise(rows, start, end, draw)
    for k in range(1, num_sweeps + 1):
        above = _between(start, end, k / (num_sweeps + 1))
        log_weight += _rise(rows, below, above, draw)
        size = 1, *draw.edges.shape
        uniforms = torch.rand(size, dtype=torch.double, device=rows.device)
        draw, below = sweep(rows, above, draw, uniforms).draw, above
    return draw, log_weight + _rise(rows, below, end, draw)


def _rise(rows: Neighborhood, start: Entries, end: Entries, draw: Draw) -> Tensor:
    """``(B,)``: by how much the log-probability of a draw is higher at the end."""
    edges, labels = draw[:2]
    choices, size = rows.source[edges], start.num_classes
    same, every = ranks(choices, labels, rows.num_sources, size)
    index = (edges, edges) if start.observed else (choices * size + labels, choices)

    def at(table: Tensor, place: Tensor) -> Tensor:
        return table.flatten(1).expand(len(place), -1).gather(1, place)

    def odds(entries: Entries) -> Tensor:
        return (at(entries.alpha, index[0]) + same) / (at(entries.total, index[1]) + every)

    rise = (odds(end) / odds(start)).log() + at(end.log_attention - start.log_attention, edges)
    if not start.observed:
        place = edges if start.data.shape[1] == rows.num_edges else torch.arange(rows.num_rows)
        rise = rise + at(end.data - start.data, place.to(edges) * size + labels)
    return rise.sum(-1)


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
