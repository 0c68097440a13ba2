# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Temperature scaling that is averaged over the posterior of the temperature."""

import torch
from torch import Tensor
from torch.nn import functional as F


def averaged_temperature(scores: Tensor, held_out: Tensor, y: Tensor) -> Tensor:
    r"""
    Label probabilities ``(N, C)`` of scores ``(N, C)``,

    .. math::

        \sum_t p(t) \, \mathrm{softmax}(\text{scores} / t), \qquad
        p(t) \propto \mathcal N(\log t; 0, 1) \prod_i \mathrm{softmax}(x_i / t)_{y_i},

    on a grid of 61 temperatures between :math:`e^{-3}` and :math:`e^3`, because a few labels do not
    determine one.

    >>> x, y = torch.tensor([[2.0, 0.0]]).repeat(4, 1), torch.tensor([0, 0, 0, 1])
    >>> found = averaged_temperature(x, x, y)[0]  # of the maximum alone: 0.75
    >>> 0.75 < found[0] < 0.85
    tensor(True)

    :param Tensor held_out: ``(n, C)`` scores :math:`x` of rows with labels ``y``, ``(n,)``, that
        the classifier has not seen.
    """
    temperatures = torch.linspace(-3, 3, 61).exp()
    loss = [F.cross_entropy(held_out / t, y, reduction="sum") for t in temperatures]
    weights = (-torch.stack(loss) - temperatures.log().square() / 2).softmax(0)
    found = torch.zeros_like(scores)
    for weight, t in zip(weights, temperatures, strict=True):
        if weight > 1e-6:
            found += weight * (scores / t).softmax(1)
    return found / found.sum(1, keepdim=True)
