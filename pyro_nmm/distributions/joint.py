# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

r"""The joint log-probability of labels and choices, with label distributions integrated out,

.. math::

    \log p(y, c \mid \alpha, L) = \sum_i \log L_{i c_i}
        + \log \frac{\alpha_{c_i y_i} + s_i}{A_{c_i} + S_i} ,

where :math:`s_i` counts the earlier rows that chose the source :math:`c_i` with the same label, and
:math:`S_i` with any.
"""

from typing import Any

import torch
from torch import Size, Tensor
from torch.autograd.function import once_differentiable

from pyro_nmm.distributions.base import flatten
from pyro_nmm.distributions.parameters import Parameters
from pyro_nmm.ops.entries import Draw


class LogJoint:
    """The sum over a batch, as a function of choices and labels ``(..., n)`` of the rows of
    ``parameters``, in double precision, differentiable in these. Cost: :math:`O(E)` to make, and
    :math:`O(E + N C)` with little work for each edge, for each of the parameters' batch; and
    :math:`O(n)` for each labelling."""

    def __init__(self, parameters: Parameters, batch_shape: Size) -> None:
        self.rows, self.shape = parameters.hood, batch_shape
        log_attention = self.rows.log_softmax(parameters.plain.logits)
        self.alpha, self.logits, self.log_attention = (
            flatten(part, batch_shape, dim)
            for part, dim in ((parameters.alpha, 2), (parameters.logits, 1), (log_attention, 1))
        )
        self._attention = self.log_attention.exp()

    def __call__(self, choices: Tensor, labels: Tensor) -> Tensor:
        flat = flatten(choices, self.shape).expand(self.shape.numel(), -1)

        def find() -> tuple[Tensor, None]:
            return self.rows.find(flat), None

        edges, _ = self.rows.last_edges.get((choices, self.shape), find)
        return self._of(edges, flatten(labels, self.shape), None)

    def average(self, draws: list[Draw], shares: Tensor) -> Tensor:
        """The same of the mean over draws after each of several sweeps, with ``shares`` ``(B, e)``,
        the mean probabilities of edges, in place of the edges that these chose."""
        edges, labels = (torch.cat(parts) for parts in zip(*(d[:2] for d in draws), strict=True))
        whole = shares if len(self.logits) > 1 else shares.sum(0, keepdim=True)
        return self._of(edges, labels, whole * len(draws)) / len(draws)

    def _of(self, *given: Any) -> Tensor:
        return _LogJoint.apply(
            self.alpha, self.logits, self.log_attention, self._attention, self.rows, *given
        )


class _LogJoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, alpha: Tensor, logits: Tensor, *given: Any) -> Tensor:
        from pyro_nmm.compiled.joint import joint

        value, of_alpha, of_logits = joint(alpha, *given)
        ctx.save_for_backward(of_alpha.to(alpha), of_logits.to(logits))
        return value.to(alpha.device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> Any:
        of_alpha, of_logits = (saved * slope.to(saved) for saved in ctx.saved_tensors)
        return of_alpha, of_logits, *[None] * 6
