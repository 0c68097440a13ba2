# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""An NMM over the pixels of an image, and the U-Net below it."""

import importlib
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pyro_nmm import LogisticConcentrations, Neighborhood
from pyro_nmm.arguments import check_each_call, check_finite, check_integers, check_positive, expect
from pyro_nmm.concentrations import OrdinalConcentrations
from pyro_nmm.models.networks import attention_scores


class UNet(nn.Module):
    r"""The U-Net of Lehtinen et al. (2018, "Noise2Noise", ICML): convolutions of 3 x 3 with leaky
    ReLU, ``depth`` poolings, upsampling and skip connections. Here it predicts a difference:

    .. math::

        \hat x = X + g_\theta(X)

    >>> network = UNet(width=8, depth=2)
    >>> image, features = network(torch.rand(1, 3, 10, 13))
    >>> image.shape, features.shape
    (torch.Size([1, 3, 10, 13]), torch.Size([1, 5, 10, 13]))

    Other sides are extended to multiples of :math:`2^\text{depth}` by repeating the last pixels.

    :param int channels: of images ``(B, channels, H, W)``, in units of one.
    :param int width: filters; twice as many on the way up.
    :param int tile: the side of the patches that it is fitted to. Larger images are taken in
        tiles of that side, of which the inner quarter counts: four times the work.
    """

    def __init__(self, channels: int = 3, width: int = 48, depth: int = 5, tile: int | None = None):
        super().__init__()
        check_integers(1, channels=channels, width=width, depth=depth)
        if tile is not None:
            check_integers(4, tile=tile)
            if tile % 4:
                raise ValueError(f"tile must be a multiple of 4, got {tile}")
        self.depth, self.tile, self.num_features = depth, tile, max(1, 2 * width // 3)
        self.first = _convolution(channels, width)
        self.down = nn.ModuleList(_convolution(width, width) for _ in range(depth + 1))
        self.up, below = nn.ModuleList(), width
        filters = [(width, 2 * width, 2 * width)] * (depth - 1)
        filters.append((channels, max(1, 4 * width // 3), self.num_features))
        for skipped, inside, out in filters:
            layers = _convolution(below + skipped, inside), _convolution(inside, out)
            self.up.append(nn.Sequential(*layers))
            below = out
        self.last = nn.Conv2d(self.num_features, channels, 3, padding=1)
        for parameter in self.last.parameters():
            nn.init.zeros_(parameter)

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        """Image ``(B, channels, H, W)``, and ``(B, num_features, H, W)`` of the layer before."""
        channels, note = self.last.out_channels, "UNet(channels=...) of the image's channels"
        expect("image", image, ("B", channels, "H", "W"), kind="float", note=note)
        check_each_call("image", image)
        height, width = image.shape[-2:]
        if self.tile is not None and max(height, width) > self.tile:
            return self._in_tiles(image, self.tile)
        block = 2**self.depth
        extended = F.pad(image, (0, -width % block, 0, -height % block), mode="replicate")
        skips, x = [extended], self.first(extended)
        for level, layer in enumerate(self.down):
            x = layer(x)
            if level < self.depth:
                x = F.max_pool2d(x, 2)
                skips.append(x)
        skips.pop()
        for layer in self.up:
            x = layer(torch.cat([F.interpolate(x, scale_factor=2), skips.pop()], 1))
        features = x[..., :height, :width]
        return image + self.last(x)[..., :height, :width], features

    def _in_tiles(self, image: Tensor, tile: int) -> tuple[Tensor, Tensor]:
        inner, rows = tile // 2, []

        def cuts(side: int) -> list[tuple[int, int, int]]:
            """Where the inner parts start and end, and where their tiles start."""
            last = max(side - tile, 0)
            return [(a, min(a + inner, side), min(max(a - tile // 4, 0), last))
                    for a in range(0, side, inner)]  # fmt: skip

        lefts = cuts(image.shape[-1])
        for top, bottom, start in cuts(image.shape[-2]):
            tiles = [image[..., start : start + tile, left : left + tile] for _, _, left in lefts]
            inside = slice(top - start, bottom - start)
            rows.append([
                torch.cat([tile[..., inside, a - left : b - left]
                           for tile, (a, b, left) in zip(part.chunk(len(lefts)), lefts, strict=True)
                           ], -1)
                for part in self(torch.cat(tiles))
            ])  # fmt: skip
        whole, features = (torch.cat(part, -2) for part in zip(*rows, strict=True))
        return whole, features


def _convolution(channels: int, filters: int) -> nn.Sequential:
    layer = nn.Conv2d(channels, filters, 3, padding=1)
    nn.init.kaiming_normal_(layer.weight, a=0.1)
    assert layer.bias is not None
    nn.init.zeros_(layer.bias)
    return nn.Sequential(layer, nn.LeakyReLU(0.1))


class Denoiser(nn.Module):
    r"""An NMM over the pixels of an image on a U-Net, section 5.2 and appendix C of the paper. With
    the U-Net's image :math:`u`, and vectors :math:`v` and widths :math:`\sigma` from its features,

    .. math::

        \alpha_i = \text{LogisticConcentrations}(u_i, \sigma_i, s), \qquad
        \text{logits}_{ij} = \omega^2 \frac{v_i^\top v_j}{\|v_i\| \|v_j\|}
                             + \gamma \, \delta(i = j) .

    The paper has one width for all pixels (``spread=False``), a fixed :math:`\gamma = 5` and
    ``concentrations=GaussianConcentrations``. Channels of ``(B, channels, H, W)`` share logits.

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
        top = self.num_classes - 1
        check_each_call(
            "noisy", noisy, lambda x: ((x < 0) | (x > 1)).any() | (x == x.round()) | (top < 2),
            f"hold grey levels 0..{top}, {top} * noisy of an image in 0..1",
        )  # fmt: skip
        if noisy.shape[-2] * noisy.shape[-1] != hood.num_nodes:
            must = f"(B, channels, H, W) with H W = {hood.num_nodes} pixels, as hood has"
            raise ValueError(f"noisy must have shape {must}, got {tuple(noisy.shape)}")
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


def __getattr__(name: str) -> Any:
    if name != "ConvolutionalNMM":  # which was here before version 0.3
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn("import ConvolutionalNMM from pyro_nmm.models", DeprecationWarning, stacklevel=2)
    return importlib.import_module("pyro_nmm.models").ConvolutionalNMM
