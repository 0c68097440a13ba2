# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Log-probabilities of draws, and of labels or observations given earlier rows."""

import torch
from pyro.ops.provenance import track_provenance
from torch import Tensor
from torch.autograd.function import once_differentiable

from pyro_nmm import backend
from pyro_nmm.neighborhood import Neighborhood
from pyro_nmm.ops.entries import Draw, Entries, Wide, relative
from pyro_nmm.provenance import untracked


class _Predictive(torch.autograd.Function):
    # The counts are constants, so the whole sequence is one sum over entries. Its derivative is
    # written down, because autograd's tape would cost about twice as much.

    @staticmethod
    def forward(ctx, log_weight, alpha, total, numbers, same_label, any_label, rows):
        weight = log_weight.exp()
        below = total + any_label
        odds = (alpha + same_label).div_(below)
        predicted = rows.sum(weight * odds).log()
        at_choice = log_weight.expand(len(numbers), -1).gather(1, numbers)
        log_choice = odds.gather(1, numbers).log_().add_(at_choice).sub_(predicted)
        ctx.save_for_backward(weight, odds, below, numbers, predicted)
        ctx.rows, ctx.shared = rows, [len(t) == 1 for t in (log_weight, alpha, total)]
        return predicted, log_choice

    @staticmethod
    @once_differentiable
    def backward(ctx, to_predicted, to_choice):
        weight, odds, below, numbers, predicted = ctx.saved_tensors
        # d predicted is the mean of d log(weight) under the row's weights, and log_choice is
        # log(weight) at the chosen entry minus predicted. In place: fresh memory costs more than
        # arithmetic.
        share = (to_predicted - to_choice).mul_((-predicted).exp_())
        to_alpha = share.index_select(1, ctx.rows.row).mul_(weight)
        to_weight = (to_alpha * odds).scatter_add_(1, numbers, to_choice)
        above = odds.gather(1, numbers) * below.gather(1, numbers)
        to_alpha.div_(below).scatter_add_(1, numbers, to_choice / above)
        to_total = (to_weight / below).neg_()
        grads = zip((to_weight, to_alpha, to_total), ctx.shared, strict=True)
        return *(g.sum(0, keepdim=True) if one else g for g, one in grads), *[None] * 4


class _Compiled(torch.autograd.Function):
    # The derivative by ``alpha`` includes the one by its total.

    @staticmethod
    def forward(ctx, log_attention, alpha, evidence, total, rows, draw, loops):
        entries = Entries(log_attention, alpha, total, evidence, alpha.shape[-1])
        predicted, log_choice = loops.evaluate(rows, entries, draw)
        ctx.save_for_backward(*entries[:4], *draw[:2], predicted)
        ctx.rows, ctx.loops = rows, loops
        return predicted, log_choice

    @staticmethod
    @once_differentiable
    def backward(ctx, to_predicted, to_choice):
        *tensors, edges, labels, predicted = ctx.saved_tensors
        entries = Entries(*tensors, tensors[1].shape[-1])
        inputs = entries, Draw(edges, labels), predicted, to_predicted, to_choice
        return *ctx.loops.gradient(ctx.rows, *inputs), *[None] * 4


def predictive(rows: Neighborhood, entries: Entries, draw: Draw) -> tuple[Tensor, Tensor]:
    r"""
    ``(B, num_rows)`` twice: log-probabilities of labels or observations, and of draws, both given
    the earlier rows:

    .. math::

        f_i = \log \sum_{j \in n(i)} \frac{L_{ij}}{A_j + S_{ij}}
              \sum_k (\alpha_{jk} + s_{ijk}) e^{e_{ijk}} , \qquad
        \log q(c_i, u_i \mid \cdot)
            = \log \frac{L_{i c_i} (\alpha_{c_i u_i} + s_{i c_i u_i})}{A_{c_i} + S_{i c_i}}
              + e_{i c_i u_i} - f_i .

    Differentiable in ``entries``. Cost: :math:`O(B E K)`, forward and backward.
    """
    plain, provenance = untracked(*entries)
    entries, top = relative(rows, Entries(*plain))
    loops = None if entries.observed else backend.loops_on(rows.device)
    if loops:
        inputs = entries.log_attention, entries.alpha, entries.data, entries.total.detach()
        predicted, choice = _Compiled.apply(*inputs, rows, draw, loops)
    else:
        predicted, choice = _by_tensors(rows, entries, draw)
    predicted = predicted if entries.observed else predicted + top
    return track_provenance(predicted, provenance), track_provenance(choice, provenance)


def _by_tensors(rows: Neighborhood, entries: Entries, draw: Draw) -> tuple[Tensor, Tensor]:
    wide = Wide(rows, entries)
    numbers = wide.numbers(draw)
    counts = draw.counts or wide.groups.earlier(wide.chosen(numbers))
    return _Predictive.apply(wide.log_weight, wide.alpha, wide.total, numbers, *counts, wide.rows)
