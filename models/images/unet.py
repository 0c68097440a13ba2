# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The U-Net below the NMM over pixels."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pyro_nmm.arguments import check_each_call, check_integers, expect


class UNet(nn.Module):
    r"""
    The U-Net of Lehtinen et al. (2018, "Noise2Noise", ICML): convolutions of 3 x 3 with leaky
    ReLU, ``depth`` times max-pooling, nearest-neighbour upsampling and skip connections. Unlike
    theirs, it predicts a difference to its input:

    .. math::

        \hat x = X + g_\theta(X)

    >>> network = UNet(width=8, depth=2)
    >>> image, features = network(torch.rand(1, 3, 10, 13))
    >>> image.shape, features.shape
    (torch.Size([1, 3, 10, 13]), torch.Size([1, 5, 10, 13]))

    Images of other sides are extended to multiples of :math:`2^\text{depth}` by repeating their
    last pixels.

    :param int channels: of images ``(B, channels, H, W)``, in units of one.
    :param int width: filters; twice as many on the way up.
    :param int tile: the side of the patches that it is fitted to. Larger images are taken in
        tiles of that side, of which the inner quarter counts: four times the work.
    """

    def __init__(
        self, channels: int = 3, width: int = 48, depth: int = 5, tile: int | None = None
    ) -> None:
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
        expect("image", image, ("B", self.last.out_channels, "H", "W"), kind="float")
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
