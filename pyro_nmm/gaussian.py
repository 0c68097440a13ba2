# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The paper's concentrations of grey levels."""

from __future__ import annotations

import torch
from pyro.ops.provenance import track_provenance
from torch import Tensor
from torch.autograd.function import once_differentiable

from pyro_nmm import backend
from pyro_nmm.concentrations import OrderedConcentrations
from pyro_nmm.tracking import untracked

#: Labels that are summed at once.
CHUNK = 16


class GaussianConcentrations(OrderedConcentrations):
    r"""
    Concentrations :math:`\alpha` for ordered labels such as grey levels, highest around a mean:

    .. math::

        \alpha_{ik} = s_i \exp\left(-\frac{(k - u_i)^2}{\sigma_i^2}\right) + \epsilon,
        \qquad k = 0, \dots, C - 1

    as in the paper's appendix C; the floor :math:`\epsilon` is ours. Labels beyond the ends are
    missing, so that near 0 and ``C - 1`` the mean label is not :math:`u`.

    >>> alpha = GaussianConcentrations(torch.tensor([3.0, 200.0]), width=10.0)
    >>> alpha.shape
    torch.Size([2, 256])
    >>> alpha.totals()
    tensor([12.2296, 17.7271])

    Cost: :math:`O(N C)` time for the sums, :math:`O(N)` memory, also with gradients. Compiled
    loops skip labels far from the mean.

    :param Tensor mean: ``(..., N)``, :math:`u`, in units of labels; any real number.
    :param width: :math:`\sigma`, positive: a number or a tensor that broadcasts to ``mean``.
    :param scale: :math:`s`, positive, as ``width``. With :math:`\sigma` it makes
        :math:`A_i \approx s_i \sigma_i \sqrt\pi`, how many labels of neighbours outweigh the mean.
    :param int num_classes: ``C``.
    :param float floor: :math:`\epsilon`, positive.
    """

    def peak(self, labels: Tensor, mean: Tensor, width: Tensor) -> Tensor:
        return (-((labels - mean) / width).square()).exp()

    def totals(self) -> Tensor:
        (mean, width), provenance = untracked(self.mean, self.width)
        bumps = track_provenance(_Total.apply(mean, width, self.num_classes), provenance)
        return self.scale * bumps + self.floor * self.num_classes


@torch.no_grad()
def _sums(mean: Tensor, width: Tensor, num_classes: int) -> tuple[Tensor, Tensor, Tensor]:
    r"""Of :math:`f_k = \exp(-(k - u)^2 / \sigma^2)`, of :math:`(k - u) f_k` and of its square's."""
    if backend.compiled is not None and mean.device.type == "cpu":
        return backend.compiled.gaussian_sums(mean, width.expand(mean.shape), num_classes)
    zero = torch.zeros_like(mean)
    totals = [zero, zero, zero]
    for labels in torch.arange(num_classes, device=mean.device).split(CHUNK):
        gap = labels - mean[..., None]
        bumps = (-(gap / width.expand(mean.shape)[..., None]).square()).exp()
        parts = bumps, gap * bumps, gap.square() * bumps
        totals = [total + part.sum(-1) for total, part in zip(totals, parts, strict=True)]
    return totals[0], totals[1], totals[2]


class _Total(torch.autograd.Function):
    """The sum over all labels; what its gradient needs is summed along with it."""

    @staticmethod
    def forward(ctx, mean: Tensor, width: Tensor, num_classes: int) -> Tensor:
        total, first, second = _sums(mean, width, num_classes)
        ctx.save_for_backward(first, second, width)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream: Tensor):
        first, second, width = ctx.saved_tensors
        to_mean = upstream * 2 * first / width.square()
        to_width = upstream * 2 * second / width.pow(3)
        return to_mean, to_width.sum_to_size(width.shape), None
