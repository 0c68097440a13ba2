# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

r"""
Choices and borrowed labels given evidence, row after row.

A row borrows the label :math:`u_i \sim z_{c_i}`, of which only the likelihood
:math:`e_{ijk} = \log p(w_i \mid u_i = k)` of something observed is known. In turn,

.. math::

    g_i = \sum_{j \in n(i)} \frac{L_{ij}}{A_j + S_{ij}} \sum_k (\alpha_{jk} + s_{ijk}) e^{e_{ijk}} ,
    \qquad f_i = \log g_i ,

where :math:`s_{ijk}` counts the earlier rows that borrowed :math:`k` from :math:`j`. The pair
:math:`(c_i, u_i)` is drawn in proportion to the summands. An observed label is evidence of zero
there and :math:`-\infty` elsewhere.

On a CPU compiled loops sum over labels inside of an edge. The tensor code writes every pair of an
edge and a label as an edge of its own, and calls what observed labels call.
"""

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
    r"""
    What the draw needs to know, with a batch dimension of size one or ``B`` each:
    :math:`\log L_{ij}` as ``(b, num_edges)``, :math:`\alpha` as ``(b, M, C)``, and the evidence
    :math:`e` as ``(b, num_rows, C)``, or as ``(b, num_edges, C)`` where edges differ in it.
    """

    log_attention: Tensor
    alpha: Tensor
    evidence: Tensor

    @property
    def num_classes(self) -> int:
        return self.alpha.shape[-1]


class LatentDraw(NamedTuple):
    """Chosen edges and borrowed labels, both ``(B, num_rows)``."""

    edges: Tensor
    labels: Tensor


def draw_latent(rows: Neighborhood, terms: LatentTerms, uniforms: Tensor) -> LatentDraw:
    """
    The sequential draw, as a loop or as a fixed point.

    :param Tensor uniforms: ``(B, num_rows)`` float64, one per row and draw.

    Cost: :math:`O(B E C)`, a sweep of the fixed point.
    """
    with torch.no_grad():
        terms, _ = relative(rows, LatentTerms(*untracked(*terms)[0]))
        if _compiled(rows):
            from pyro_nmm.compiled import evidence as compiled_evidence  # needs numba

            return LatentDraw(*compiled_evidence.draw(rows, terms, uniforms))
        size, wide, labels = terms.num_classes, *written_out(rows, terms.num_classes)
        flat = flat_terms(rows, terms)
        edges = draw_by_sweeps(wide, flat, labels[None], size, uniforms, parallel=True).edges
        return LatentDraw(edges.div(size, rounding_mode="floor"), edges % size)


def latent_predictive(
    rows: Neighborhood, terms: LatentTerms, draw: LatentDraw
) -> tuple[Tensor, Tensor]:
    r"""
    :math:`f_i`, and :math:`\log q(c_i, u_i \mid \text{earlier rows})` of a given draw: two
    ``(B, num_rows)`` tensors, differentiable in ``terms``. Cost: :math:`O(B E C)`.
    """
    plain, provenance = untracked(*terms)
    terms, top = relative(rows, LatentTerms(*plain))
    if _compiled(rows):
        predicted, choice = _Compiled.apply(*terms, rows, draw)
    else:
        predicted, choice = _predictive(rows, terms, draw)
    parts = (track_provenance(part, provenance) for part in (predicted + top, choice))
    return tuple(parts)


def _compiled(rows: Neighborhood) -> bool:
    return backend.compiled is not None and rows.device.type == "cpu"


def relative(rows: Neighborhood, terms: LatentTerms) -> tuple[LatentTerms, Tensor]:
    """Evidence relative to every row's largest, and this one, ``(b, num_rows)``."""
    top = terms.evidence.detach().amax(-1)
    if per_edge(rows, terms.evidence):
        top = segment(top.T, rows.ptr, reduce="max").T
        below = top.index_select(1, rows.row)
    else:
        below = top
    return terms._replace(evidence=terms.evidence - below[..., None]), top


class _Compiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, log_attention, alpha, evidence, rows, draw):
        from pyro_nmm.compiled import evidence as compiled_evidence

        terms = LatentTerms(log_attention, alpha, evidence)
        log_evidence, log_choice = compiled_evidence.evaluate(rows, terms, draw)
        ctx.save_for_backward(*terms, *draw, log_evidence)
        ctx.rows = rows
        return log_evidence, log_choice

    @staticmethod
    @once_differentiable
    def backward(ctx, to_evidence, to_choice):
        from pyro_nmm.compiled import evidence as compiled_evidence

        *terms, edges, labels, log_evidence = ctx.saved_tensors
        terms, draw = LatentTerms(*terms), LatentDraw(edges, labels)
        found = compiled_evidence.gradient(
            ctx.rows, terms, draw, log_evidence, to_evidence, to_choice
        )
        return *found, None, None


def written_out(rows: Neighborhood, num_classes: int) -> tuple[Neighborhood, Tensor]:
    """The rows with an edge for every edge and label, and the labels ``(num_edges * C,)``."""
    source = rows.source.repeat_interleave(num_classes)
    labels = torch.arange(num_classes, device=rows.device).repeat(rows.num_edges)
    arguments = rows.num_nodes, rows.nodes, rows.ptr * num_classes, source
    return Neighborhood.of_rows(*arguments, num_sources=rows.num_sources), labels


def flat_terms(rows: Neighborhood, terms: LatentTerms) -> EdgeTerms:
    """The terms of edges that are written out."""
    alpha = terms.alpha.index_select(1, rows.source)
    evidence = edge_evidence(rows, terms.evidence)
    weight = terms.log_attention[..., None] + evidence
    total = terms.alpha.sum(-1).index_select(1, rows.source)[..., None].expand_as(alpha)
    return EdgeTerms(*(t.reshape(len(t), -1) for t in (weight, alpha, total)))


def per_edge(rows: Neighborhood, evidence: Tensor) -> bool:
    """Whether evidence has an entry for every edge, and not for every row alone."""
    return evidence.shape[1] == rows.num_edges


def edge_evidence(rows: Neighborhood, evidence: Tensor) -> Tensor:
    """``(b, num_edges, C)``: the evidence of every edge."""
    return evidence if per_edge(rows, evidence) else evidence.index_select(1, rows.row)


def _predictive(rows: Neighborhood, terms: LatentTerms, draw: LatentDraw) -> tuple[Tensor, Tensor]:
    """:func:`latent_predictive` of plain tensors, on any device."""
    size, wide, labels = terms.num_classes, *written_out(rows, terms.num_classes)
    by_source, by_label = choice_groups(wide, labels[None], size, wide.row)
    edges = draw.edges * size + draw.labels
    chosen = indicator(edges, wide.num_edges)
    counts = by_label.earlier(chosen), by_source.earlier(chosen)
    return predictive(wide, flat_terms(rows, terms), Draw(edges, *counts))


def one_step_credits(
    rows: Neighborhood, terms: LatentTerms, draw: LatentDraw, predicted: Tensor
) -> Tensor:
    r"""
    What the draw :math:`(c_i, u_i) = (j, k)` changes at first hand: for the later rows that have
    :math:`j` as a neighbour, :math:`f_{i'}` minus its value without the one count at :math:`(j, k)`
    that row ``i`` added, as :func:`pyro_nmm.ops.score_costs.one_step_credits`.

    :param Tensor predicted: ``(B, num_rows)``, :math:`f_i`.
    :return: ``(B, num_rows)`` double. Cost: :math:`O(E \log E + B E C)`.
    """
    terms, top = relative(rows, LatentTerms(*(t.double() for t in terms)))
    if _compiled(rows):
        from pyro_nmm.compiled import evidence as compiled_evidence

        return compiled_evidence.credits(rows, terms, draw, predicted - top)
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
