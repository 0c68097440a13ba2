# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Concentrations of grey levels with heavier tails, and sums that need no summing."""

from __future__ import annotations

import torch
from torch import Tensor

from pyro_nmm.concentrations import OrderedConcentrations


class LogisticConcentrations(OrderedConcentrations):
    r"""
    Concentrations :math:`\alpha` for ordered labels: the mass that a logistic distribution has
    on each label's unit, as in PixelCNN++ (Salimans et al., 2017), with the tails at both ends,

    .. math::

        \alpha_{ik} = s_i \left[ F\left(\frac{k + \frac12 - u_i}{\sigma_i}\right)
            - F\left(\frac{k - \frac12 - u_i}{\sigma_i}\right) \right] + \epsilon, \qquad
        F(x) = \frac{1}{1 + e^{-x}},

    where the first term is one for ``k = C - 1`` and the second zero for ``k = 0``. Against
    :class:`GaussianConcentrations` a label's far miss costs linearly, not squared, nothing
    is missing beyond the ends, and :math:`A_i = s_i + \epsilon C`.

    >>> alpha = LogisticConcentrations(torch.tensor([3.0, 200.0]), width=5.0, scale=20.0)
    >>> alpha.shape
    torch.Size([2, 256])
    >>> alpha.at(torch.tensor([0, 1]), torch.tensor([0, 200]))
    tensor([7.5508, 0.9992])

    Cost: :math:`O(N)`.

    :param Tensor mean: ``(..., N)``, :math:`u`, in units of labels; any real number.
    :param width: :math:`\sigma`, positive: a number or a tensor that broadcasts to ``mean``. The
        standard deviation is :math:`\sigma \pi / \sqrt 3`.
    :param scale: :math:`s`, positive, as ``width``: as many labels of neighbours weigh as much.
    :param int num_classes: ``C``.
    :param float floor: :math:`\epsilon`, positive.
    """

    def peak(self, labels: Tensor, mean: Tensor, width: Tensor) -> Tensor:
        top = self.num_classes - 1
        gap = labels - mean
        # F(a) - F(b) = F(a) F(-b) (1 - exp(b - a)): no digits are lost.
        inner = ((0.5 + gap) / width).sigmoid() * ((0.5 - gap) / width).sigmoid()
        inner = inner * -torch.expm1(-1 / width)
        first, last = (0.5 - mean) / width, (mean - top + 0.5) / width
        peak = torch.where(labels == 0, first.sigmoid(), inner)
        return torch.where(labels == top, last.sigmoid(), peak)

    def totals(self) -> Tensor:
        return (self.scale + self.floor * self.num_classes).expand(self.mean.shape)
