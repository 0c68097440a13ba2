# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Draws in stages, given counts of earlier ones: :math:`O(E)` or :math:`O(E C)` a particle."""

from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from pyro_nmm.neighborhood import Neighborhood, compact, consecutive
from pyro_nmm.ops.counts import Places, on_edges
from pyro_nmm.ops.entries import Entries, entries_of, predictive
from pyro_nmm.ops.sampling import draw_entries, uniforms_of
from pyro_nmm.provenance import untracked
from pyro_nmm.relabel import Channel

#: Earlier draws of ``P`` particles, int32: by place of neighbour and label ``(P, K)``, and by
#: neighbour ``(P, M)``.
Counts = tuple[Tensor, ...]


class Stages:
    """Rows in the order of the draw, with observed labels or evidence: ``data`` of :class:`Entries`
    without a batch. ``logits`` are of the whole graph. Entry ``k`` of an edge is ``edge * K + k``.
    """

    def __init__(self, rows: Neighborhood, alpha: Tensor, logits: Tensor, data: Tensor):
        self.rows, self.sources = compact(rows)
        self.num_classes = alpha.shape[-1]
        log_attention = rows.log_softmax(logits.index_select(0, rows.edge))
        #: ``provenance``: which samples of a Pyro program the draw depends on.
        values = log_attention, alpha.index_select(-2, self.sources), data
        (log_attention, alpha, data), self.provenance = untracked(*values)
        entries = entries_of(self.rows, alpha, log_attention, data)
        self._entries = entries.map(lambda part: part[None])
        self._size = 1 if entries.observed else self.num_classes
        #: Sources and labels of the entries of alpha: of edges with observed labels, or of sources.
        if entries.observed:
            self._source, self._label = self.rows.source, on_edges(self.rows, data)
        else:
            self._source = torch.arange(len(self.sources), device=rows.device)
            self._source = self._source.repeat_interleave(self._size)
            self._label = torch.arange(self._size, device=rows.device).repeat(len(self.sources))

    @cached_property
    def _by_label(self) -> Places:
        return Places(self.sources[self._source] * self.num_classes + self._label)

    @property
    def numbers(self) -> int:
        """How many numbers a draw of all rows holds for each particle."""
        return (3 + self._size) * self.rows.num_edges

    def no_counts(self, num_particles: int) -> Counts:
        shapes = ((num_particles, len(part)) for part in (self._by_label.keys, self.sources))
        return tuple(self.sources.new_zeros(shape, dtype=torch.int32) for shape in shapes)

    def counts(self, choices: Tensor, labels: Tensor) -> Counts:
        """Counts of choices ``(P, n)`` of other nodes, with labels ``(n,)`` or ``(P, n)``."""
        by_label = self._by_label.count(choices * self.num_classes + labels)
        return by_label, Places(self.sources).count(choices)

    def add(self, counts: Counts, numbers: Tensor, times: int = 1) -> None:
        """Count the draws ``(P, n)``; with ``times=-1``, take them out again."""
        place = self._place(numbers)
        for table, key in zip(counts, (self._by_label.place, self._source), strict=True):
            index = key[place]
            table.scatter_add_(1, index, torch.full_like(index, times, dtype=table.dtype))

    def draw(
        self, counts: Counts | None, first: int, last: int, num_particles: int
    ) -> tuple[Tensor, Callable[[], Tensor]]:
        """``(P, n)``: entries drawn for rows ``first..last - 1``; and what gives their terms."""
        part, span = consecutive(self.rows, first, last)
        rows, near = compact(part)
        entries = self._of_stage(near, span, slice(first, last), counts)
        draw = draw_entries(rows, entries, uniforms_of(rows, num_particles))
        numbers = draw.edges + span.start
        if not entries.observed:
            numbers = numbers * self._size + draw.labels
        return numbers, lambda: predictive(rows, entries, draw)[0]

    def _of_stage(self, near: Tensor, edges: slice, rows: slice, counts: Counts | None) -> Entries:
        log_attention, alpha, total, data, num_classes = self._entries
        data = data[:, edges if data.shape[1] == self.rows.num_edges else rows]
        place = edges if self._size == 1 else near
        by_edge, alpha, total = self._size == 1, alpha[:, place], total[:, place]
        if counts is not None:
            by_label = self._by_label.place.view(self._entries.alpha.shape[1:])
            alpha = alpha + counts[0][:, by_label[place]]
            total = total + counts[1][:, self.rows.source[edges] if by_edge else near]
        return Entries(log_attention[:, edges], alpha, total, data, num_classes)

    def _place(self, numbers: Tensor) -> Tensor:
        """The entries of alpha that drawn entries stand for."""
        if self._size == 1:
            return numbers
        edges = numbers.div(self._size, rounding_mode="floor")
        return self.rows.source[edges] * self._size + numbers % self._size

    def choices(self, numbers: Tensor) -> Tensor:
        """The node ids that draws lead to."""
        return self.sources[self._source[self._place(numbers)]]

    def borrowed(self, numbers: Tensor) -> Tensor:
        """The labels that draws count for."""
        return self._label[self._place(numbers)]


def stages_of(
    rows: Neighborhood, alpha: Tensor, logits: Tensor, labels: Tensor, channel: Channel
) -> Stages:
    """Rows with labels ``(rows.num_rows,)`` that edges of a channel show, as stages."""
    edges = channel.of(rows.edge)
    if edges.certain:
        return Stages(rows, alpha, logits, edges.borrowed(rows, labels))
    return Stages(rows, alpha, logits, edges.evidence(rows, labels, logits))
