# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The NMM over the pixels of an image."""

import torch
from torch import Tensor, nn

from pyro_nmm import LogisticConcentrations, Neighborhood
from pyro_nmm.arguments import check_each_call, check_finite, check_integers, check_positive, expect
from pyro_nmm.concentrations import OrdinalConcentrations
from pyro_nmm.models.images.unet import UNet
from pyro_nmm.models.networks import attention_scores


class Denoiser(nn.Module):
    r"""
    An NMM over the pixels of an image on a U-Net, section 5.2 and appendix C of the paper. With
    the U-Net's image :math:`u`, and vectors :math:`v` and widths :math:`\sigma` by two-layer
    networks from its features,

    .. math::

        \alpha_i = \text{LogisticConcentrations}(u_i, \sigma_i, s), \qquad
        \text{logits}_{ij} = \omega^2 \frac{v_i^\top v_j}{\|v_i\| \|v_j\|}
                             + \gamma \, \delta(i = j) .

    The paper has one width for all pixels (``spread=False``), a fixed :math:`\gamma = 5` and
    ``concentrations=GaussianConcentrations``. Color channels of images ``(B, channels, H, W)``
    share the attention.

    >>> network = Denoiser(UNet(width=8, depth=2))
    >>> alpha, logits = network(Neighborhood.grid(6, 7), 255 * torch.rand(2, 3, 6, 7))
    >>> alpha.shape
    torch.Size([2, 3, 42, 256])

    :param UNet unet: best fitted before; may be frozen by ``unet.requires_grad_(False)``.
    :param int width: of the vectors :math:`v`.
    :param float sigma: initial :math:`\sigma`, in grey levels.
    :param float scale: initial :math:`s`, and likewise ``omega`` and ``gamma``. All are learned.
    :param int num_classes: ``C``, the number of grey levels.
    """

    def __init__(
        self, unet: UNet, *, width: int = 16, sigma: float = 5.0, scale: float = 20.0,
        omega: float = 2.0, gamma: float = 2.0, num_classes: int = 256, floor: float = 1e-5,
        spread: bool = True,
        concentrations: type[OrdinalConcentrations] = LogisticConcentrations,
    ) -> None:  # fmt: skip
        super().__init__()
        check_positive(sigma=sigma, scale=scale, floor=floor)
        check_finite(omega=omega, gamma=gamma)
        check_integers(2, num_classes=num_classes)
        check_integers(1, width=width)
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

    def forward(self, hood: Neighborhood, noisy: Tensor) -> tuple[OrdinalConcentrations, Tensor]:
        """``alpha`` and ``logits`` ``(B, 1, num_edges)`` of images ``(B, channels, H, W)``."""
        expect("noisy", noisy, (("B", 1), "channels", "H", "W"))
        check_each_call("noisy", noisy)
        if noisy.shape[-2] * noisy.shape[-1] != hood.num_nodes:
            must = f"(B, channels, H, W) with H W = {hood.num_nodes} pixels, as hood has"
            raise ValueError(f"noisy must have shape {must}, got {tuple(noisy.shape)}")
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


def _branch(features: int, channels: int) -> nn.Sequential:
    hidden = nn.Conv2d(features, features, 1)
    return nn.Sequential(hidden, nn.LeakyReLU(0.1), nn.Conv2d(features, channels, 1))
