# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Temperature scaling that is averaged over the posterior of the temperature."""

import torch
from torch import Tensor
from torch.nn import functional as F


def temperature_posterior(held_out: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    r"""
    Temperatures and their probabilities, ``(61,)`` each, on a grid between :math:`e^{-3}` and
    :math:`e^3`,

    .. math::

        p(t) \propto \mathcal N(\log t; 0, 1) \prod_i \mathrm{softmax}(x_i / t)_{y_i} .

    :param Tensor held_out: ``(n, C)`` scores :math:`x` of rows with labels ``y``, ``(n,)``, that
        the classifier has not seen.
    """
    temperatures = torch.linspace(-3, 3, 61).exp()
    loss = [F.cross_entropy(held_out / t, y, reduction="sum") for t in temperatures]
    return temperatures, (-torch.stack(loss) - temperatures.log().square() / 2).softmax(0)


def averaged_temperature(scores: Tensor, posterior: tuple[Tensor, Tensor]) -> Tensor:
    r"""
    Label probabilities ``(N, C)`` of scores ``(N, C)``, :math:`\sum_t p(t) \, \mathrm{softmax}
    (\text{scores} / t)`, because a few labels do not determine one temperature.

    >>> x, y = torch.tensor([[2.0, 0.0]]).repeat(4, 1), torch.tensor([0, 0, 0, 1])
    >>> found = averaged_temperature(x, temperature_posterior(x, y))[0]  # maximum: 0.75
    >>> 0.75 < found[0] < 0.85
    tensor(True)

    :param posterior: of :func:`temperature_posterior`.
    """
    found = torch.zeros_like(scores)
    for t, weight in zip(*posterior, strict=True):
        if weight > 1e-6:
            found += weight * (scores / t).softmax(1)
    return found / found.sum(1, keepdim=True)
