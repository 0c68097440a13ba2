# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

r"""Entries: the labels that a row may borrow over each of its edges, and their log-probabilities.

Row after row draws an edge and a label, :math:`(c_i, u_i)`, in proportion to the summands of

.. math::

    e^{f_i} = \sum_j \frac{L_{ij}}{A_j + S_{ij}} \sum_k (\alpha_{jk} + s_{ijk}) e^{e_{ijk}} ,

where :math:`s_{ijk}` counts the earlier rows that borrowed :math:`k` from :math:`j`, and
:math:`S_{ij}` all that chose :math:`j`. An edge has all ``C`` labels if there is evidence
:math:`e`, and one label if labels are observed.
"""

from collections.abc import Callable
from functools import cached_property
from typing import NamedTuple

import torch
from pyro.ops.provenance import track_provenance
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch_geometric.utils import scatter, segment

from pyro_nmm import compiled
from pyro_nmm.blocks import at_labels, row_blocks
from pyro_nmm.neighborhood import Neighborhood
from pyro_nmm.ops.counts import ChoiceGroups, indicator, on_edges, ranks
from pyro_nmm.provenance import untracked


class Entries(NamedTuple):
    """Terms of draws, with a batch dimension ``b`` of size one or ``B`` each."""

    log_attention: Tensor  #: ``(b, num_edges)``
    alpha: Tensor  #: ``(b, num_edges)`` of observed labels, else ``(b, num_sources, C)``
    total: Tensor  #: sums over all labels: ``(b, num_edges)``, else ``(b, num_sources)``
    #: Observed labels, ``(b, num_rows)``, or evidence ``(b, num_rows, C)``; ``num_edges`` in place
    #: of ``num_rows`` if they depend on the edge.
    data: Tensor
    num_classes: int

    @property
    def observed(self) -> bool:
        return not self.data.is_floating_point()

    def map(self, function: Callable[[Tensor], Tensor]) -> "Entries":
        log_attention, alpha, total, data = map(function, self[:4])
        return Entries(log_attention, alpha, total, data, self.num_classes)


def entries_of(rows: Neighborhood, alpha: Tensor, log_attention: Tensor, data: Tensor) -> Entries:
    """Entries of observed labels or of evidence, each with batch dimensions of its own."""
    if data.is_floating_point():
        return evidence_entries(log_attention, alpha, data)
    above = at_labels(alpha, rows.source, on_edges(rows, data))
    total = alpha.sum(-1).index_select(-1, rows.source)
    return Entries(log_attention, above, total, data, alpha.shape[-1])


def evidence_entries(log_attention: Tensor, alpha: Tensor, evidence: Tensor) -> Entries:
    return Entries(log_attention, alpha, alpha.sum(-1), evidence, alpha.shape[-1])


class Draw(NamedTuple):
    """Chosen edges and borrowed labels, ``(B, num_rows)`` each."""

    edges: Tensor
    labels: Tensor
    counts: tuple[Tensor, Tensor] | None = None  #: what its edges met, see :func:`met`


def numbers_of(draw: Draw, size: int) -> Tensor:
    """``(B, num_rows)``: numbers of a draw's entries, ``size`` an edge."""
    return draw.edges if size == 1 else draw.edges * size + draw.labels


def draw_of(numbers: Tensor, size: int, labels: Tensor | None = None) -> Draw:
    """Edges and labels of entries ``(B, num_rows)``, ``size`` an edge, whose ``labels`` are given
    if there is one an edge."""
    if labels is not None:
        return Draw(numbers, picked(labels, numbers))
    return Draw(numbers.div(size, rounding_mode="floor"), numbers % size)


def picked(table: Tensor, places: Tensor) -> Tensor:
    """``(B, n)``: the numbers of a table ``(b, ...)`` at places ``(B, n)``."""
    if len(table) == 1:  # a gradient of the table's size, not of the batch's
        return table.flatten().index_select(0, places.flatten()).view_as(places)
    return table.flatten(1).gather(1, places)


def drawn_terms(rows: Neighborhood, entries: Entries, draw: Draw) -> tuple[Tensor, ...]:
    """``(B, num_rows)`` four times, of drawn entries: ``alpha``, ``total``, and how many earlier
    rows chose the source with the same label, and with any."""
    choices, size = rows.source[draw.edges], entries.num_classes
    places = (draw.edges,) * 2 if entries.observed else (choices * size + draw.labels, choices)
    tables = picked(entries.alpha, places[0]), picked(entries.total, places[1])
    return *tables, *ranks(choices, draw.labels, rows.num_sources, size)[0]


def shift_evidence(rows: Neighborhood, entries: Entries) -> tuple[Entries, Tensor | int]:
    """Evidence relative to every row's largest, and this one, ``(b, num_rows)``."""
    if entries.observed:
        return entries, 0
    top = below = entries.data.detach().amax(-1)
    if _per_edge(rows, entries.data):
        top = segment(top.T, rows.ptr, reduce="max").T
        below = top.index_select(1, rows.row)
    return entries._replace(data=entries.data - below[..., None]), top


def _per_edge(rows: Neighborhood, evidence: Tensor) -> bool:
    return evidence.shape[1] == rows.num_edges


def edge_evidence(rows: Neighborhood, evidence: Tensor) -> Tensor:
    return evidence if _per_edge(rows, evidence) else evidence.index_select(1, rows.row)


class Wide:
    """Rows with an edge for every entry, which are numbered ``edge * size + k``."""

    def __init__(self, rows: Neighborhood, entries: Entries) -> None:
        self.num_classes, self._data = entries.num_classes, entries.data
        self.size = size = 1 if entries.observed else entries.num_classes
        if size == 1:
            self.rows, (self.log_weight, self.alpha, self.total) = rows, entries[:3]
            return
        source = rows.source.repeat_interleave(size)
        arguments = rows.num_nodes, rows.nodes, rows.ptr * size, source
        self.rows = Neighborhood.of_rows(*arguments, num_sources=rows.num_sources)
        alpha = entries.alpha.index_select(1, rows.source)
        weight = entries.log_attention[..., None] + edge_evidence(rows, entries.data)
        total = entries.total.index_select(1, rows.source)[..., None].expand_as(alpha)
        flat = (term.reshape(len(term), -1) for term in (weight, alpha, total))
        #: ``(b, num_entries)`` each, as are ``labels``.
        self.log_weight, self.alpha, self.total = flat

    @cached_property
    def labels(self) -> Tensor:
        if self.size == 1:
            return on_edges(self.rows, self._data)
        number = self.rows.num_edges // self.size
        return torch.arange(self.size, device=self.rows.device).repeat(number)[None]

    @cached_property
    def groups(self) -> ChoiceGroups:
        return ChoiceGroups(self.rows, self.labels, self.num_classes, self.size)

    def counts(self, draw: Draw) -> tuple[Tensor, Tensor]:
        """What the edges of a draw met, see :func:`met`."""
        chosen = indicator(numbers_of(draw, self.size), self.rows.num_edges)
        return self.as_counts(*self.groups.earlier(chosen))

    def as_counts(self, same: Tensor, every: Tensor) -> tuple[Tensor, Tensor]:
        """Counts of entries ``(B, num_entries)`` as :func:`met` gives them."""
        return same.unflatten(1, (-1, self.size)), every[:, :: self.size]

    def split(self, numbers: Tensor) -> Draw:
        return draw_of(numbers, self.size, self.labels if self.size == 1 else None)


#: Entries whose terms are kept for a gradient: half saves no time, twice takes twice the memory,
#: which is eight numbers an entry.
KEPT = 2**23


def _span(rows: Neighborhood, part: slice) -> slice:
    """The edges of some rows. A device waits for them, but not for those of all rows."""
    if part.stop - part.start == rows.num_rows:
        return slice(0, rows.num_edges)
    return slice(int(rows.ptr[part.start]), int(rows.ptr[part.stop]))


def met(rows: Neighborhood, entries: Entries, draw: Draw, part: slice) -> tuple[Tensor, Tensor]:
    """``(B, e, K)`` and ``(B, e)``: how many earlier rows borrowed the label of an entry from its
    source, and how many chose this source, for the edges of some rows."""
    if draw.counts:
        edges = _span(rows, part)
        return draw.counts[0][:, edges], draw.counts[1][:, edges]
    wanted = on_edges(rows, entries.data) if entries.observed else None
    same, every = compiled.meet(rows, draw, part, wanted, entries.num_classes)
    return same, every


def predictive(rows: Neighborhood, entries: Entries, draw: Draw) -> tuple[Tensor, Tensor]:
    r"""``(B, num_rows)`` twice, given earlier rows: log-probabilities :math:`f_i` of labels or
    observations, and :math:`\log q(c_i, u_i \mid \cdot)` of draws, the logarithm of one summand of
    :math:`e^{f_i}` less :math:`f_i`. Differentiable in ``entries``, because counts are constants.
    Cost: :math:`O(B E K)`.
    """
    plain, provenance = untracked(*entries)
    entries, top = shift_evidence(rows, Entries(*plain))
    if draw.counts is None and not compiled.runs_on(rows.device):
        draw = draw._replace(counts=Wide(rows, entries).counts(draw))
    number = len(draw.edges) * rows.num_edges * (1 if entries.observed else entries.num_classes)
    data = entries.data
    factors = *entries[:3], data if entries.observed else data.exp()
    if number <= KEPT:
        predicted, choice = _Part(rows, entries, draw, slice(0, rows.num_rows)).terms(*factors)
    else:
        predicted, choice = _InBlocks.apply(*factors, entries.num_classes, rows, draw)
    if not entries.observed:
        each = torch.arange(rows.num_rows, device=rows.device)
        place = draw.edges if _per_edge(rows, data) else each
        choice = choice + picked(data, place * entries.num_classes + draw.labels)
        predicted = predicted + top
    return track_provenance(predicted, provenance), track_provenance(choice, provenance)


class _Part:
    """Some rows of :func:`predictive`."""

    def __init__(self, rows: Neighborhood, entries: Entries, draw: Draw, part: slice) -> None:
        edges, self.num_rows = _span(rows, part), part.stop - part.start
        self.observed, self.num_classes = entries.observed, entries.num_classes
        self.same, self.every = met(rows, entries, draw, part)
        self.chosen, self.labels = draw.edges[:, part] - edges.start, draw.labels[:, part]
        row, source = rows.row[edges], rows.source[edges]
        self.row = row - part.start
        place: slice | Tensor = edges if self.observed else source
        by_edge = self.observed or _per_edge(rows, entries.data)
        #: Where log attention, ``alpha``, ``total`` and likelihood have the values of the edges.
        self.places = edges, place, place, edges if by_edge else row

    def terms(self, *factors: Tensor) -> tuple[Tensor, Tensor]:
        return self.terms_of_edges(*map(_at, factors, self.places))

    def terms_of_edges(
        self, log_attention: Tensor, alpha: Tensor, total: Tensor, likelihood: Tensor
    ) -> tuple[Tensor, Tensor]:
        """:func:`predictive`, but without the evidence of the choice."""
        # Converted first: sums of integers and numbers take three times as long.
        same, every = self.same.to(alpha.dtype), self.every.to(alpha.dtype)
        if self.observed:
            place, above = self.chosen, alpha + same[..., 0]
        else:
            place = self.chosen * self.num_classes + self.labels
            if len(same) == 1:
                above = ((alpha + same) * likelihood).sum(-1)
            else:  # two sums, of which the larger one needs no gradient by alpha
                above = (alpha * likelihood).sum(-1) + (same * likelihood).sum(-1)
        weight = log_attention.exp() * (above / (total + every))
        predicted = scatter(weight, self.row, -1, dim_size=self.num_rows, reduce="sum").log()
        seen = picked(alpha, place) + picked(same, place)
        below = picked(total, self.chosen) + picked(every, self.chosen)
        return predicted, picked(log_attention, self.chosen) + (seen / below).log() - predicted


class _InBlocks(torch.autograd.Function):
    # The gradient computes each block of rows again: memory does not grow with their entries.

    @staticmethod
    def forward(ctx, log_attention, alpha, total, likelihood, num_classes, rows, draw):
        entries = Entries(log_attention, alpha, total, likelihood, num_classes)
        ctx.save_for_backward(*entries[:4], *draw[:2])
        ctx.rows, ctx.counts, ctx.num_classes = rows, draw.counts, num_classes
        terms = [part.terms(*entries[:4]) for _, part in _InBlocks.parts(rows, entries, draw)]
        predicted, choice = (torch.cat(parts, 1) for parts in zip(*terms, strict=True))
        return predicted, choice

    @staticmethod
    def parts(rows, entries, draw):
        size = len(draw.edges) * (1 if entries.observed else entries.num_classes)
        # A million nodes with five labels then take half a gigabyte, with blocks of KEPT .84.
        for part in row_blocks(rows.ptr, size, KEPT // 4):
            yield part, _Part(rows, entries, draw, part)

    @staticmethod
    @once_differentiable
    def backward(ctx, to_predicted, to_choice):
        *tensors, edges, labels = ctx.saved_tensors
        entries = Entries(*tensors, ctx.num_classes)
        draw = Draw(edges, labels, ctx.counts)
        needed = ctx.needs_input_grad[: len(tensors)]
        sums = [torch.zeros_like(t) if n else None for t, n in zip(tensors, needed, strict=True)]
        for part, block in _InBlocks.parts(ctx.rows, entries, draw):
            places = zip(tensors, block.places, needed, strict=True)
            of_edges = [_at(t, at).detach().requires_grad_(n) for t, at, n in places]
            with torch.enable_grad():
                terms = block.terms_of_edges(*of_edges)
            slopes = to_predicted[:, part], to_choice[:, part]
            leaves = [t for t in of_edges if t.requires_grad]
            gradients = iter(torch.autograd.grad(terms, leaves, slopes))
            for total, at in zip(sums, block.places, strict=True):
                if total is not None:
                    _add_at(total, at, next(gradients))
        return *sums, None, None, None


def _at(tensor: Tensor, place: slice | Tensor) -> Tensor:
    if isinstance(place, slice):
        return tensor[:, place]
    if len(tensor) == 1:  # whose gradient takes a fifth of the time of one along dimension 1
        return tensor[0].index_select(0, place)[None]
    index = place.view(1, -1, *[1] * (tensor.dim() - 2))
    return tensor.gather(1, index.expand(len(tensor), -1, *tensor.shape[2:]))


def _add_at(tensor: Tensor, place: slice | Tensor, values: Tensor) -> None:
    if isinstance(place, slice):
        tensor[:, place] += values
    else:
        tensor.index_add_(1, place, values)
