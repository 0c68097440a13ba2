# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

r"""
Sequential draws in stages, each given the counts of all earlier draws.

The counts of a particle take :math:`O(E)` memory, :math:`O(E C)` where labels are latent, and a
stage costs its own edges.
"""

from collections.abc import Callable
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_nmm.concentrations import Concentrations, at_labels, chosen_rows, totals, written_out
from pyro_nmm.neighborhood import Neighborhood
from pyro_nmm.ops.compact import Places, compact, consecutive
from pyro_nmm.ops.counts import on_edges
from pyro_nmm.ops.evidence import LatentTerms, draw_latent, latent_predictive
from pyro_nmm.ops.predictive import predictive
from pyro_nmm.ops.sampling import EdgeTerms, draw_choices
from pyro_nmm.provenance import untracked
from pyro_nmm.relabel import Channel

#: Earlier draws of ``P`` particles, int32: by place of neighbour and label ``(P, K)``; of observed
#: labels also by neighbour ``(P, M)``.
Counts = tuple[Tensor, ...]


def edge_terms(
    rows: Neighborhood, alpha: Concentrations, log_attention: Tensor, edge_labels: Tensor
) -> EdgeTerms:
    """``(..., num_edges)`` each: the terms of edges with the labels ``(..., num_edges)``."""
    above = at_labels(alpha, rows.source, edge_labels)
    return EdgeTerms(log_attention, above, totals(alpha).index_select(-1, rows.source))


class Stage(NamedTuple):
    """The draw of a stage."""

    edges: Tensor  #: ``(P, n)`` chosen edges, numbered as in all rows; see :class:`LatentStages`
    log_labels: Callable[[], Tensor]  #: gives ``(P, n)``, :math:`f_i`


class Stages:
    """
    Rows in the order of the draw, with observed labels ``(rows.num_rows,)``, or
    ``(rows.num_edges,)`` where edges relabel. ``logits`` are of the whole graph.
    """

    def __init__(
        self, rows: Neighborhood, alpha: Concentrations, logits: Tensor, labels: Tensor
    ) -> None:
        self.rows, self.sources = compact(rows)
        self.num_classes = alpha.shape[-1]
        log_attention = rows.log_softmax(logits.index_select(0, rows.edge))
        #: ``provenance``: which samples of a Pyro program the draw depends on.
        (self._log_attention, self._alpha, self._given), self.provenance = untracked(
            log_attention, chosen_rows(alpha, self.sources), labels
        )

    @cached_property
    def _labels(self) -> Tensor:
        return on_edges(self.rows, self._given)

    @cached_property
    def _terms(self) -> EdgeTerms:
        return edge_terms(self.rows, self._alpha, self._log_attention, self._labels)

    @cached_property
    def _by_label(self) -> Places:
        return Places(self.sources[self.rows.source] * self.num_classes + self._labels)

    @property
    def numbers(self) -> int:
        """How many numbers a draw of all rows holds for each particle."""
        return 4 * self.rows.num_edges

    def no_counts(self, num_particles: int) -> Counts:
        sizes = len(self._by_label.keys), len(self.sources)
        return tuple(self._zeros(num_particles, size) for size in sizes)

    def _zeros(self, *size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.int32, device=self.sources.device)

    def counts(self, choices: Tensor, labels: Tensor) -> Counts:
        """Counts of choices ``(P, n)`` of other nodes, with labels ``(n,)`` or ``(P, n)``."""
        by_label = self._by_label.count(choices * self.num_classes + labels)
        return by_label, Places(self.sources).count(choices)

    def _places(self, edges: Tensor) -> tuple[Tensor, ...]:
        return self._by_label.place[edges], self.rows.source[edges]

    def add(self, counts: Counts, edges: Tensor, times: int = 1) -> None:
        """Count the draws ``(P, n)``; with ``times=-1``, take them out again."""
        for table, place in zip(counts, self._places(edges), strict=True):
            table.scatter_add_(1, place, torch.full_like(place, times, dtype=table.dtype))

    def draw(self, counts: Counts | None, first: int, last: int, num_particles: int) -> Stage:
        """The draws of rows ``first..last - 1``; ``counts`` is ``None`` without earlier ones."""
        part, span = consecutive(self.rows, first, last)
        size = num_particles, last - first
        uniforms = torch.rand(size, dtype=torch.double, device=self.sources.device)
        own = span if len(self._given) == self.rows.num_edges else slice(first, last)
        return self._stage(*compact(part), counts, span, own, uniforms)

    def _stage(self, rows, near, counts, span, own, uniforms) -> Stage:
        terms = EdgeTerms(*(term[None, span] for term in self._terms))
        if counts is not None:
            same = counts[0].index_select(1, self._by_label.place[span])
            every = counts[1].index_select(1, self.rows.source[span])
            terms = EdgeTerms(terms.log_attention, terms.alpha + same, terms.total + every)
        draw = draw_choices(rows, terms, self._given[None, own], self.num_classes, uniforms)
        return Stage(draw.edges + span.start, lambda: predictive(rows, terms, draw)[0])

    def choices(self, edges: Tensor) -> Tensor:
        """The node ids that draws lead to."""
        return self.sources[self.rows.source[edges]]

    def borrowed(self, edges: Tensor) -> Tensor:
        """The labels that draws count for."""
        return self._labels[edges]


class LatentStages(Stages):
    """Rows with evidence ``(..., C)`` for labels. A draw has the number ``edge * C + label``."""

    @property
    def numbers(self) -> int:
        return (4 + self.num_classes) * self.rows.num_edges

    def no_counts(self, num_particles: int) -> Counts:
        return (self._zeros(num_particles, len(self.sources) * self.num_classes),)

    def counts(self, choices: Tensor, labels: Tensor) -> Counts:
        place, found = Places(self.sources).find(choices)
        (counts,) = self.no_counts(len(choices))
        return (counts.scatter_add_(1, place * self.num_classes + labels, found.int()),)

    def _places(self, edges: Tensor) -> tuple[Tensor, ...]:
        source = self.rows.source[self._edge(edges)]
        return (source * self.num_classes + self.borrowed(edges),)

    def _stage(self, rows, near, counts, span, own, uniforms) -> Stage:
        alpha = self._alpha[None, near]
        if counts is not None:
            alpha = alpha + counts[0].view(len(counts[0]), -1, self.num_classes)[:, near]
        terms = LatentTerms(self._log_attention[None, span], alpha, self._given[None, own])
        draw = draw_latent(rows, terms, uniforms)
        edges = (draw.edges + span.start) * self.num_classes + draw.labels
        return Stage(edges, lambda: latent_predictive(rows, terms, draw)[0])

    def _edge(self, edges: Tensor) -> Tensor:
        return edges.div(self.num_classes, rounding_mode="floor")

    def choices(self, edges: Tensor) -> Tensor:
        return super().choices(self._edge(edges))

    def borrowed(self, edges: Tensor) -> Tensor:
        return edges % self.num_classes


def stages_of(
    rows: Neighborhood, alpha: Concentrations, logits: Tensor, labels: Tensor, channel: Channel
) -> Stages:
    """Rows with labels ``(rows.num_rows,)`` that edges of a channel show, as stages."""
    own = channel.of(rows.edge)
    if own.certain:
        return Stages(rows, alpha, logits, own.borrowed(rows, labels))
    return LatentStages(rows, written_out(alpha), logits, own.evidence(rows, labels, logits))
