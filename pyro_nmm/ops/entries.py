# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

r"""
Entries: the labels that a row may borrow over each of its edges.

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
from torch import Tensor
from torch_geometric.utils import segment

from pyro_nmm.concentrations import Concentrations, at_labels, totals
from pyro_nmm.neighborhood import Neighborhood
from pyro_nmm.ops.counts import ChoiceGroups, indicator, on_edges


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


def entries_of(
    rows: Neighborhood, alpha: Concentrations, log_attention: Tensor, data: Tensor
) -> Entries:
    """Entries of observed labels or of evidence, each with batch dimensions of its own."""
    if data.is_floating_point():
        assert isinstance(alpha, Tensor)
        return evidence_entries(log_attention, alpha, data)
    above = at_labels(alpha, rows.source, on_edges(rows, data))
    total = totals(alpha).index_select(-1, rows.source)
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


def relative(rows: Neighborhood, entries: Entries) -> tuple[Entries, Tensor | int]:
    """Evidence relative to every row's largest, and this one, ``(b, num_rows)``."""
    if entries.observed:
        return entries, 0
    top = below = entries.data.detach().amax(-1)
    if per_edge(rows, entries.data):
        top = segment(top.T, rows.ptr, reduce="max").T
        below = top.index_select(1, rows.row)
    return entries._replace(data=entries.data - below[..., None]), top


def per_edge(rows: Neighborhood, evidence: Tensor) -> bool:
    return evidence.shape[1] == rows.num_edges


def edge_evidence(rows: Neighborhood, evidence: Tensor) -> Tensor:
    return evidence if per_edge(rows, evidence) else evidence.index_select(1, rows.row)


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
        return draw.edges if self.size == 1 else draw.edges * self.size + draw.labels

    def split(self, numbers: Tensor) -> Draw:
        if self.size == 1:
            return Draw(numbers, self.labels.expand(len(numbers), -1).gather(1, numbers))
        return Draw(numbers.div(self.size, rounding_mode="floor"), numbers % self.size)


def draw_of_edges(rows: Neighborhood, entries: Entries, edges: Tensor) -> Draw:
    """The draw of chosen edges ``(B, num_rows)`` with observed labels."""
    wide = Wide(rows, entries)
    return wide.split(edges)._replace(counts=wide.groups.earlier(wide.chosen(edges)))
