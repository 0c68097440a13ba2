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
from torch_geometric.utils import segment

from pyro_nmm import backend
from pyro_nmm.blocks import at_labels
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
    #: Of observed labels, how many earlier rows chose an edge's source with its label, and with any
    #: label: ``(B, num_edges)`` twice.
    counts: tuple[Tensor, ...] | None = None


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
    return table.flatten(1).expand(len(places), -1).gather(1, places)


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

    def chosen(self, numbers: Tensor) -> Tensor:
        return indicator(numbers, self.rows.num_edges)

    def numbers(self, draw: Draw) -> Tensor:
        return numbers_of(draw, self.size)

    def split(self, numbers: Tensor) -> Draw:
        return draw_of(numbers, self.size, self.labels if self.size == 1 else None)


class _Predictive(torch.autograd.Function):
    # The counts are constants, so the whole sequence is one sum over entries. Its derivative is
    # written down, because autograd's tape would cost about twice as much.

    @staticmethod
    def forward(ctx, log_weight, alpha, total, numbers, same_label, any_label, rows):
        weight = log_weight.exp()
        below = total + any_label
        odds = (alpha + same_label).div_(below)
        predicted = rows.sum(weight * odds).log()
        log_choice = (
            odds.gather(1, numbers).log_().add_(picked(log_weight, numbers)).sub_(predicted)
        )
        ctx.save_for_backward(weight, odds, below, numbers, predicted)
        ctx.rows, ctx.shared = rows, [len(t) == 1 for t in (log_weight, alpha, total)]
        return predicted, log_choice

    @staticmethod
    @once_differentiable
    def backward(ctx, to_predicted, to_choice):
        weight, odds, below, numbers, predicted = ctx.saved_tensors
        # d predicted is the mean of d log(weight) under the row's weights, and log_choice is
        # log(weight) at the chosen entry minus predicted. In place: fresh memory costs more than
        # arithmetic.
        share = (to_predicted - to_choice).mul_((-predicted).exp_())
        to_alpha = share.index_select(1, ctx.rows.row).mul_(weight)
        to_weight = (to_alpha * odds).scatter_add_(1, numbers, to_choice)
        above = odds.gather(1, numbers) * below.gather(1, numbers)
        to_alpha.div_(below).scatter_add_(1, numbers, to_choice / above)
        to_total = (to_weight / below).neg_()
        grads = zip((to_weight, to_alpha, to_total), ctx.shared, strict=True)
        return *(g.sum(0, keepdim=True) if one else g for g, one in grads), *[None] * 4


class _Compiled(torch.autograd.Function):
    # The derivative by ``alpha`` includes the one by its total.

    @staticmethod
    def forward(ctx, log_attention, alpha, evidence, total, rows, draw, loops):
        entries = Entries(log_attention, alpha, total, evidence, alpha.shape[-1])
        predicted, log_choice = loops.evaluate(rows, entries, draw)
        ctx.save_for_backward(*entries[:4], *draw[:2], predicted)
        ctx.rows, ctx.loops = rows, loops
        return predicted, log_choice

    @staticmethod
    @once_differentiable
    def backward(ctx, to_predicted, to_choice):
        *tensors, edges, labels, predicted = ctx.saved_tensors
        entries = Entries(*tensors, tensors[1].shape[-1])
        inputs = entries, Draw(edges, labels), predicted, to_predicted, to_choice
        return *ctx.loops.gradient(ctx.rows, *inputs), *[None] * 4


def predictive(rows: Neighborhood, entries: Entries, draw: Draw) -> tuple[Tensor, Tensor]:
    r"""``(B, num_rows)`` twice, given earlier rows: log-probabilities :math:`f_i` of labels or
    observations, and :math:`\log q(c_i, u_i \mid \cdot)` of draws, the logarithm of one summand of
    :math:`e^{f_i}` less :math:`f_i`. Differentiable in ``entries``. Cost: :math:`O(B E K)`.
    """
    plain, provenance = untracked(*entries)
    entries, top = shift_evidence(rows, Entries(*plain))
    loops = None if entries.observed else backend.loops_on(rows.device)
    if loops:
        inputs = entries.log_attention, entries.alpha, entries.data, entries.total.detach()
        predicted, choice = _Compiled.apply(*inputs, rows, draw, loops)
    else:
        wide = Wide(rows, entries)
        numbers = wide.numbers(draw)
        counts = draw.counts or wide.groups.earlier(wide.chosen(numbers))
        terms = wide.log_weight, wide.alpha, wide.total
        predicted, choice = _Predictive.apply(*terms, numbers, *counts, wide.rows)
    predicted = predicted if entries.observed else predicted + top
    return track_provenance(predicted, provenance), track_provenance(choice, provenance)
