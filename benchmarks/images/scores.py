# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""PSNR, likelihoods in nats a value, intervals, and spectra of samples."""

import itertools
from bisect import bisect_left
from collections.abc import Callable
from statistics import mean

import numpy as np
import torch
from torch import Tensor
from torch.special import log_ndtr
from torchmetrics.functional.image import peak_signal_noise_ratio

from pyro_nmm import Intervals, LogisticConcentrations, Neighborhood, NeighborMixture
from pyro_nmm.distributions import NeighborChoice

#: Factors of all widths of an NMM, and widths for all values of a U-Net.
FACTORS, WIDTHS = torch.logspace(-0.5, 0.5, 41).tolist(), torch.logspace(0, 1.5, 61).tolist()
#: Sides of tiles, and distances of pixels whose errors are correlated.
SIDES, LAGS = (2, 4, 8, 16), (1, 2, 4, 8)
#: Samples of an image whose spectra are averaged, and equal bins of frequencies up to `NYQUIST`.
DRAWS, BINS, NYQUIST = 2, 16, 0.5


def marginal(mix: NeighborMixture, clean: Tensor) -> float:
    """Mean log-likelihood of each value alone."""
    return mix.node_log_probs(clean.flatten(1)).double().mean().item()


def bound(mix: NeighborMixture, labels: Tensor) -> float:
    """A lower bound on the mean log-likelihood of all labels ``(channels, N)``, by one draw."""
    q = mix.choices(labels[None])
    return q.log_labels(q.sample()).double().mean().item()


def joint(mix: NeighborMixture, clean: Tensor) -> float:
    """The bound of a whole image, of the same draw at every call."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return bound(mix, clean.flatten(1))


def scaled(mix: NeighborMixture, factor: float) -> NeighborMixture:
    """The mixture with all widths times a factor."""
    alpha, width = mix.alpha, factor * mix.alpha.width
    alpha = type(alpha)(alpha.mean, width, alpha.scale, alpha.num_classes, alpha.floor)
    return NeighborMixture(mix.hood, alpha, mix.logits, validate_args=False)


def log_gaussian(mean: Tensor, clean: Tensor, width: float) -> float:
    """Mean log mass of a Gaussian on grey levels, with its tails on 0 and 255."""
    gap = (clean - mean).double()
    near, far = (log_ndtr((half - gap.abs()) / width) for half in (0.5, -0.5))
    mass = near + (-torch.expm1(far - near)).log()
    mass = torch.where(clean == 0, log_ndtr((0.5 + gap) / width), mass)
    return torch.where(clean == 255, log_ndtr((0.5 - gap) / width), mass).mean().item()


def log_logistic(mean: Tensor, clean: Tensor, width: float) -> float:
    """Mean log mass of a logistic distribution, with the same floor as an NMM's."""
    alpha = LogisticConcentrations(mean.flatten().double(), width, scale=20.0)
    probs = alpha.at(torch.arange(mean.numel(), device=mean.device), clean.flatten())
    return (probs / alpha.totals()).log().mean().item()


DENSITIES = {"log p": log_gaussian, "log p, logistic": log_logistic}


def highest(values: list[float], score: Callable[[float], float]) -> float:
    """The value at the peak of scores that rise and then fall, as likelihoods do over widths."""
    pairs = list(itertools.pairwise(values))
    return values[bisect_left(pairs, True, key=lambda pair: score(pair[0]) > score(pair[1]))]


def fitted(pairs: list[tuple]) -> dict:
    """The best factor of an NMM's widths, or half of a 90 % interval and widths of a U-Net."""

    def best(values: list[float], score: Callable) -> float:
        return highest(values, lambda value: mean(score(x, y, value) for x, y in pairs))

    if isinstance(pairs[0][0], NeighborMixture):
        return {"factor": best(FACTORS, lambda mix, y, factor: marginal(scaled(mix, factor), y))}
    errors = torch.cat([(x - y).abs().flatten() for x, y in pairs])
    widths = {name: best(WIDTHS, density) for name, density in DENSITIES.items()}
    return {"half": errors.quantile(0.9).item(), "widths": widths}


def validated(found: Tensor | NeighborMixture, clean: Tensor) -> dict:
    """The PSNR in decibels, and likelihoods of an NMM."""
    mixture = isinstance(found, NeighborMixture)
    estimate = found.intervals().mean[0].view(clean.shape) if mixture else found
    psnr = peak_signal_noise_ratio(estimate, clean.float(), data_range=(0.0, 255.0)).item()
    more = {"log p": marginal(found, clean), "joint": joint(found, clean)} if mixture else {}
    return {"PSNR": psnr} | more


def tested(found: Tensor | NeighborMixture, clean: Tensor, **known) -> dict:
    """The row of a test image; likelihoods of an NMM with widths as trained, and scaled."""
    row = validated(found, clean)
    if isinstance(found, NeighborMixture):
        ends = Intervals(*(part[0].view(clean.shape) for part in found.intervals()))
        mix = scaled(found, known["factor"])
        row |= {"log p, scaled": marginal(mix, clean), "joint, scaled": joint(mix, clean)} | known
    else:
        ends = Intervals(found, found - known["half"], found + known["half"])
        row |= {name: log(found, clean, known["widths"][name]) for name, log in DENSITIES.items()}
    length = (ends.high - ends.low).mean().item()
    return row | {"coverage": ends.coverage(clean).item(), "length": length}


def cut(mix: NeighborMixture, height: int, width: int, side: int) -> tuple[NeighborMixture, Tensor]:
    """Tiles as one mixture, with a copy of sources for each tile, and the pixel of each node."""
    pixel = torch.arange(height * width, device=mix.hood.device)
    tile = pixel // width // side * width + pixel % width // side
    pixels = tile.argsort(stable=True)
    rows = mix.hood.take(pixels)
    copies, source = (tile[rows.target] * len(pixel) + rows.source).unique(return_inverse=True)
    hood = Neighborhood(torch.stack([source, rows.row]), len(pixel), len(copies))
    alpha, logits = mix.alpha.take(copies % len(pixel)), mix.logits[..., rows.edge]
    return NeighborMixture(hood, alpha, logits, validate_args=False), pixels


def tiles(mix: NeighborMixture, clean: Tensor) -> dict:
    """Nats a value: of marginals, and lower bounds of tiles and of the image as a whole."""
    row = {"log p": marginal(mix, clean), "joint": joint(mix, clean)}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for side in SIDES:
            parts, pixels = cut(mix, *clean.shape[-2:], side)
            row[f"joint {side}"] = bound(parts, clean.flatten(1)[:, pixels])
    return row


def power(field: Tensor) -> list[float]:
    """The power spectrum of ``(..., H, W)`` in bins of frequency, under a Hann window."""
    sides = field.shape[-2:]
    window = torch.outer(*(torch.hann_window(n, dtype=torch.double) for n in sides))
    window = window.to(field.device) / window.square().sum().sqrt()
    found = torch.fft.fft2(field.double() * window).abs().square().flatten(0, -3).mean(0)
    distance = np.hypot(*np.meshgrid(*map(np.fft.fftfreq, sides), indexing="ij"))
    total, _ = np.histogram(distance, BINS, (0, NYQUIST), weights=found.cpu().numpy())
    return (total / np.histogram(distance, BINS, (0, NYQUIST))[0]).tolist()


def at_lag(function: Callable, field: Tensor, lag: int) -> float:
    """Mean of a function of pixels and of the pixels ``lag`` below and to the right of them."""
    sizes = ((dim, field.shape[dim] - lag) for dim in (-2, -1))
    pairs = ((field.narrow(dim, 0, n), field.narrow(dim, lag, n)) for dim, n in sizes)
    return mean(function(a, b).double().mean().item() for a, b in pairs)


def spectra(mix: NeighborMixture, clean: Tensor) -> dict:
    """
    Spectra about the mean, of the clean image, of samples and of independent draws; correlations at
    `LAGS`, and shares of equal adjacent pixels. ``total``, the mean sum of alpha, bounds both.
    """
    estimate = mix.intervals().mean[0].view(clean.shape)
    choices = NeighborChoice(mix.hood, mix.logits).expand(mix.batch_shape)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        drawn = {"error": clean, "sample": mix.sample((DRAWS,)), "another": mix.sample()}
        drawn["apart"] = torch.cat([mix.alpha.draw(choices.sample()) for _ in range(DRAWS)])
    row: dict = {"total": mix.alpha.totals().mean().item(), "lags": {}, "ties": {}}
    for name, labels in drawn.items():
        labels = labels.view(-1, *clean.shape)
        gaps, variance = labels - estimate, (labels - estimate).double().square().mean().item()
        row[name] = [float(f"{p:.5g}") for p in power(gaps)]
        row["lags"][name] = [round(at_lag(torch.mul, gaps, lag) / variance, 5) for lag in LAGS]
        row["ties"][name] = round(at_lag(torch.eq, labels, 1), 5)
    return row
