# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

r"""
A lower bound on the entropy of a Neighbor Mixture Model, and its gradient.

Rows draw label and choice in turn, given the counts that earlier rows have left. Summing out
the label of each row at its own step,

.. math::

    H(y) \;\ge\; E_{p(y, c)} \sum_i h_i, \qquad
    h_i = H\big(p(y_i \mid y_{<i}, c_{<i})\big),

with equality where choices are certain. A pair of label and choice :math:`(k, j)` of row
:math:`i` has the probability :math:`\pi_i(j, k) = L_{ij} m_{ijk}`, and leaves one count at
:math:`(j, k)` for the rows after it.
"""

from enum import StrEnum

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.special import entr

from pyro_nmm import backend
from pyro_nmm.neighborhood import Neighborhood
from pyro_nmm.ops.counts import Groups, indicator
from pyro_nmm.ops.label_draws import draw_given_choices
from pyro_nmm.ops.sampling import pick
from pyro_nmm.ops.score_costs import costs_to_go, others_mean
from pyro_nmm.validation import order_to_rows


class EntropyEstimator(StrEnum):
    """What a draw is charged with in the gradient, see :meth:`NeighborMixture.entropy_bound`."""

    REWARD_TO_GO = "reward_to_go"  #: unbiased
    ONE_STEP_CREDIT = "one_step_credit"  #: nearly so, with far less variance


def entropy_bound(
    hood: Neighborhood,
    alpha: Tensor,
    logits: Tensor,
    num_samples: int,
    estimator: EntropyEstimator,
    order: Tensor | None,
) -> Tensor:
    """``(num_samples,)``: see :meth:`NeighborMixture.entropy_bound`."""
    rows = hood if order is None else hood.take(order_to_rows(hood, order))
    attention = rows.softmax(logits.index_select(-1, rows.edge))
    component = None
    if estimator is EntropyEstimator.REWARD_TO_GO:
        component = hood.components().index_select(0, rows.nodes)
    with torch.no_grad():
        uniforms = torch.rand(num_samples, rows.num_rows, dtype=torch.double, device=rows.device)
        edges = pick(rows, attention.expand(num_samples, -1), uniforms)
        labels = draw_given_choices(alpha, rows.source[edges])
    return entropy_samples(rows, alpha, attention, edges, labels, component)


def entropy_samples(
    rows: Neighborhood,
    alpha: Tensor,
    attention: Tensor,
    edges: Tensor,
    labels: Tensor,
    component: Tensor | None,
) -> Tensor:
    r"""
    :math:`\sum_i h_i` for given draws, with a derivative whose mean is the gradient of the
    bound.

    .. math::

        \nabla \, \approx \sum_i \nabla h_i + \sum_i \sum_{j, k} \nabla \pi_i(j, k) \, D_i(j, k)

    With ``component``, the second sum is over the pairs that were drawn alone, with
    :math:`\nabla \log \pi_i` and, for :math:`D_i`, the sum of :math:`h` over later rows of the
    component less its mean over the other draws: unbiased. Without, :math:`D_i(j, k)` is what one
    count at :math:`(j, k)` changes in later :math:`h` at first hand, for every pair that could
    have been drawn.

    :param Neighborhood rows: all rows, in the order of the draw.
    :param Tensor alpha: ``(N, C)``.
    :param Tensor attention: ``(num_edges,)``, :math:`L_{ij}` in the order of ``rows``.
    :param Tensor edges: ``(B, num_rows)`` chosen edges.
    :param Tensor labels: ``(B, num_rows)``.
    :param Tensor component: ``(num_rows,)`` from :meth:`Neighborhood.components`.
    :return: ``(B,)``. Cost: :math:`O(B E C)` with ``component``, else :math:`O(B E C^2)`.
    """
    if component is None and backend.compiled and rows.device.type == "cpu":
        return _Compiled.apply(alpha, attention, rows, edges, labels)
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
    joint = attention * mean
    if component is None:
        with torch.no_grad():
            now = attention, mean, above, below, probs.index_select(2, rows.row)
            credit = _expected_credit(groups, chosen, counts, *now)
        score = (joint * credit).sum((1, 2))
    else:
        with torch.no_grad():
            costs = costs_to_go(component, entr(probs).sum(1))
            baseline = others_mean(costs, [0])
            costs = (costs if baseline is None else costs - baseline).to(probs)
        drawn = joint.gather(2, edges[:, None].expand(-1, len(classes), -1))
        score = (drawn.gather(1, labels[:, None])[:, 0].log() * costs).sum(1)
    # The score may be larger by far than the bound: first of all it has to be taken from itself.
    return bound + (score - score.detach())


class _Compiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, alpha, attention, rows, edges, labels):
        assert backend.compiled is not None
        tables = backend.compiled.entropy_and_gradient(rows, alpha, attention, edges, labels)
        bound, *gradients = tables
        ctx.save_for_backward(*gradients)
        return bound

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        to_attention, to_alpha = ctx.saved_tensors
        return torch.tensordot(grad, to_alpha, 1), grad @ to_attention, None, None, None


def _expected_credit(
    groups: Groups,
    chosen: Tensor,
    counts: Tensor,
    attention: Tensor,
    mean: Tensor,
    above: Tensor,
    below: Tensor,
    probs: Tensor,
) -> Tensor:
    r"""
    ``(B, C, E)``: what one count at :math:`(j, k)` would change in the :math:`h` of later rows
    at first hand, for each choice and label that the row of an edge could draw. Its own count is
    taken out first.
    """
    credit = _over_edges(groups.later, _added(attention, mean, below, probs))
    for k in range(counts.shape[1]):
        # A row that chose this edge with label k compares with later rows without its count. Where
        # no row chose it, the value is not used.
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
    change = (parts - entr(probs)).sum(1, keepdim=True)
    return change - parts + entr(rest + weight)


def _over_edges(sums, values: Tensor) -> Tensor:
    """Sums over earlier or later edges of the same source, for each class."""
    return sums(values.flatten(end_dim=1)).view_as(values)
