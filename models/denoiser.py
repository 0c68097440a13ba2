# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from pyro_nmm import LogisticConcentrations, Neighborhood
from pyro_nmm.concentrations import Concentrations, OrderedConcentrations, at_labels, totals
from pyro_nmm.models.networks import attention_scores
from pyro_nmm.models.unet import UNet
from pyro_nmm.sparse import sparse_csr
from pyro_nmm.validation import check_label_range, check_labels, check_shapes

#: Pixels whose distributions are written out at once.
STRIP = 2048


class Denoiser(nn.Module):
    r"""
    An NMM over the pixels of an image on a U-Net, section 5.2 and appendix C of the paper. With
    the U-Net's image :math:`u` and, by two-layer networks from its features, vectors :math:`v` and
    widths :math:`\sigma`,

    .. math::

        \alpha_i = \text{LogisticConcentrations}(u_i, \sigma_i, s), \qquad
        \text{logits}_{ij} = \omega^2 \frac{v_i^\top v_j}{\|v_i\| \|v_j\|}
                             + \gamma \, \delta(i = j) .

    The paper has one width for all pixels (``spread=False``), a fixed :math:`\gamma = 5` and
    ``concentrations=GaussianConcentrations``. The network maps ``(hood, noisy)`` with images
    ``(B, channels, H, W)`` to ``alpha`` and ``logits``. Color channels are a batch dimension, and
    share the attention.

    >>> network = Denoiser(UNet(width=8, depth=2))
    >>> hood = Neighborhood.grid(6, 7)
    >>> alpha, logits = network(hood, 255 * torch.rand(2, 3, 6, 7))
    >>> alpha.shape, logits.shape == (2, 1, hood.num_edges)
    (torch.Size([2, 3, 42, 256]), True)

    :param UNet unet: the network; images in units of ``num_classes - 1``. One that has been fitted
        before is a good start, and may be frozen by ``unet.requires_grad_(False)``.
    :param int width: of the vectors :math:`v`.
    :param float sigma: where :math:`\sigma` starts, in grey levels.
    :param float scale: where :math:`s` starts; learned.
    :param float omega: where :math:`\omega` starts; learned.
    :param float gamma: where :math:`\gamma` starts; learned.
    :param int num_classes: ``C``, grey levels.
    :param float floor: of the concentrations.
    :param bool spread: whether pixels have widths of their own, or all the same one.
    :param concentrations: the class of ``alpha``, which says what :math:`\sigma` and :math:`s` are.
    """

    def __init__(
        self,
        unet: UNet,
        *,
        width: int = 16,
        sigma: float = 5.0,
        scale: float = 20.0,
        omega: float = 2.0,
        gamma: float = 2.0,
        num_classes: int = 256,
        floor: float = 1e-5,
        spread: bool = True,
        concentrations: type[OrderedConcentrations] = LogisticConcentrations,
    ) -> None:
        super().__init__()
        for name, value in (("sigma", sigma), ("scale", scale), ("floor", floor)):
            if not value > 0:
                raise ValueError(f"{name} must be positive, got {value}")
        if num_classes < 2 or width < 1:
            raise ValueError(
                f"num_classes must be at least 2 and width positive, got {num_classes} and {width}"
            )
        self.unet, self.num_classes, self.floor = unet, num_classes, floor
        self.concentrations = concentrations
        self.attention = _branch(unet.num_features, width)
        self.spread = _branch(unet.num_features, unet.last.out_channels) if spread else None
        if self.spread is not None:
            for parameter in self.spread[-1].parameters():
                nn.init.zeros_(parameter)
        self.log_sigma = nn.Parameter(torch.tensor(float(sigma)).log())
        self.log_scale = nn.Parameter(torch.tensor(float(scale)).log())
        self.omega = nn.Parameter(torch.tensor(float(omega)))
        self.gamma = nn.Parameter(torch.tensor(float(gamma)))

    def forward(self, hood: Neighborhood, noisy: Tensor) -> tuple[OrderedConcentrations, Tensor]:
        """
        :param Tensor noisy: ``(B, channels, H, W)``, in grey levels.
        :return: ``alpha`` of shape ``(B, channels, H W, C)``, not written out, and ``logits``
            ``(B, 1, num_edges)``.
        """
        if noisy.dim() != 4 or noisy.shape[-2] * noisy.shape[-1] != hood.num_nodes:
            raise ValueError(
                f"noisy must have shape (B, channels, H, W) with H W = {hood.num_nodes} pixels, as "
                f"hood has, got {tuple(noisy.shape)}"
            )
        top = self.num_classes - 1
        image, features = self.unet(noisy / top)
        vectors = self.attention(features).flatten(2).mT
        logits = attention_scores(hood, vectors, self.omega.square(), self.gamma)[:, None]
        log_sigma = self.log_sigma
        if self.spread is not None:
            log_sigma = log_sigma + self.spread(features).flatten(2)
        mean, scale = top * image.flatten(2), self.log_scale.exp()
        alpha = self.concentrations(mean, log_sigma.exp(), scale, self.num_classes, self.floor)
        return alpha, logits


class Prediction(NamedTuple):
    r"""
    Every pixel's own distribution, each ``(B, channels, H, W)`` in grey levels: its mean

    .. math::

        \sum_k k \, p(y_i = k)

    and the ends of an interval, which are no whole numbers. :func:`predict_pixels` makes it.

    >>> low, high = torch.zeros(1, 1, 2, 2), torch.full((1, 1, 2, 2), 10.0)
    >>> found = Prediction((low + high) / 2, low, high)
    >>> found.coverage(torch.tensor([[[[0, 5], [12, 10]]]]))
    tensor(0.5000)
    """

    mean: Tensor
    low: Tensor
    high: Tensor

    def coverage(self, y: Tensor) -> Tensor:
        r"""
        The share of labels ``(B, channels, H, W)`` that lie in their intervals, where a label
        ``k`` on an end counts by how much of ``k - 0.5`` to ``k + 0.5`` is inside. Labels that
        follow their distributions are covered as often as the interval's ``level`` says.

        >>> low, high = torch.tensor([3.25, 0.0, 5.0]), torch.tensor([4.5, 9.0, 7.0])
        >>> Prediction((low + high) / 2, low, high).coverage(torch.tensor([3, 4, 8]))
        tensor(0.4167)
        """
        inside = torch.minimum(y + 0.5, self.high) - torch.maximum(y - 0.5, self.low)
        return inside.clamp(0, 1).mean()


@torch.no_grad()
def predict_pixels(
    hood: Neighborhood,
    alpha: OrderedConcentrations,
    logits: Tensor,
    size: tuple[int, int],
    level: float = 0.9,
) -> Prediction:
    r"""
    What an NMM over pixels says of each of them alone,

    .. math::

        p(y_i = k) = \sum_{j \in n(i)} L_{ij} \frac{\alpha_{jk}}{A_j},

    in strips, so that no table of all pixels and labels is made. For the ends of the interval,
    with half of ``1 - level`` beyond each, a label ``k`` is spread over ``k - 0.5`` to ``k + 0.5``:
    whole numbers would have to cover more than ``level``; see :meth:`Prediction.coverage`.

    >>> hood = Neighborhood.grid(1, 2)
    >>> alpha = LogisticConcentrations(torch.tensor([[[50.0, 60.0]]]), width=5.0)
    >>> mean, low, high = predict_pixels(hood, alpha, torch.zeros(1, 1, 4), (1, 2))
    >>> mean[0, 0], low[0, 0], high[0, 0]
    (tensor([[55.1853, 55.1853]]), tensor([[38.2154, 38.2154]]), tensor([[71.9486, 71.9486]]))

    :param alpha: of shape ``(B, channels, H W, C)``.
    :param Tensor logits: ``(B, 1, num_edges)`` or ``(B, channels, num_edges)``.
    :param tuple size: ``(H, W)``.
    :param float level: of the interval.
    """
    check_shapes(hood, alpha, logits)
    if not isinstance(alpha, OrderedConcentrations) or len(alpha.shape) != 4:
        raise ValueError(
            f"alpha must be ordered concentrations of shape (B, channels, H W, C), got "
            f"{type(alpha).__name__} of shape {tuple(alpha.shape)}"
        )
    if size[0] * size[1] != hood.num_nodes:
        raise ValueError(f"size must be that of hood's {hood.num_nodes} pixels, got {size}")
    if not 0 < level < 1:
        raise ValueError(f"level must lie between 0 and 1, got {level}")
    attention, found = hood.softmax(logits), []
    tail, labels = (1 - level) / 2, torch.arange(alpha.num_classes, device=hood.device)
    for rows in torch.arange(hood.num_nodes, device=hood.device).split(STRIP):
        part = hood.take(rows)
        sources, place = part.source.unique(return_inverse=True)
        table = alpha.take(sources).table()
        table /= table.sum(-1, keepdim=True)
        weights = attention[..., part.edge].expand(*table.shape[:-2], -1)
        pairs = zip(weights.flatten(0, -2), table.flatten(0, -3), strict=True)
        strip = len(rows), len(sources)
        mixed = [sparse_csr(part.ptr, place, w, strip) @ each for w, each in pairs]
        probs = torch.stack(mixed).view(*table.shape[:-2], len(rows), -1)
        ends = _quantiles(probs, torch.tensor([tail, 1 - tail]).to(probs))
        found.append(torch.stack([(probs * labels).sum(-1), *ends.unbind(-1)]))
    return Prediction(*torch.cat(found, -1).unflatten(-1, size))


def pixel_log_probs(hood: Neighborhood, alpha: Concentrations, logits: Tensor, y: Tensor) -> Tensor:
    r"""
    ``(..., N)``: :math:`\log p(y_i) = \log \sum_{j \in n(i)} L_{ij} \alpha_{j y_i} / A_j` of every
    pixel alone, in nats. Cost: :math:`O(E)`, and :math:`O(N C)` for the sums.

    >>> hood = Neighborhood.grid(1, 2)
    >>> alpha = LogisticConcentrations(torch.tensor([50.0, 60.0]), width=5.0)
    >>> pixel_log_probs(hood, alpha, torch.zeros(4), torch.tensor([50, 50]))
    tensor([-3.3409, -3.3409])

    :param alpha: of shape ``(..., N, C)``.
    :param Tensor logits: ``(..., num_edges)``.
    :param Tensor y: ``(..., N)`` labels.
    """
    check_shapes(hood, alpha, logits)
    check_labels(hood, y, hood.num_nodes)
    check_label_range(hood, y, alpha.shape[-1])
    probs = at_labels(alpha, hood.source, y.index_select(-1, hood.row))
    probs = probs / totals(alpha).index_select(-1, hood.source)
    return hood.sum(hood.softmax(logits) * probs).log()


def _quantiles(probs: Tensor, levels: Tensor) -> Tensor:
    """``(..., Q)``: of labels ``(..., C)``, each spread over one unit, at levels ``(Q,)``."""
    below = probs.cumsum(-1)
    levels = levels.expand(*probs.shape[:-1], -1).contiguous()
    label = torch.searchsorted(below, levels).clamp(max=probs.shape[-1] - 1)
    part = 1 - (below.gather(-1, label) - levels) / probs.gather(-1, label)
    return label - 0.5 + part.clamp(0, 1)


def _branch(features: int, channels: int) -> nn.Sequential:
    hidden = nn.Conv2d(features, features, 1)
    return nn.Sequential(hidden, nn.LeakyReLU(0.1), nn.Conv2d(features, channels, 1))
