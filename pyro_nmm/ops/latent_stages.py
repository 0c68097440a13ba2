# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

r"""
A sequential draw of choices and borrowed labels in stages, given evidence: what
:mod:`pyro_nmm.ops.stages` is to observed labels.

By conjugacy, earlier draws are counts that are added to the concentrations of the sources that a
stage reaches.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from pyro_nmm.channel import Channel
from pyro_nmm.concentrations import Concentrations, written_out
from pyro_nmm.neighborhood import Neighborhood
from pyro_nmm.ops.compact import Places, compact, consecutive
from pyro_nmm.ops.evidence import (
    LatentDraw,
    LatentTerms,
    draw_latent,
    latent_predictive,
    per_edge,
)
from pyro_nmm.ops.stages import Stages
from pyro_nmm.provenance import untracked


class LatentStage(NamedTuple):
    """The rows of a stage, what their edges are worth after earlier stages, and the draw."""

    rows: Neighborhood
    terms: LatentTerms
    draw: LatentDraw
    edges: Tensor  #: ``(P, rows.num_rows)`` chosen pairs, numbered ``edge * C + label``

    def log_labels(self) -> Tensor:
        """``(P, rows.num_rows)``: :math:`f_i`."""
        return latent_predictive(self.rows, self.terms, self.draw)[0]


class LatentStages:
    """
    Rows with evidence in an order, ready to be drawn in stages. A pair of an edge and a label has
    one number, ``edge * C + label``.

    :param Neighborhood rows: in the order of the draw.
    :param Tensor alpha: ``(M, C)`` concentrations.
    :param Tensor logits: ``(num_edges,)`` attention scores of the whole graph.
    :param Tensor evidence: ``(rows.num_rows, C)`` or ``(rows.num_edges, C)``.
    """

    def __init__(self, rows: Neighborhood, alpha: Tensor, logits: Tensor, evidence: Tensor) -> None:
        self.rows, self.sources = compact(rows)
        self.num_classes = alpha.shape[-1]
        log_attention = rows.log_softmax(logits.index_select(0, rows.edge))
        plain, self.provenance = untracked(log_attention, alpha[self.sources], evidence)
        self._terms = LatentTerms(*(term[None] for term in plain))

    @property
    def numbers(self) -> int:
        """How many numbers a draw of all rows holds for each particle."""
        return (4 + self.num_classes) * self.rows.num_edges

    def no_counts(self, num_particles: int) -> Tensor:
        size = num_particles, len(self.sources) * self.num_classes
        return torch.zeros(size, dtype=torch.int32, device=self.sources.device)

    def counts(self, choices: Tensor, labels: Tensor) -> Tensor:
        """
        Counts of draws that other nodes have made.

        :param Tensor choices: ``(P, n)`` node ids.
        :param Tensor labels: ``(n,)`` or ``(P, n)``.
        """
        place, found = Places(self.sources).find(choices)
        index = place * self.num_classes + labels
        return self.no_counts(len(choices)).scatter_add_(1, index, found.int())

    def add(self, counts: Tensor, edges: Tensor, times: int = 1) -> None:
        """Count the draws ``(P, n)``; with ``times=-1``, take them out again."""
        place = self.rows.source[self._edge(edges)] * self.num_classes + self.borrowed(edges)
        counts.scatter_add_(1, place, torch.full_like(place, times, dtype=counts.dtype))

    def draw(self, counts: Tensor | None, first: int, last: int, num_particles: int) -> LatentStage:
        """
        The draws of rows ``first..last - 1`` given ``counts``, or ``None`` for no earlier ones.
        Cost: linear in the edges of these rows, times ``C``.
        """
        part, span = consecutive(self.rows, first, last)
        rows, near = compact(part)
        alpha, evidence = self._terms.alpha[:, near], self._terms.evidence
        if counts is not None:
            alpha = alpha + counts.view(len(counts), -1, self.num_classes)[:, near]
        own = span if per_edge(self.rows, evidence) else slice(first, last)
        terms = LatentTerms(self._terms.log_attention[:, span], alpha, evidence[:, own])
        size = num_particles, last - first
        uniforms = torch.rand(size, dtype=torch.double, device=self.sources.device)
        draw = draw_latent(rows, terms, uniforms)
        edges = (draw.edges + span.start) * self.num_classes + draw.labels
        return LatentStage(rows, terms, draw, edges)

    def _edge(self, edges: Tensor) -> Tensor:
        return edges.div(self.num_classes, rounding_mode="floor")

    def choices(self, edges: Tensor) -> Tensor:
        """The ids of the sources that draws lead to."""
        return self.sources[self.rows.source[self._edge(edges)]]

    def borrowed(self, edges: Tensor) -> Tensor:
        """The labels that were borrowed."""
        return edges % self.num_classes


def stages_of(
    rows: Neighborhood,
    alpha: Concentrations,
    logits: Tensor,
    labels: Tensor,
    channel: Channel,
) -> Stages | LatentStages:
    """
    Rows with the labels that they show, as stages.

    :param Tensor labels: ``(rows.num_rows,)``.
    :param Channel channel: of all edges of the graph.
    """
    own = channel.of(rows.edge)
    if own.certain:
        return Stages(rows, alpha, logits, own.borrowed(rows, labels))
    return LatentStages(rows, written_out(alpha), logits, own.evidence(rows, labels, logits))
