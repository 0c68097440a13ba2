# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""A U-Net, and an NMM over the pixels of an image on top of it, with 256 ordered labels."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from examples.denoising.intervals import Intervals, label_intervals
from pyro_nmm import NeighborChoice, Neighborhood, NeighborMixture
from pyro_nmm.models.networks import attention_scores

NUM_LEVELS = 256


class UNet(nn.Module):
    r"""The U-Net of Lehtinen et al. (2018, "Noise2Noise", ICML): convolutions of 3 x 3 with leaky
    ReLU, ``depth`` poolings, upsampling and skip connections. Here it predicts a difference:

    .. math::

        \hat x = X + g_\theta(X)

    Other sides are extended to multiples of :math:`2^\text{depth}` by repeating the last pixels.

    :param int channels: of images ``(B, channels, H, W)``, in units of one.
    :param int width: filters; twice as many on the way up.
    :param int tile: the side of the patches that it is fitted to, a multiple of four. Larger images
        are taken in tiles of that side, of which the inner quarter counts: four times the work.
    """

    def __init__(self, channels: int = 3, width: int = 48, depth: int = 5, tile: int | None = None):
        super().__init__()
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
        features = image.new_empty(len(image), self.num_features, *image.shape[-2:])
        outputs = torch.empty_like(image), features
        for top, bottom, above in _inner_parts(image.shape[-2], tile):
            for left, right, before in _inner_parts(image.shape[-1], tile):
                parts = self(image[..., above : above + tile, before : before + tile])
                for whole, part in zip(outputs, parts, strict=True):
                    inner = part[..., top - above : bottom - above, left - before : right - before]
                    whole[..., top:bottom, left:right] = inner
        return outputs


def _inner_parts(side: int, tile: int) -> list[tuple[int, int, int]]:
    """Where the inner parts of tiles start and end, and where their tiles start."""
    last, inner = max(side - tile, 0), tile // 2
    starts = range(0, side, inner)
    return [(a, min(a + inner, side), min(max(a - tile // 4, 0), last)) for a in starts]


def _convolution(channels: int, filters: int) -> nn.Sequential:
    layer = nn.Conv2d(channels, filters, 3, padding=1)
    nn.init.kaiming_normal_(layer.weight, a=0.1)
    assert layer.bias is not None
    nn.init.zeros_(layer.bias)
    return nn.Sequential(layer, nn.LeakyReLU(0.1))


@dataclass
class Levels:
    r"""Concentrations of ordered labels by a formula, so that no table of 256 labels is needed,

    .. math::

        \alpha_{ik} = s \left[ F\left(\frac{k + \frac12 - u_i}{\sigma_i}\right)
            - F\left(\frac{k - \frac12 - u_i}{\sigma_i}\right) \right] + \epsilon, \qquad
        F(x) = \frac{1}{1 + e^{-x}},

    the mass of a logistic distribution on each label's unit, as in PixelCNN++ (Salimans et al.,
    2017). The first term is one for the last label, and the second zero for ``k = 0``.
    """

    mean: Tensor  #: ``(..., N)``, :math:`u` in grey levels
    width: Tensor  #: :math:`\sigma`, of a shape that broadcasts to the shape of ``mean``
    scale: Tensor  #: ``()``, :math:`s`: so many labels of neighbours weigh as much as the mean
    floor: float = 1e-5  #: :math:`\epsilon`, keeps labels far from all means possible

    def peak(self, labels: Tensor, mean: Tensor, width: Tensor) -> Tensor:
        """The bracket of the formula, which broadcasts."""
        gap, top = labels - mean, NUM_LEVELS - 1
        # F(a) - F(b) = F(a) F(-b) (1 - exp(b - a)): no digits are lost.
        inner = ((0.5 + gap) / width).sigmoid() * ((0.5 - gap) / width).sigmoid()
        inner = inner * -torch.expm1(-1 / width)
        first, last = ((0.5 - mean) / width).sigmoid(), ((mean - top + 0.5) / width).sigmoid()
        return torch.where(labels == top, last, torch.where(labels == 0, first, inner))

    def at(self, nodes: Tensor, labels: Tensor) -> Tensor:
        """``(..., E)``: of nodes ``(E,)`` at labels ``(..., E)``."""
        width = self.width.expand(self.mean.shape).index_select(-1, nodes)
        mean = self.mean.index_select(-1, nodes)
        return self.scale * self.peak(labels, mean, width) + self.floor

    def totals(self) -> Tensor:
        """``(..., N)``: sums over labels."""
        return (self.scale + self.floor * NUM_LEVELS).expand(self.mean.shape)

    def table(self) -> Tensor:
        """``(..., N, 256)``: written out."""
        labels = torch.arange(NUM_LEVELS, device=self.mean.device)
        width = self.width.expand(self.mean.shape)[..., None]
        return self.scale * self.peak(labels, self.mean[..., None], width) + self.floor


class GaussianLevels(Levels):
    r"""The paper's appendix C:
    :math:`\alpha_{ik} = s \exp(-(k - u_i)^2 / \sigma_i^2) + \epsilon`."""

    def peak(self, labels: Tensor, mean: Tensor, width: Tensor) -> Tensor:
        return (-((labels - mean) / width).square()).exp()

    def totals(self) -> Tensor:
        return self.table().sum(-1)


@dataclass
class PixelMixture:
    """An NMM over the pixels of images, whose colours are independent and share the attention."""

    hood: Neighborhood
    alpha: Levels  #: of the shape ``(B, channels, N, 256)``
    logits: Tensor  #: ``(B, 1, num_edges)``
    #: Pixels that share no neighbour, and their rows of ``hood``; every pixel has one turn.
    turns: list[tuple[Tensor, Neighborhood]]

    def written_out(self, image: int, channel: int) -> NeighborMixture:
        """The distribution of one channel of an image, with a table of all labels."""
        parts = self.alpha.mean, self.alpha.width.expand(self.alpha.mean.shape)
        mean, width = (part[image, channel] for part in parts)
        alpha = type(self.alpha)(mean, width, self.alpha.scale, self.alpha.floor)
        logits = self.logits[image, 0]
        return NeighborMixture(self.hood, alpha.table(), logits, validate_args=False)

    def log_marginals(self, y: Tensor) -> Tensor:
        """``(B, channels, N)``: the log-probability of each label alone."""
        source, labels = self.hood.source, y[..., self.hood.row]
        probs = self.alpha.at(source, labels) / self.alpha.totals()[..., source]
        return self.hood.sum(self.hood.softmax(self.logits) * probs).log()

    def bound_terms(self, y: Tensor) -> Tensor:
        r"""``(B, channels, N)``: terms of the lower bound on :math:`\log p(y)`, the paper's (5),

        .. math::

            f_i = \log \sum_j L_{ij} \frac{\alpha_{j y_i} + s_{ij}}{A_j + S_{ij}}, \qquad
            q(c_i = j) \propto L_{ij} \frac{\alpha_{j y_i} + s_{ij}}{A_j + S_{ij}},

        where :math:`S_{ij}` counts the earlier pixels that chose ``j``, and :math:`s_{ij}` those
        with the label of ``i``. Pixels whose windows do not meet are independent given the earlier
        ones, so each turn draws its pixels at once. Gradients are those of EM, without a score.
        """
        totals, log_attention = self.alpha.totals(), self.hood.log_softmax(self.logits)
        size = self.hood.num_sources * NUM_LEVELS
        same = torch.zeros(*y.shape[:-1], size, dtype=torch.uint8, device=y.device)
        every, terms = torch.zeros_like(totals), []
        for nodes, rows in self.turns:
            own, near = y[..., nodes], y[..., nodes[rows.row]]
            above = self.alpha.at(rows.source, near)
            above = above + same.gather(-1, rows.source * NUM_LEVELS + near)
            below = (totals + every).index_select(-1, rows.source)
            scores = log_attention.index_select(-1, rows.edge) + (above / below).log()
            terms.append(rows.logsumexp(scores))
            choice = NeighborChoice(rows, scores.detach(), validate_args=False).sample()
            one = torch.ones_like(choice)
            same.scatter_add_(-1, choice * NUM_LEVELS + own, one.to(same))
            every = every.scatter_add(-1, choice, one.to(every))
        order = torch.cat([nodes for nodes, _ in self.turns]).argsort()
        return torch.cat(terms, -1).index_select(-1, order)

    def intervals(self, level: float = 0.9) -> Intervals:
        """Mean grey levels and ends of intervals, each ``(B, channels, N)``."""
        batch, channels, _ = self.alpha.mean.shape
        found = [label_intervals(self.written_out(b, c), level)
                 for b in range(batch) for c in range(channels)]  # fmt: skip
        parts = (torch.stack(part) for part in zip(*found, strict=True))
        return Intervals(*(part.unflatten(0, (batch, channels)) for part in parts))

    def sample(self, number: int = 1) -> Tensor:
        """``(number, B, channels, N)``: whole images."""
        batch, channels, _ = self.alpha.mean.shape
        drawn = [self.written_out(b, c).sample((number,))
                 for b in range(batch) for c in range(channels)]  # fmt: skip
        return torch.stack(drawn, 1).unflatten(1, (batch, channels))


class Denoiser(nn.Module):
    r"""An NMM over the pixels of an image on a U-Net, section 5.2 and appendix C of the paper. With
    the U-Net's image :math:`u`, and vectors :math:`v` and widths :math:`\sigma` from its features,

    .. math::

        \text{logits}_{ij} = \omega^2 \frac{v_i^\top v_j}{\|v_i\| \|v_j\|}
                             + \gamma \, \delta(i = j) .

    The paper has one width for all pixels (``spread=False``), a fixed :math:`\gamma = 5` and
    ``levels=GaussianLevels``.

    :param UNet unet: best fitted before.
    :param int width: of the vectors :math:`v`.
    :param float sigma: initial :math:`\sigma`, in grey levels.
    :param float scale: initial :math:`s`, and likewise ``omega`` and ``gamma``. All are learned.
    """

    def __init__(
        self, unet: UNet, *, width: int = 16, sigma: float = 5.0, scale: float = 20.0,
        omega: float = 2.0, gamma: float = 2.0, spread: bool = True, levels: type[Levels] = Levels,
    ) -> None:  # fmt: skip
        super().__init__()
        self.unet, self.levels = unet, levels
        self.attention = _branch(unet.num_features, width)
        self.spread = _branch(unet.num_features, unet.last.out_channels) if spread else None
        if self.spread is not None:
            for parameter in self.spread[-1].parameters():
                nn.init.zeros_(parameter)
        self.log_sigma = nn.Parameter(torch.tensor(float(sigma)).log())
        self.log_scale = nn.Parameter(torch.tensor(float(scale)).log())
        self.omega = nn.Parameter(torch.tensor(float(omega)))
        self.gamma = nn.Parameter(torch.tensor(float(gamma)))

    def forward(self, noisy: Tensor, radius: int = 1) -> PixelMixture:
        """The mixture of noisy grey levels ``(B, channels, H, W)``, with windows of a radius."""
        hood, parts = windows(*noisy.shape[-2:], radius, noisy.device)
        image, features = self.unet(noisy / (NUM_LEVELS - 1))
        vectors = self.attention(features).flatten(2).mT
        logits = attention_scores(hood, vectors, self.omega.square(), self.gamma)[:, None]
        log_sigma = self.log_sigma
        if self.spread is not None:
            log_sigma = log_sigma + self.spread(features).flatten(2)
        mean = (NUM_LEVELS - 1) * image.flatten(2)
        alpha = self.levels(mean, log_sigma.exp(), self.log_scale.exp())
        turns = [parts[i] for i in torch.randperm(len(parts)).tolist()]
        return PixelMixture(hood, alpha, logits, turns)


@lru_cache(maxsize=4)
def windows(
    height: int, width: int, radius: int, device: torch.device
) -> tuple[Neighborhood, list[tuple[Tensor, Neighborhood]]]:
    """The windows of all pixels, and the turns of pixels: for windows of 3 x 3 there are nine."""
    hood, step = Neighborhood.grid(height, width, radius=radius, device=device), 2 * radius + 1
    pixels = torch.arange(height * width, device=device).view(height, width)
    starts = [(top, left) for top in range(step) for left in range(step)]
    parts = [pixels[top::step, left::step].flatten() for top, left in starts]
    return hood, [(nodes, hood.take(nodes)) for nodes in parts if len(nodes)]


def _branch(features: int, channels: int) -> nn.Sequential:
    hidden = nn.Conv2d(features, features, 1)
    return nn.Sequential(hidden, nn.LeakyReLU(0.1), nn.Conv2d(features, channels, 1))
