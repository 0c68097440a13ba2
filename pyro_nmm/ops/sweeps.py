# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

r"""Collapsed Gibbs sampling [1] of choices and labels given evidence.

Row after row is drawn anew, given all others,

.. math::

    p(c_i = j, u_i = k \mid c_{-i}, u_{-i}, w) \propto
        L_{ij} \frac{\alpha_{jk} + s_{jk}^{-i}}{A_j + S_j^{-i}} \, e^{e_{ijk}} .

This is a loop on the processor, also for tensors of other devices. There :func:`sweeps` draws in
two blocks in place of it (:mod:`pyro_nmm.ops.two_blocks`).

[1] Jun S. Liu (1994) "The Collapsed Gibbs Sampler in Bayesian Computations with Applications to a
Gene Regulation Problem", Journal of the American Statistical Association 89,
https://doi.org/10.1080/01621459.1994.10476829.
[2] Andrew Gelman et al. (2013) "Bayesian Data Analysis", third edition, sections 11.4 and 11.5,
https://sites.stat.columbia.edu/gelman/book/.
"""

from typing import Any, NamedTuple

import torch
from pyro.ops.stats import split_gelman_rubin
from torch import Tensor

from pyro_nmm import compiled
from pyro_nmm.blocks import blocks
from pyro_nmm.neighborhood import Neighborhood
from pyro_nmm.ops import two_blocks
from pyro_nmm.ops.diagnostics import effective_size
from pyro_nmm.ops.entries import Draw, Entries, draw_of, numbers_of, shift_evidence
from pyro_nmm.ops.sampling import uniforms_of


class Sweeps(NamedTuple):
    """Where ``B`` chains are after ``S`` sweeps, and what they met on their way."""

    draw: Draw  #: the last states
    visits: Tensor  #: ``(B, num_rows, C)`` int32, after how many sweeps a row had each label
    totals: Tensor  #: ``(B, S, C)`` int32, how many rows had each label after each sweep


@torch.no_grad()
def sweep(
    rows: Neighborhood, entries: Entries, draw: Draw, uniforms: Tensor, want: str = ""
) -> tuple[Any, ...]:
    """States after sweeps of ``B`` chains with uniforms ``(S, B, num_rows)`` in float64,
    :math:`O(S B E C)`; and, if these are wanted, ``shares`` ``(B, num_edges)`` float64, sums over
    sweeps of the probability of each edge when its row is drawn, with edges and labels ``(S, B,
    num_rows)`` after each sweep, or ``visits`` and totals as of :class:`Sweeps`."""
    from pyro_nmm.compiled import draws

    entries, _ = shift_evidence(rows, entries)
    edges, labels, *found = draws.sweep(rows, entries, draw, uniforms, want)
    return Draw(edges, labels), *found


@torch.no_grad()
def sweeps(rows: Neighborhood, entries: Entries, draw: Draw, num_sweeps: int) -> Sweeps:
    """Sweeps of latent labels: :func:`sweep` on the processor, two blocks on devices."""
    if compiled.runs_on(rows.device):
        uniforms = uniforms_of(rows, num_sweeps, len(draw.edges))
        return Sweeps(*sweep(rows, entries, draw, uniforms, "visits"))
    entries, _ = shift_evidence(rows, entries)
    both = two_blocks.TwoBlocks.of(rows, entries.log_attention, entries.alpha, entries.data)
    numbers = both.sweep(numbers_of(draw, both.size), num_sweeps)
    edges, labels, *_ = draw_of(torch.stack(numbers, 1), both.size)  # (B, S, num_rows)
    ones = torch.ones((), dtype=torch.int32, device=rows.device).expand_as(labels)
    visits = ones.new_zeros(len(labels), rows.num_rows, both.size)
    visits.scatter_add_(2, labels.mT, ones.mT)
    totals = ones.new_zeros(len(labels), num_sweeps, both.size).scatter_add_(2, labels, ones)
    return Sweeps(Draw(edges[:, -1], labels[:, -1]), visits, totals)


@torch.no_grad()
def left_out(rows: Neighborhood, entries: Entries, draw: Draw) -> Tensor:
    r"""``(B, num_rows)``: :math:`\log p(w_i \mid c_{-i}, u_{-i})`, or of observed labels
    :math:`\log p(y_i \mid c_{-i}, y_{-i})`, in :math:`O(B E C)`."""
    entries, top = shift_evidence(rows, entries)
    source, row, scores = rows.source, rows.row, []
    for b, (chosen, labels) in enumerate(zip(draw.edges, draw.labels, strict=True)):
        log_attention, alpha, total, data = (part[min(b, len(part) - 1)] for part in entries[:4])
        counts = alpha.new_zeros(rows.num_sources, entries.num_classes, dtype=torch.double)
        counts.index_put_((source[chosen], labels), counts.new_ones(()), accumulate=True)
        own, every = torch.zeros_like(source).scatter_(0, chosen, 1), counts.sum(-1)[source]
        # The own choice is taken off before alpha is added, which one may round away.
        if entries.observed:
            above, below = alpha + (counts[source, labels[row]] - own), total
        else:
            sums, below, per_edge = [], total[source], len(data) == rows.num_edges
            for part in blocks(rows.num_edges, 3 * entries.num_classes):
                seen, of_rows = counts[source[part]], row[part]
                seen.scatter_add_(1, labels[of_rows, None], -own[part, None].to(seen))
                likelihood = data[part if per_edge else of_rows].exp()
                sums.append(((alpha[source[part]] + seen) * likelihood).sum(-1))
            above = torch.cat(sums)
        summand = log_attention.exp() * above / (below + (every - own))
        scores.append(summand.new_zeros(rows.num_rows).index_add_(0, row, summand).log())
    return (torch.stack(scores) + top).to(entries.log_attention)


class SweepRecord(NamedTuple):
    """Chains of Gibbs sweeps, of which the first half is left out."""

    draw: Draw  #: the last states
    totals: Tensor  #: ``(B, S, C)``, how many rows had each label after every sweep

    def effective_size(self) -> Tensor:
        """``(C,)``: how many independent draws the totals are worth, over all chains [2]."""
        return effective_size(self._of_size("effective_size", 1, 2))

    def gelman_rubin(self) -> Tensor:
        """``(C,)``: near one where chains, and halves of a chain, agree on the totals [2]."""
        return split_gelman_rubin(self._of_size("gelman_rubin", 2, 4), chain_dim=0, sample_dim=1)

    def _of_size(self, name: str, num_chains: int, num_draws: int) -> Tensor:
        number, size = self.totals.shape[:2]
        if number < num_chains or size < num_draws:
            raise ValueError(
                f"{name} needs at least {num_chains} chains of {num_draws} draws, got {number} of "
                f"{size}: raise num_chains or num_draws, or num_sweeps, half of which is left out"
            )
        return self.totals


@torch.no_grad()
def run_chains(
    rows: Neighborhood, entries: Entries, draw: Draw, num_sweeps: int, num_kept: int = 1
) -> tuple[SweepRecord, Draw]:
    """Sweeps of ``B`` chains, and ``num_kept`` states of each, evenly in the second half."""
    numbers, first = draw.edges.numel() * (1 + entries.num_classes), num_sweeps // 2
    ends = [first + (k + 1) * (num_sweeps - first) // num_kept for k in range(num_kept)]
    totals, kept, start = [], [], 0
    for end in (first, *ends):
        for part in blocks(end - start, numbers):
            swept = sweeps(rows, entries, draw, part.stop - part.start)
            draw = swept.draw
            totals.append(swept.totals)
        kept += [draw] if end > first else []
        start = end
    edges, labels = zip(*(draw[:2] for draw in kept), strict=True)
    states = Draw(torch.cat(edges), torch.cat(labels))
    return SweepRecord(draw, torch.cat(totals, 1)[:, first:].to(entries.alpha.dtype)), states
