# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

r"""A lower bound on the entropy of a Neighbor Mixture Model, and its gradient.

The bound is :math:`E_{p(y, c)} \sum_i h_i` with :math:`h_i = H(p(y_i \mid y_{<i}, c_{<i}))`. Row
:math:`i` draws choice and label :math:`(j, k)` with probability
:math:`\pi_i(j, k) = L_{ij} m_{ijk}`, which adds a count at :math:`(j, k)`.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.special import entr

from pyro_nmm import compiled
from pyro_nmm.model_arguments import order_to_rows
from pyro_nmm.neighborhood import Neighborhood
from pyro_nmm.ops.counts import Groups, indicator
from pyro_nmm.ops.sampling import draw_given_choices, pick, uniforms_of


def entropy_bound(
    hood: Neighborhood, alpha: Tensor, logits: Tensor, num_samples: int, order: Tensor | None
) -> Tensor:
    """``(num_samples,)``: see :meth:`NeighborMixture.entropy_bound`."""
    rows = hood if order is None else hood.take(order_to_rows(hood, order))
    attention = rows.softmax(logits.index_select(-1, rows.edge))
    with torch.no_grad():
        edges = pick(rows, attention.expand(num_samples, -1), uniforms_of(rows, num_samples))
        labels = draw_given_choices(alpha, rows.source[edges])
    return entropy_samples(rows, alpha, attention, edges, labels)


def entropy_samples(
    rows: Neighborhood, alpha: Tensor, attention: Tensor, edges: Tensor, labels: Tensor
) -> Tensor:
    r"""``(B,)``: :math:`\sum_i h_i` for drawn edges and labels ``(B, num_rows)``. The gradient is
    :math:`\sum_i \nabla h_i + \sum_{ijk} \nabla \pi_i(j, k) \, D_i(j, k)`, with :math:`D_i(j, k)`
    the direct effect of one count on later :math:`h`. Cost: :math:`O(B E C^2)`, without gradients
    :math:`O(B E C)`."""
    derives = torch.is_grad_enabled() and (alpha.requires_grad or attention.requires_grad)
    if compiled.runs_on(rows.device):
        from pyro_nmm.compiled.loops import entropy

        inputs = alpha, attention, rows, edges, labels
        return _Compiled.apply(*inputs) if derives else entropy(*inputs)[0]
    groups = Groups(rows.source[None], rows.num_sources)
    concentration = alpha.T.index_select(1, rows.source)  # (C, E), as all that follows
    classes = torch.arange(len(concentration), device=rows.device)
    chosen = indicator(edges, rows.num_edges)[:, None]
    chosen = chosen * (labels.index_select(1, rows.row)[:, None] == classes[:, None])
    counts = _over_edges(groups.earlier, chosen)
    above, below = concentration + counts, concentration.sum(0) + counts.sum(1, keepdim=True)
    mean = above / below
    probs = rows.sum(attention * mean)
    bound = entr(probs).sum((1, 2))
    if not derives:
        return bound
    with torch.no_grad():
        now = attention, mean, above, below, probs.index_select(2, rows.row)
        credit = _expected_credit(groups, chosen, counts, *now)
    score = (attention * mean * credit).sum((1, 2))
    # The score may be far larger than the bound: subtract it from itself first.
    return bound + (score - score.detach())


class _Compiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, alpha, attention, rows, edges, labels):
        from pyro_nmm.compiled.loops import entropy

        inputs = alpha, attention, rows, edges, labels
        bound, *gradients = entropy(*inputs, slopes=True)
        ctx.save_for_backward(*gradients)
        return bound

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        to_attention, to_alpha = ctx.saved_tensors
        return torch.tensordot(grad, to_alpha, 1), grad @ to_attention, None, None, None


def _expected_credit(groups, chosen, counts, attention, mean, above, below, probs) -> Tensor:
    """``(B, C, E)``: the direct effect of one count on later rows, beside the row's own count."""
    credit = _over_edges(groups.later, _added(attention, mean, below, probs))
    for k in range(counts.shape[1]):
        # Later rows without the count of a row that chose this edge with label k. Without such a
        # row, the value is not used.
        there = counts[:, k : k + 1] > 0
        fewer = above.clone()
        fewer[:, k : k + 1] -= there.to(fewer)
        total = below - there.to(below)
        without = fewer / total
        changed = probs + attention * (without - mean)
        later = _over_edges(groups.later, _added(attention, without, total, changed))
        credit = later.where(chosen[:, k : k + 1].bool(), credit)
    return credit


def _added(attention: Tensor, mean: Tensor, below: Tensor, probs: Tensor) -> Tensor:
    """``(B, C, E)``: the change of a row's entropy when its edge gets one more count of ``k``."""
    weight = attention / (below + 1)
    rest = (probs - weight * mean).clamp(min=0)
    parts = entr(rest)
    return (parts - entr(probs)).sum(1, keepdim=True) - parts + entr(rest + weight)


def _over_edges(sums, values: Tensor) -> Tensor:
    return sums(values.flatten(end_dim=1)).view_as(values)
