# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
What images.py measures of a joint distribution of pixels: at what scale they say something of each
other, and whether samples err as the estimate does.
"""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.images import scores
from pyro_nmm import Neighborhood, NeighborMixture
from pyro_nmm.distributions.neighbor_choice import NeighborChoice

#: Sides of tiles, in pixels.
SIDES = 2, 4, 8, 16
#: Samples of an image whose spectra are averaged; of frequencies, cycles a pixel, equal bins.
DRAWS, BINS, NYQUIST = 2, 16, 0.5
#: Distances of pixels whose errors are correlated.
LAGS = 1, 2, 4, 8


def cut(
    mix: NeighborMixture, height: int, width: int, side: int
) -> tuple[NeighborMixture, Tensor, Tensor]:
    """
    The marginals of an image's tiles as one mixture: a source has a copy for each tile that may
    choose it, so that tiles share none. With the pixel of every copy, and which copies are pixels
    of their tiles; labels of the others are never read.
    """
    if side < 1:
        raise ValueError(f"side must be positive, got {side}")
    hood, count = mix.hood, height * width
    if count != hood.num_nodes:
        raise ValueError(f"{height} x {width} pixels are not the {hood.num_nodes} of the mixture")
    pixel = torch.arange(count, device=hood.device)
    down, right = pixel // width // side, pixel % width // side
    tile = down * -(-width // side) + right
    # Rows of the pixels in their order, and after them those of copies, which nobody asks.
    copies, place = (tile[hood.target] * count + hood.source).unique(return_inverse=True)
    pixels = copies % count
    inside = tile[pixels] == copies // count
    row = torch.searchsorted(copies, tile * count + pixel)[hood.target]
    alone = (~inside).nonzero()[:, 0]
    edges = torch.stack([torch.cat([place, alone]), torch.cat([row, alone])])
    logits = torch.cat([mix.logits, mix.logits.new_zeros(*mix.logits.shape[:-1], len(alone))], -1)
    # By target and then by source, as neighbourhoods have their edges.
    order = (edges[1] * len(copies) + edges[0]).argsort()
    own = Neighborhood(edges, len(copies))
    alpha = mix.alpha.take(pixels)
    found = NeighborMixture(own, alpha, logits[..., order], validate_args=False)
    return found, pixels, inside


def tiles(mix: NeighborMixture, clean: Tensor, seed: int = 0) -> dict:
    """Nats a value: of marginals, and lower bounds of tiles and of the image as a whole."""
    labels = clean.flatten(1)[None]
    row = {"log p": scores.marginal(mix, clean), "joint": scores.joint(mix, clean, seed)}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for side in SIDES:
            parts, pixels, inside = cut(mix, *clean.shape[-2:], side)
            q = parts.choices(labels[..., pixels], inside)
            row[f"joint {side}"] = q.log_labels(q.sample()).double().mean().item()
    return row


def power(field: Tensor) -> Tensor:
    """
    ``(BINS,)``: the power spectrum of a field ``(..., channels, H, W)``, averaged over all but the
    distance from frequency zero. White noise has its variance everywhere. A Hann window keeps what
    is at opposite borders from meeting.
    """
    height, width = field.shape[-2:]
    window = torch.outer(*(torch.hann_window(n, dtype=torch.double) for n in (height, width)))
    window = window.to(field.device) / window.square().sum().sqrt()
    found = torch.fft.fft2(field.double() * window).abs().square()
    found = found.flatten(0, -3).mean(0).cpu()
    down, right = (torch.fft.fftfreq(n, dtype=torch.double) for n in (height, width))
    distance = (down[:, None].square() + right.square()).sqrt()
    bins = (distance / NYQUIST * BINS).long()
    bins = torch.where(distance == NYQUIST, BINS - 1, bins).flatten()
    known = bins < BINS  # corners are left out
    total, count = torch.zeros(2, BINS, dtype=torch.double)
    total.index_add_(0, bins[known], found.flatten()[known])
    count.index_add_(0, bins[known], torch.ones(int(known.sum()), dtype=torch.double))
    return total / count


def apart(mix: NeighborMixture) -> Tensor:
    """``(1, channels, N)``: every value from its own marginal, independent of all others."""
    choices = NeighborChoice(mix.hood, mix.logits).expand(mix.batch_shape).sample()
    return mix.alpha.draw(choices)


def shifted(field: Tensor, lag: int) -> list[tuple[Tensor, Tensor]]:
    """Values, and those that are ``lag`` pixels below and to the right of them."""
    sizes = ((dim, field.shape[dim] - lag) for dim in (-2, -1))
    return [(field.narrow(dim, 0, n), field.narrow(dim, lag, n)) for dim, n in sizes]


def correlation(field: Tensor, lag: int) -> float:
    """Of errors, whose mean is zero if the estimate is right."""
    products = torch.stack([(a * b).double().mean() for a, b in shifted(field, lag)])
    return (products.mean() / field.double().square().mean()).item()


def spectra(mix: NeighborMixture, clean: Tensor, seed: int = 0) -> dict:
    """
    Spectra about the mixture's mean: of the clean image, that is of the estimate's error; of
    samples; of one more sample, by which a reader sees how far spectra of the same law differ; and
    of values that are drawn apart from each other. Of each also the correlations of values at
    :data:`LAGS` from each other and the share of adjacent pixels that have the same grey level,
    beside the mean of the concentrations' totals, which bound what an NMM can have of both.
    """
    mean = mix.intervals().mean[0].view(clean.shape)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        drawn = {
            "error": clean,
            "sample": mix.sample((DRAWS,)),
            "another": mix.sample(),
            "apart": torch.cat([apart(mix) for _ in range(DRAWS)]),
        }
    row: dict = {"total": mix.alpha.totals().mean().item(), "lags": {}, "ties": {}}
    for name, labels in drawn.items():
        labels = labels.view(-1, *clean.shape)
        gaps = labels - mean
        row[name] = [float(f"{p:.5g}") for p in power(gaps).tolist()]
        row["lags"][name] = [round(correlation(gaps, lag), 5) for lag in LAGS]
        same = [(a == b).double().mean().item() for a, b in shifted(labels, 1)]
        row["ties"][name] = round(sum(same) / 2, 5)
    return row
