# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

r"""
A sequential draw of choices in stages, which goes on from the counts of earlier choices.

What a row needs to know of earlier choices are counts at the places that its edges name: its
neighbours, and its neighbours with its label. There are at most as many places as edges, so
the counts of a particle take :math:`O(E)` memory and a stage costs its own edges.
"""

from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_nmm.concentrations import Concentrations, at_labels, chosen_rows, totals
from pyro_nmm.neighborhood import Neighborhood
from pyro_nmm.ops.compact import Places, compact, consecutive
from pyro_nmm.ops.counts import on_edges
from pyro_nmm.ops.predictive import predictive
from pyro_nmm.ops.sampling import Draw, EdgeTerms, draw_choices
from pyro_nmm.provenance import untracked


class Counts(NamedTuple):
    """Earlier choices of each of ``P`` particles, by neighbour and label, and by neighbour."""

    same_label: Tensor
    any_label: Tensor


class Stage(NamedTuple):
    """The rows of a stage, what their edges are worth after earlier stages, and the draw."""

    rows: Neighborhood
    terms: EdgeTerms
    draw: Draw
    edges: Tensor  #: ``(P, rows.num_rows)`` chosen edges, numbered as in all rows

    def log_labels(self) -> Tensor:
        r"""``(P, rows.num_rows)``: :math:`f_i = \log p(y_i \mid y_{<i}, c_{<i})`."""
        return predictive(self.rows, self.terms, self.draw)[0]


class Stages:
    """
    Rows whose choices are drawn stage by stage.

    :param Neighborhood rows: in the order of the draw.
    :param alpha: ``(N, C)`` concentrations.
    :param Tensor logits: ``(num_edges,)`` attention scores of the whole graph.
    :param Tensor labels: ``(rows.num_rows,)``, or ``(rows.num_edges,)`` where edges relabel.
    """

    def __init__(
        self, rows: Neighborhood, alpha: Concentrations, logits: Tensor, labels: Tensor
    ) -> None:
        self.rows, self.sources = compact(rows)
        (self.labels,), provenance = untracked(labels)
        self.num_classes = alpha.shape[-1]
        alpha, source = chosen_rows(alpha, self.sources), self.rows.source
        label = on_edges(self.rows, self.labels)
        terms, more = untracked(
            rows.log_softmax(logits.index_select(0, rows.edge))[None],
            at_labels(alpha, source, label)[None],
            totals(alpha).index_select(0, source)[None],
        )
        #: Which samples of a Pyro program the draw depends on.
        self.provenance = provenance | more
        self._terms = EdgeTerms(*terms)

    @cached_property
    def _by_label(self) -> Places:
        label = on_edges(self.rows, self.labels)
        return Places(self.sources[self.rows.source] * self.num_classes + label)

    @property
    def numbers(self) -> int:
        """How many numbers a draw of all rows holds for each particle."""
        return 4 * self.rows.num_edges

    def no_counts(self, num_particles: int) -> Counts:
        sizes = len(self._by_label.keys), len(self.sources)
        none = torch.zeros((), dtype=torch.int32, device=self.labels.device)
        return Counts(*(none.new_zeros(num_particles, size) for size in sizes))

    def counts(self, choices: Tensor, labels: Tensor) -> Counts:
        """
        Counts of choices that other nodes have made.

        :param Tensor choices: ``(P, n)`` node ids.
        :param Tensor labels: ``(n,)`` or ``(P, n)``.
        """
        by_label = self._by_label.count(choices * self.num_classes + labels)
        return Counts(by_label, Places(self.sources).count(choices))

    def add(self, counts: Counts, edges: Tensor, times: int = 1) -> None:
        """Count the choices of edges ``(P, n)``; with ``times=-1``, take them out again."""
        places = self._by_label.place[edges], self.rows.source[edges]
        for table, place in zip(counts, places, strict=True):
            table.scatter_add_(1, place, torch.full_like(place, times, dtype=table.dtype))

    def draw(self, counts: Counts | None, first: int, last: int, num_particles: int) -> Stage:
        """
        The choices of rows ``first..last - 1`` given ``counts``, or ``None`` for no earlier
        choices. Cost: linear in the edges of these rows.
        """
        device = self.labels.device
        part, span = consecutive(self.rows, first, last)
        rows, _ = compact(part)
        terms = EdgeTerms(*(term[:, span] for term in self._terms))
        if counts is not None:
            same = counts.same_label.index_select(1, self._by_label.place[span])
            every = counts.any_label.index_select(1, self.rows.source[span])
            terms = EdgeTerms(terms.log_attention, terms.alpha + same, terms.total + every)
        size = (num_particles, last - first)
        uniforms = torch.rand(size, dtype=torch.double, device=device)
        own = span if len(self.labels) == self.rows.num_edges else slice(first, last)
        draw = draw_choices(rows, terms, self.labels[None, own], self.num_classes, uniforms)
        return Stage(rows, terms, draw, draw.edges + span.start)

    def choices(self, edges: Tensor) -> Tensor:
        """The node ids that edges lead to."""
        return self.sources[self.rows.source[edges]]

    def borrowed(self, edges: Tensor) -> Tensor:
        """The labels that are counted at their ends."""
        return on_edges(self.rows, self.labels)[edges]
