# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

r"""
Sequential draws of neighbour choices, without a sequential loop over nodes.

With its uniform number fixed, a row's choice is a function of the counts that it sees, so a whole
sample is the fixed point of *draw all rows at once, count, repeat*. Each sweep settles at least one
level of the dependency graph, so the fixed point is unique, reached, and equal to the sequential
draw. One changed count seldom changes a draw, so a few sweeps go through hundreds of levels.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from pyro_nmm import backend
from pyro_nmm.neighborhood import Neighborhood
from pyro_nmm.ops.counts import EarlierChoices, indicator, on_edges


class Draw(NamedTuple):
    """Chosen edges ``(B, num_rows)`` and the counts ``(B, num_edges)`` that each edge saw."""

    edges: Tensor
    same_label: Tensor
    any_label: Tensor


class EdgeTerms(NamedTuple):
    r"""
    Terms of a row's predictive probability, each ``(b, num_edges)`` with ``b`` one or ``B``:
    :math:`\log L_{ij}`, :math:`\alpha_{j y_i}` and :math:`A_j`.
    """

    log_attention: Tensor
    alpha: Tensor
    total: Tensor


def pick(rows: Neighborhood, weights: Tensor, uniforms: Tensor) -> Tensor:
    """
    ``(B, num_rows)``: the edge of every row at which the cumulative weight passes ``uniforms``
    ``(B, num_rows)`` of its sum. Weights ``(B, num_edges)`` have any scale in each row; no edge of
    weight zero is picked.
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


def draw_by_sweeps(
    rows: Neighborhood,
    terms: EdgeTerms,
    edge_labels: Tensor,
    num_classes: int,
    uniforms: Tensor,
    parallel: bool = False,
) -> Draw:
    """
    The sequential draw as a fixed point, on any device. Cost: :math:`O(B E)` a sweep.

    :param Tensor edge_labels: ``(b, num_edges)``, the label for which a choice of the edge counts.
    :param Tensor uniforms: ``(B, num_rows)`` float64.
    :param bool parallel: whether rows may have several edges from one source.
    """
    attention = terms.log_attention.double().exp()
    size = BLOCK.get(rows.device.type, rows.num_rows)
    if rows.num_rows <= size:
        earlier = EarlierChoices(rows, edge_labels, num_classes, rows.row if parallel else None)
        return _settle(rows, earlier, attention, terms.alpha, terms.total, uniforms)
    by_label = rows.source * num_classes + edge_labels
    keys, sizes = (rows.source, by_label), (rows.num_sources, rows.num_sources * num_classes)
    if sizes[1] > rows.num_edges:  # only labels that occur at a node get a place
        offset = sizes[1] * torch.arange(len(edge_labels), device=rows.device)[:, None]
        _, places = (by_label + offset).unique(return_inverse=True)
        places = places - places.amin(1, keepdim=True)
        keys, sizes = (rows.source, places), (rows.num_sources, int(places.max()) + 1)
    tables = [torch.zeros(len(uniforms), n, dtype=torch.int32, device=rows.device) for n in sizes]
    parts, ends = [], [*rows.ptr[::size].tolist(), rows.num_edges]
    blocks = torch.arange(rows.num_rows, device=rows.device).split(size)
    for block, first, last in zip(blocks, ends, ends[1:], strict=False):
        part, span = rows.take(block, last - first), slice(first, last)
        near = [key.expand(len(uniforms), -1)[:, span] for key in keys]
        every, same = (table.gather(1, key) for table, key in zip(tables, near, strict=True))
        alpha, total = terms.alpha[:, span] + same, terms.total[:, span] + every
        time = part.row if parallel else None
        earlier = EarlierChoices(part, edge_labels[:, span], num_classes, time)
        edges, *more = _settle(part, earlier, attention[:, span], alpha, total, uniforms[:, block])
        for table, key in zip(tables, near, strict=True):
            chosen = key.gather(1, edges)
            table.scatter_add_(1, chosen, torch.ones_like(chosen, dtype=table.dtype))
        parts.append((edges + first, same + more[0], every + more[1]))
    return Draw(*(torch.cat(part, 1) for part in zip(*parts, strict=True)))


def settled(sweep: int, *pairs: tuple[Tensor, Tensor]) -> bool:
    """Whether a sweep changed nothing; on a GPU, which waits for the answer, at every fourth."""
    step = 1 if pairs[0][0].device.type == "cpu" else SWEEPS
    return sweep % step == 0 and all(torch.equal(new, old) for new, old in pairs)


def _settle(rows, earlier, attention, alpha, total, uniforms) -> Draw:
    same = every = torch.zeros((), dtype=torch.int32, device=rows.device)
    edges, sweep = None, 0
    while True:
        weights = attention * ((alpha + same) / (total + every))
        new = pick(rows, weights, uniforms)
        if edges is not None and settled(sweep, (new, edges)):
            return Draw(edges, same, every)
        edges = new
        same, every = earlier(indicator(edges, rows.num_edges))
        sweep += 1


def draw_choices(
    rows: Neighborhood, terms: EdgeTerms, labels: Tensor, num_classes: int, uniforms: Tensor
) -> Draw:
    """:func:`draw_by_sweeps` or a compiled loop; labels ``(b, num_rows)`` or ``(b, num_edges)``."""
    with torch.no_grad():
        if backend.compiled and rows.device.type == "cpu":
            return Draw(*backend.compiled.draw_choices(rows, terms, labels, num_classes, uniforms))
        return draw_by_sweeps(rows, terms, on_edges(rows, labels), num_classes, uniforms)
