# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Inner products of the vectors at the ends of edges."""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pyro_nmm.blocks import blocks, for_rows


class _EdgeProducts(torch.autograd.Function):
    # Autograd's tape would keep two (E, H) tables. They are gathered again instead, in blocks.

    @staticmethod
    def forward(v, target, source):
        products, v = v.new_empty(len(source)), for_rows(v)
        for part in blocks(len(source), v.shape[1], cached=v.device.type == "cpu"):
            ends = v.index_select(0, target[part]), v.index_select(0, source[part])
            products[part] = ends[0].mul_(ends[1]).sum(-1)
        return products

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        v, target, source = ctx.saved_tensors
        to_v, v = torch.zeros_like(v), for_rows(v)
        for part in blocks(len(source), v.shape[1], cached=v.device.type == "cpu"):
            ends, slope = (target[part], source[part]), grad[part, None]
            for nodes, others in (ends, ends[::-1]):
                to_v.index_add_(0, nodes, v.index_select(0, others).mul_(slope))
        return to_v, None, None


def edge_products(v: Tensor, target: Tensor, source: Tensor) -> Tensor:
    r"""``(E,)``: :math:`v_i^\top v_j` of vectors ``(N, H)`` for every edge, in ``O(E)`` memory."""
    return _EdgeProducts.apply(v, target, source)
