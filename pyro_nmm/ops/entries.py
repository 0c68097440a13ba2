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
from functools import cached_property, partial
from typing import NamedTuple

import torch
from pyro.ops.provenance import track_provenance
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from pyro_nmm import compiled
from pyro_nmm.blocks import at_labels, row_blocks
from pyro_nmm.neighborhood import Neighborhood
from pyro_nmm.ops.counts import ChoiceGroups, indicator
from pyro_nmm.provenance import untracked


class Entries(NamedTuple):
    """Terms of draws, with a batch dimension ``b`` of size one or ``B`` each."""

    log_attention: Tensor  #: ``(b, num_edges)``
    alpha: Tensor  #: ``(b, num_edges)`` of observed labels, else ``(b, num_sources, C)``
    total: Tensor  #: sums over all labels: ``(b, num_edges)``, else ``(b, num_sources)``
    #: Observed labels ``(b, num_rows)``, or evidence ``(b, num_rows, C)`` or ``(b, num_edges, C)``
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
    above = at_labels(alpha, rows.source, data.index_select(-1, rows.row))
    total = alpha.sum(-1).index_select(-1, rows.source)
    return Entries(log_attention, above, total, data, alpha.shape[-1])


def evidence_entries(log_attention: Tensor, alpha: Tensor, evidence: Tensor) -> Entries:
    return Entries(log_attention, alpha, alpha.sum(-1), evidence, alpha.shape[-1])


class Draw(NamedTuple):
    """Chosen edges and borrowed labels, ``(B, num_rows)`` each."""

    edges: Tensor
    labels: Tensor
    counts: tuple[Tensor, Tensor] | None = None  #: what its edges met, see :func:`met`
    terms: Tensor | None = None  #: ``(B, num_rows)`` float64, see :func:`predictive`, if known


def numbers_of(draw: Draw, size: int) -> Tensor:
    """``(B, num_rows)``: numbers of a draw's entries, ``size`` an edge."""
    return draw.edges if size == 1 else draw.edges * size + draw.labels


def draw_of(numbers: Tensor, size: int) -> Draw:
    """Edges and latent labels of entries ``(B, num_rows)``, ``size`` an edge."""
    return Draw(numbers.div(size, rounding_mode="floor"), numbers % size)


def picked(table: Tensor, places: Tensor) -> Tensor:
    """``(B, n)``: the numbers of a table ``(b, ...)`` at places ``(B, n)``."""
    if len(table) == 1:  # a gradient of the table's size, not of the batch's
        return table.flatten().index_select(0, places.flatten()).view_as(places)
    return table.flatten(1).gather(1, places)


def shift_evidence(rows: Neighborhood, entries: Entries) -> tuple[Entries, Tensor | int]:
    """Evidence relative to every row's largest, and this one, ``(b, num_rows)``."""
    if entries.observed:
        return entries, 0
    top = below = entries.data.detach().amax(-1)
    if _per_edge(rows, entries.data):
        from torch_geometric.utils import segment

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
            return self._data.index_select(-1, self.rows.row)
        number = self.rows.num_edges // self.size
        return torch.arange(self.size, device=self.rows.device).repeat(number)[None]

    @cached_property
    def groups(self) -> ChoiceGroups:
        return ChoiceGroups(self.rows, self.labels, self.num_classes, self.size)

    def counts(self, draw: Draw) -> tuple[Tensor, Tensor]:
        """Counts that each edge of a draw saw, see :func:`met`."""
        chosen = indicator(numbers_of(draw, self.size), self.rows.num_edges)
        return self.as_counts(*self.groups.earlier(chosen))

    def as_counts(self, same: Tensor, every: Tensor) -> tuple[Tensor, Tensor]:
        """Counts of entries ``(B, num_entries)`` as :func:`met` gives them."""
        return same.unflatten(1, (-1, self.size)), every[:, :: self.size]

    def split(self, numbers: Tensor) -> Draw:
        if self.size > 1:
            return draw_of(numbers, self.size)
        return Draw(numbers, picked(self.labels, numbers))


#: Entries whose terms are kept for a gradient, eight numbers each. With a third less a step of
#: eight particles with five latent labels and 20,000 nodes takes 1.36 times as long; with a third
#: more a step with a million observed labels takes .23 gigabytes more.
KEPT = 6 * 2**20


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
    wanted = entries.data if entries.observed else None
    from pyro_nmm.compiled.draws import meet

    return meet(rows, draw, part, wanted, entries.num_classes)


def terms_of(rows: Neighborhood, entries: Entries, draw: Draw) -> Tensor:
    """``(B, num_rows)`` float64: the first of :func:`predictive`, without a gradient. A draw by
    compiled loops knows it."""
    if draw.terms is not None:
        return draw.terms
    plain = entries.map(lambda part: untracked(part.detach())[0][0])
    return predictive(rows, plain, draw)[0].double()


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
    data = entries.data
    factors = entries[:3] if entries.observed else (*entries[:3], data.exp())
    size = len(draw.edges) * (1 if entries.observed else entries.num_classes)
    if size * rows.num_edges <= KEPT:
        whole = slice(0, rows.num_rows)
        predicted, choice = _terms(rows, entries, draw, whole, *factors)
    else:
        predicted, choice = _in_blocks(rows, entries, draw, size, factors)
    if not entries.observed:
        each = torch.arange(rows.num_rows, device=rows.device)
        place = draw.edges if _per_edge(rows, data) else each
        choice = choice + picked(data, place * entries.num_classes + draw.labels)
        predicted = predicted + top
    return track_provenance(predicted, provenance), track_provenance(choice, provenance)


def _in_blocks(rows, entries, draw, size, factors):
    # The gradient computes each block of rows again, so that its terms need not be kept. Tables of
    # sources get a gradient of their whole size from each block: 16 blocks are few, and 32 would
    # save 3 % of the terms' memory.
    limit = max(KEPT // 4, size * rows.num_edges // 16)
    parts = list(row_blocks(rows.ptr, size, limit))
    num_edges = [span.stop - span.start for span in (_span(rows, part) for part in parts)]
    log_attention, *tables = factors
    again = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    found = [
        again(_terms, rows, entries, draw, part, some, *tables)
        for part, some in zip(parts, log_attention.split(num_edges, 1), strict=True)
    ]
    return (torch.cat(each, 1) for each in zip(*found, strict=True))


def _terms(rows, entries, draw, part, log_attention, alpha, total, likelihood=None):
    """:func:`predictive` of some rows, but without the evidence of the choice."""
    from torch_geometric.utils import scatter

    edges, num_rows = _span(rows, part), part.stop - part.start
    row, chosen = rows.row[edges], draw.edges[:, part] - edges.start
    # Converted first: sums of integers and numbers take three times as long.
    same, every = (counts.to(alpha.dtype) for counts in met(rows, entries, draw, part))
    if likelihood is None:
        alpha, total = alpha[:, edges], total[:, edges]
        place, above = chosen, alpha + same[..., 0]
    else:
        alpha, total = _at(alpha, rows.source[edges]), _at(total, rows.source[edges])
        place = chosen * entries.num_classes + draw.labels[:, part]
        per_edge = _per_edge(rows, entries.data)
        likelihood = likelihood[:, edges] if per_edge else _at(likelihood, row)
        if len(same) == 1:
            above = ((alpha + same) * likelihood).sum(-1)
        else:  # two sums, of which the larger one needs no gradient by alpha
            above = (alpha * likelihood).sum(-1) + (same * likelihood).sum(-1)
    weight = log_attention.exp() * (above / (total + every))
    predicted = scatter(weight, row - part.start, -1, dim_size=num_rows, reduce="sum").log()
    seen = picked(alpha, place) + picked(same, place)
    below = picked(total, chosen) + picked(every, chosen)
    return predicted, picked(log_attention, chosen) + (seen / below).log() - predicted


def _at(tensor: Tensor, place: Tensor) -> Tensor:
    if len(tensor) == 1:  # whose gradient takes a fifth of the time of one along dimension 1
        return tensor[0].index_select(0, place)[None]
    index = place.view(1, -1, *[1] * (tensor.dim() - 2))
    return tensor.gather(1, index.expand(len(tensor), -1, *tensor.shape[2:]))
