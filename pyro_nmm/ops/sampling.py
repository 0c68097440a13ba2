# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

r"""Draws of neighbour choices and of labels, without a sequential loop over nodes.

With its uniform number fixed, a row's choice is a function of the counts that it sees, so a whole
sample is the fixed point of *draw all rows at once, count, repeat*. Each sweep settles at least one
level of the dependency graph, so the fixed point is unique, reached, and equal to the sequential
draw. One changed count seldom changes a draw, so a few sweeps go through hundreds of levels. Labels
of nodes that share label distributions are drawn, or their distributions summed out, by urns [1].

[1] David Blackwell, James B. MacQueen (1973) "Ferguson Distributions via Polya Urn Schemes", Annals
of Statistics 1, https://doi.org/10.1214/aos/1176342372.
"""

import torch
from torch import Tensor

from pyro_nmm import compiled
from pyro_nmm.blocks import blocks, gather
from pyro_nmm.neighborhood import Neighborhood
from pyro_nmm.ops.counts import ChoiceGroups, Groups, indicator
from pyro_nmm.ops.entries import Draw, Entries, Wide, shift_evidence
from pyro_nmm.provenance import untracked


def uniforms_of(rows: Neighborhood, *shape: int) -> Tensor:
    """``(*shape, num_rows)`` float64."""
    return torch.rand(*shape, rows.num_rows, dtype=torch.double, device=rows.device)


def pick(rows: Neighborhood, weights: Tensor, uniforms: Tensor) -> Tensor:
    """``(B, num_rows)``: the edge of each row at which cumulative weights ``(B, num_edges)``, of
    any scale, pass ``uniforms`` ``(B, num_rows)`` of their sum. No edge of weight zero is picked.
    """
    # Rows that sum to one let a single running sum serve all of them, and the whole batch: a GPU
    # gives each row of a two-dimensional running sum to one of its many processors.
    weights = weights.double()
    weights = weights / rows.sum(weights).index_select(1, rows.row)
    running = torch.nn.functional.pad(weights.flatten().cumsum(0), (1, 0))
    size = max(1, rows.num_edges)
    places = torch.arange(0, size * len(weights), size, device=weights.device)[:, None]
    bounds = running[rows.ptr + places]
    low, high = bounds[:, :-1], bounds[:, 1:].contiguous()
    passed = torch.searchsorted(running[1:], low.lerp(high, uniforms), right=True)
    # Rounding must not pass the row's last edge of positive weight.
    return passed.minimum(torch.searchsorted(running[1:], high)).sub_(places)


#: Rows that are settled together. Smaller blocks need fewer sweeps, but each sweep costs a few
#: dozen calls, which is much to a GPU.
BLOCK = {"cpu": 2**12, "cuda": 2**16}
#: Sweeps from one comparison to the next, for which a GPU waits.
SWEEPS = 4


def draw_by_sweeps(rows: Neighborhood, entries: Entries, uniforms: Tensor) -> Draw:
    """The sequential draw as a fixed point, on any device. Cost: :math:`O(B E)` a sweep."""
    wide = Wide(rows, entries)
    numbers, *counts = _draw_wide(wide, uniforms)
    return wide.split(numbers)._replace(counts=wide.as_counts(*counts))


def _draw_wide(wide: Wide, uniforms: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers of entries, and the counts that every entry saw, by label and of all labels."""
    rows, num_classes, labels = wide.rows, wide.num_classes, wide.labels
    attention = wide.log_weight.double().exp()
    size = BLOCK.get(rows.device.type, rows.num_rows)
    if rows.num_rows <= size:
        return settle(rows, wide.groups, attention, wide.alpha, wide.total, uniforms)
    first_key = rows.source * (num_classes + 1)
    keys, number = (first_key + num_classes, first_key + labels), len(uniforms)
    size_of_table = number, rows.num_sources * (num_classes + 1)
    table = torch.zeros(size_of_table, dtype=torch.int32, device=rows.device)
    parts, ends = [], [*rows.ptr[::size].tolist(), rows.num_edges]
    blocks = torch.arange(rows.num_rows, device=rows.device).split(size)
    for block, first, last in zip(blocks, ends, ends[1:], strict=False):
        part, span = rows.take(block, last - first), slice(first, last)
        near = [key.expand(number, -1)[:, span] for key in keys]
        every, same = (table.gather(1, key) for key in near)
        alpha, total = wide.alpha[:, span] + same, wide.total[:, span] + every
        groups = ChoiceGroups(part, labels[:, span], num_classes, wide.size)
        edges, *more = settle(part, groups, attention[:, span], alpha, total, uniforms[:, block])
        for key in near:
            chosen = key.gather(1, edges)
            table.scatter_add_(1, chosen, torch.ones_like(chosen, dtype=table.dtype))
        parts.append((edges + first, same + more[0], every + more[1]))
    edges, same, every = (torch.cat(part, 1) for part in zip(*parts, strict=True))
    return edges, same, every


def settle(
    rows: Neighborhood,
    groups: ChoiceGroups,
    attention: Tensor,
    alpha: Tensor,
    total: Tensor,
    uniforms: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Chosen edges ``(B, num_rows)``, and the counts of earlier rows that their edges saw."""
    edges, sweep = pick(rows, attention * (alpha / total), uniforms), 0
    step = 1 if edges.device.type == "cpu" else SWEEPS  # a GPU waits for the answer
    while True:
        same, every = groups.earlier(indicator(edges, rows.num_edges))
        new = pick(rows, attention * ((alpha + same) / (total + every)), uniforms)
        sweep += 1
        if sweep % step == 0 and torch.equal(new, edges):
            return edges, same, every
        edges = new


@torch.no_grad()
def draw_entries(rows: Neighborhood, entries: Entries, uniforms: Tensor) -> Draw:
    """The sequential draw with uniforms ``(B, num_rows)`` in float64, in :math:`O(B E K)`."""
    entries, top = shift_evidence(rows, Entries(*untracked(*entries)[0]))
    if not compiled.runs_on(rows.device):
        return draw_by_sweeps(rows, entries, uniforms)
    from pyro_nmm.compiled.draws import draw

    edges, labels, sums = draw(rows, entries, uniforms)
    return Draw(edges, labels, terms=sums.log_().add_(top))


#: On a CPU urns serve from so many entries on, and with many labels from so many numbers of z on.
#: There they take .05 to .3 of the time, with half of the numbers as long. With few labels they
#: would save a fifth to a half earlier, but stored results have their data from z.
MANY, MANY_NUMBERS, MANY_LABELS = 2**16, 2**11, 8


@torch.no_grad()
def draw_given_choices(alpha: Tensor, choices: Tensor) -> Tensor:
    r"""``(..., n)``: labels of :math:`p(y \mid c)`; from :math:`z`, or from urns."""
    number, num_labels = choices.numel(), alpha.shape[-1]
    many = number >= MANY or (num_labels >= MANY_LABELS and number * num_labels >= MANY_NUMBERS)
    if many and alpha.dim() == 2 and alpha.device.type == "cpu":
        return draw_from_urns(alpha, choices)
    alpha = alpha.expand(*choices.shape[:-1], *alpha.shape[-2:])
    # Gamma variates of small shape underflow, but not the logarithm of G_(a + 1) U^(1 / a).
    gamma = torch._standard_gamma(alpha + 1).log()
    log_z = gamma + torch.rand_like(gamma).clamp(min=1e-30).log() / alpha
    index = choices[..., None].expand(*choices.shape, alpha.shape[-1])
    # Unchecked: the checks fail without draws.
    law = torch.distributions.Categorical(logits=log_z.gather(-2, index), validate_args=False)
    return law.sample()


@torch.no_grad()
def draw_from_urns(alpha: Tensor, choices: Tensor, known: Tensor | None = None) -> Tensor:
    r"""``(..., n)``: labels of :math:`p(y \mid c)` without any label distribution. Of the entries
    that chose :math:`j`, that of rank ``t`` copies one of the ``t`` earlier labels with probability
    :math:`t / (A_j + t)`, or else draws from :math:`\alpha_j / A_j`. The first labels ``known``,
    ``(..., m)``, stay. Cost: :math:`O(n (C + \log n))`."""
    groups = Groups(choices.reshape(-1, choices.shape[-1]), alpha.shape[-2])
    total = gather(alpha.sum(-1), choices).flatten()
    rank = groups.rank - groups.first
    copies = torch.rand_like(total) * (total + rank) < rank
    first = 0 if known is None else known.shape[-1]
    if first:
        copies.view_as(choices)[..., :first] = False
    # Single precision has too few digits for a place among millions.
    share = torch.rand_like(total, dtype=torch.double)
    earlier = groups.order[groups.first + (share * rank).long()]
    origin = torch.where(copies, earlier, torch.arange(len(rank), device=rank.device))
    while not torch.equal(further := origin[origin], origin):  # twice as far each time
        origin = further
    labels = torch.zeros_like(origin)
    if known is not None:
        labels.view_as(choices)[..., :first] = known
        copies.view_as(choices)[..., :first] = True
    roots = (~copies).nonzero()[:, 0]
    for part in blocks(len(roots), 2 * alpha.shape[-1]):
        of = choices.flatten()[roots[part]]
        running = alpha.index_select(0, of).cumsum(-1, dtype=torch.double)
        place = share[roots[part], None] * running[:, -1:]
        drawn = torch.searchsorted(running, place, right=True)[:, 0]
        labels[roots[part]] = drawn.clamp_(max=alpha.shape[-1] - 1)  # if the place rounds up
    return labels[origin].view_as(choices)
