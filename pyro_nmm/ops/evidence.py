# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

r"""
Choices and borrowed labels given evidence, row after row.

A row draws :math:`(c_i, u_i)` in proportion to the summands of

.. math::

    e^{f_i} = \sum_j \frac{L_{ij}}{A_j + S_{ij}} \sum_k (\alpha_{jk} + s_{ijk}) e^{e_{ijk}} ,

where :math:`s_{ijk}` counts the earlier rows that borrowed :math:`k` from :math:`j`. On a CPU
compiled loops sum over labels inside of an edge. The tensor code makes an edge of every pair of an
edge and a label, and calls the kernels of observed labels.
"""

from functools import cached_property
from types import ModuleType
from typing import NamedTuple

import torch
from pyro.ops.provenance import track_provenance
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch_geometric.utils import segment

from pyro_nmm import backend
from pyro_nmm.neighborhood import Neighborhood
from pyro_nmm.ops.counts import Groups, choice_groups, indicator
from pyro_nmm.ops.predictive import predictive
from pyro_nmm.ops.sampling import Draw, EdgeTerms, draw_by_sweeps
from pyro_nmm.provenance import untracked


class LatentTerms(NamedTuple):
    """Terms of draws, with a batch dimension ``b`` of size one or ``B`` each."""

    log_attention: Tensor  #: ``(b, num_edges)``
    alpha: Tensor  #: ``(b, M, C)``
    evidence: Tensor  #: ``(b, num_rows, C)``, or ``(b, num_edges, C)`` if it depends on the edge

    @property
    def num_classes(self) -> int:
        return self.alpha.shape[-1]


class LatentDraw(NamedTuple):
    """Chosen edges and borrowed labels, both ``(B, num_rows)``."""

    edges: Tensor
    labels: Tensor


def draw_latent(rows: Neighborhood, terms: LatentTerms, uniforms: Tensor) -> LatentDraw:
    """The sequential draw with uniforms ``(B, num_rows)`` in float64, in :math:`O(B E C)`."""
    with torch.no_grad():
        terms, _ = relative(rows, LatentTerms(*untracked(*terms)[0]))
        if loops := compiled_loops(rows):
            return LatentDraw(*loops.draw(rows, terms, uniforms))
        wide = Wide(rows, terms)
        inputs = wide.rows, wide.terms, wide.labels, terms.num_classes, uniforms
        return wide.split(draw_by_sweeps(*inputs, parallel=True).edges)


def latent_predictive(
    rows: Neighborhood, terms: LatentTerms, draw: LatentDraw
) -> tuple[Tensor, Tensor]:
    r"""
    :math:`f_i`, and :math:`\log q(c_i, u_i \mid \text{earlier rows})` of a given draw: two
    ``(B, num_rows)`` tensors, differentiable in ``terms``. Cost: :math:`O(B E C)`.
    """
    plain, provenance = untracked(*terms)
    terms, top = relative(rows, LatentTerms(*plain))
    if loops := compiled_loops(rows):
        predicted, choice = _Compiled.apply(*terms, rows, draw, loops)
    else:
        predicted, choice = _predictive(rows, terms, draw)
    parts = (track_provenance(part, provenance) for part in (predicted + top, choice))
    return tuple(parts)


def compiled_loops(rows: Neighborhood) -> ModuleType | None:
    if backend.compiled is None or rows.device.type != "cpu":
        return None
    from pyro_nmm.compiled import evidence  # needs numba

    return evidence


def relative(rows: Neighborhood, terms: LatentTerms) -> tuple[LatentTerms, Tensor]:
    """Evidence relative to every row's largest, and this one, ``(b, num_rows)``."""
    top = below = terms.evidence.detach().amax(-1)
    if per_edge(rows, terms.evidence):
        top = segment(top.T, rows.ptr, reduce="max").T
        below = top.index_select(1, rows.row)
    return terms._replace(evidence=terms.evidence - below[..., None]), top


class _Compiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, log_attention, alpha, evidence, rows, draw, loops):
        terms = LatentTerms(log_attention, alpha, evidence)
        log_evidence, log_choice = loops.evaluate(rows, terms, draw)
        ctx.save_for_backward(*terms, *draw, log_evidence)
        ctx.rows, ctx.loops = rows, loops
        return log_evidence, log_choice

    @staticmethod
    @once_differentiable
    def backward(ctx, to_evidence, to_choice):
        *terms, edges, labels, log_evidence = ctx.saved_tensors
        terms, draw = LatentTerms(*terms), LatentDraw(edges, labels)
        given = ctx.rows, terms, draw, log_evidence, to_evidence, to_choice
        return *ctx.loops.gradient(*given), None, None, None


class Wide:
    """Rows with an edge for every edge and label, numbered ``edge * C + label``."""

    def __init__(self, rows: Neighborhood, terms: LatentTerms) -> None:
        self.size = size = terms.num_classes
        source = rows.source.repeat_interleave(size)
        #: ``(1, num_edges * C)``.
        self.labels = torch.arange(size, device=rows.device).repeat(rows.num_edges)[None]
        arguments = rows.num_nodes, rows.nodes, rows.ptr * size, source
        self.rows = Neighborhood.of_rows(*arguments, num_sources=rows.num_sources)
        alpha = terms.alpha.index_select(1, rows.source)
        weight = terms.log_attention[..., None] + edge_evidence(rows, terms.evidence)
        total = terms.alpha.sum(-1).index_select(1, rows.source)[..., None].expand_as(alpha)
        self.terms = EdgeTerms(*(t.reshape(len(t), -1) for t in (weight, alpha, total)))

    @cached_property
    def groups(self) -> tuple[Groups, Groups]:
        return choice_groups(self.rows, self.labels, self.size, self.rows.row)

    def pairs(self, draw: LatentDraw) -> Tensor:
        return draw.edges * self.size + draw.labels

    def split(self, pairs: Tensor) -> LatentDraw:
        return LatentDraw(pairs.div(self.size, rounding_mode="floor"), pairs % self.size)


def per_edge(rows: Neighborhood, evidence: Tensor) -> bool:
    return evidence.shape[1] == rows.num_edges


def edge_evidence(rows: Neighborhood, evidence: Tensor) -> Tensor:
    return evidence if per_edge(rows, evidence) else evidence.index_select(1, rows.row)


def _predictive(rows: Neighborhood, terms: LatentTerms, draw: LatentDraw) -> tuple[Tensor, Tensor]:
    """:func:`latent_predictive` of plain tensors, on any device."""
    wide = Wide(rows, terms)
    (by_source, by_label), edges = wide.groups, wide.pairs(draw)
    chosen = indicator(edges, wide.rows.num_edges)
    counts = by_label.earlier(chosen), by_source.earlier(chosen)
    return predictive(wide.rows, wide.terms, Draw(edges, *counts))


def one_step_credits(
    rows: Neighborhood, terms: LatentTerms, draw: LatentDraw, predicted: Tensor
) -> Tensor:
    r"""
    ``(B, num_rows)`` double: the direct effect of each draw on later :math:`f_i`, see
    :func:`pyro_nmm.ops.score_costs.one_step_credits`. Cost: :math:`O(E \log E + B E C)`.
    """
    terms, top = relative(rows, LatentTerms(*(t.double() for t in terms)))
    if loops := compiled_loops(rows):
        return loops.credits(rows, terms, draw, predicted - top)
    groups = Groups(rows.source[None], rows.num_sources)
    label = draw.labels.index_select(1, rows.row)[:, None]
    classes = torch.arange(terms.num_classes, device=rows.device)[:, None]
    chosen = indicator(draw.edges, rows.num_edges)[:, None] * (label == classes)  # (B, C, E)
    counts = groups.earlier(chosen.flatten(0, 1)).view_as(chosen)
    likelihood = edge_evidence(rows, terms.evidence).exp().mT
    alpha = terms.alpha.index_select(1, rows.source).mT
    above = ((alpha + counts) * likelihood).sum(1, keepdim=True)
    below = (alpha + counts).sum(1, keepdim=True)
    share = terms.log_attention.exp() / (predicted - top).exp().index_select(1, rows.row)
    # Where no earlier row made this draw, no count can be taken away, and the value is not used.
    fewer = ((above - likelihood) / (below - 1)).where(counts > 0, above / below)
    credit = -torch.log1p(share[:, None] * (fewer - above / below))
    later = groups.later(credit.flatten(0, 1)).view_as(credit)
    edges, labels = draw.edges[:, None].expand(-1, len(classes), -1), draw.labels[:, None]
    return later.gather(2, edges).gather(1, labels)[:, 0]
