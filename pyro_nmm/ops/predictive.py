# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

import torch
from pyro.ops.provenance import track_provenance
from torch import Tensor
from torch.autograd.function import once_differentiable

from pyro_nmm.neighborhood import Neighborhood
from pyro_nmm.ops.sampling import Draw, EdgeTerms
from pyro_nmm.provenance import untracked


class _Predictive(torch.autograd.Function):
    # The counts are constants, so the whole sequence is one sum over edges. Its derivative is
    # written down, because autograd's tape would cost about twice as much.

    @staticmethod
    def forward(ctx, log_attention, alpha, total, edges, same_label, any_label, rows):
        attention = log_attention.exp()
        below = total + any_label
        odds = (alpha + same_label).div_(below)
        log_label = rows.sum(attention * odds).log()
        at_choice = log_attention.expand(len(edges), -1).gather(1, edges)
        log_choice = odds.gather(1, edges).log_().add_(at_choice).sub_(log_label)
        ctx.save_for_backward(attention, odds, below, edges, log_label)
        ctx.rows, ctx.shared = rows, [len(t) == 1 for t in (log_attention, alpha, total)]
        return log_label, log_choice

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_label, grad_choice):
        attention, odds, below, edges, log_label = ctx.saved_tensors
        # d log_label is the mean of d log(weight) under the row's weights, and log_choice is
        # log(weight) at the chosen edge minus log_label. In place: fresh memory costs more than
        # arithmetic.
        share = (grad_label - grad_choice).mul_((-log_label).exp_())
        to_alpha = share.index_select(1, ctx.rows.row).mul_(attention)
        to_attention = (to_alpha * odds).scatter_add_(1, edges, grad_choice)
        above = odds.gather(1, edges) * below.gather(1, edges)
        to_alpha.div_(below).scatter_add_(1, edges, grad_choice / above)
        to_total = (to_attention / below).neg_()
        grads = zip((to_attention, to_alpha, to_total), ctx.shared, strict=True)
        return *(g.sum(0, keepdim=True) if one else g for g, one in grads), *[None] * 4


def predictive(rows: Neighborhood, terms: EdgeTerms, draw: Draw) -> tuple[Tensor, Tensor]:
    r"""
    ``(B, num_rows)`` twice: log-probabilities of labels, and of choices given their labels, both
    given the earlier rows:

    .. math::

        f_i = \log p(y_i \mid y_{<i}, c_{<i})
            = \log \sum_{j \in n(i)} L_{ij}
              \frac{\alpha_{j y_i} + s_{ij}}{A_j + S_{ij}}, \qquad
        \log p(c_i \mid y_i, y_{<i}, c_{<i})
            = \log L_{i c_i} + \log \frac{\alpha_{c_i y_i} + s_{i c_i}}{A_{c_i} + S_{i c_i}} - f_i .

    Differentiable in ``terms``. Cost: :math:`O(B E)`, forward and backward.
    """
    plain, provenance = untracked(*terms)
    label, choice = _Predictive.apply(*plain, *draw, rows)
    return track_provenance(label, provenance), track_provenance(choice, provenance)
