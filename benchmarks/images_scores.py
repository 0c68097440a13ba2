# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""What images.py measures of a network that has been fitted: likelihoods, in nats a value."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.special import log_ndtr
from torchmetrics.functional.image import peak_signal_noise_ratio

from pyro_nmm import Intervals, LogisticConcentrations, Neighborhood, NeighborMixture
from pyro_nmm.models import Denoiser, UNet

#: An image's neighbourhoods, concentrations and attention.
#: Noisy images or estimates, with clean ones; what makes a row of them.
Pairs = Sequence[tuple[Tensor, Tensor]]
Score = Callable[[Tensor, Tensor], dict]
#: By which all widths are multiplied, of which validation images choose one.
FACTORS = torch.logspace(-0.5, 0.5, 41).tolist()


def psnr(image: Tensor, clean: Tensor) -> float:
    """In decibels, of values clipped to grey levels."""
    return peak_signal_noise_ratio(image, clean.float(), data_range=(0.0, 255.0)).item()


@torch.no_grad()
def mixture_of(network: Denoiser, image: Tensor, radius: int) -> NeighborMixture:
    hood = Neighborhood.grid(*image.shape[-2:], radius, device=image.device)
    return NeighborMixture(hood, *network(hood, image[None]), validate_args=False)


@torch.no_grad()
def estimate(network: UNet | Denoiser, image: Tensor, radius: int = 1) -> Tensor:
    """The mean, which either network gives for its estimate; images ``(channels, H, W)``."""
    if isinstance(network, UNet):
        return 255 * network(image[None] / 255)[0][0]
    return mixture_of(network, image, radius).intervals().mean[0].view(image.shape)


@torch.no_grad()
def marginal(mix: NeighborMixture, clean: Tensor) -> float:
    """Of each value alone."""
    return mix.node_log_probs(clean.flatten(1)).double().mean().item()


@torch.no_grad()
def joint(mix: NeighborMixture, clean: Tensor, seed: int) -> float:
    """
    A lower bound on that of the image as a whole, by one draw in a random order; colors are
    independent. The difference from :func:`marginal` is what neighbours say of each other.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        q = mix.choices(clean.flatten(1)[None])
        return q.log_labels(q.sample()).double().mean().item()


def scaled(mix: NeighborMixture, factor: float) -> NeighborMixture:
    alpha, width = mix.alpha, factor * mix.alpha.width
    alpha = type(alpha)(alpha.mean, width, alpha.scale, alpha.num_classes, alpha.floor)
    return NeighborMixture(mix.hood, alpha, mix.logits, validate_args=False)


def validated(network: UNet | Denoiser, x: Tensor, clean: Tensor, radius: int) -> dict:
    row = {"PSNR": psnr(estimate(network, x, radius), clean)}
    if isinstance(network, Denoiser):
        mix = mixture_of(network, x, radius)
        row |= {"log p": marginal(mix, clean), "joint": joint(mix, clean, seed=0)}
    return row


def fitted_score(network: UNet | Denoiser, pairs: Pairs, radius: int) -> Score:
    """What a test image's row is made by; widths are fitted on validation images."""
    if isinstance(network, UNet):
        half, widths = one_width([(estimate(network, x), clean) for x, clean in pairs])

        def of_estimate(x: Tensor, clean: Tensor) -> dict:
            mean = estimate(network, x)
            row = {k: density(mean, clean, widths[k]) for k, density in DENSITIES.items()}
            found = Intervals(mean, mean - half, mean + half)
            return {"PSNR": psnr(mean, clean), **row, **intervals(found, clean)}

        return of_estimate
    laws = [(mixture_of(network, x, radius), clean) for x, clean in pairs]
    factor = max(
        FACTORS, key=lambda f: statistics.mean(marginal(scaled(law, f), y) for law, y in laws)
    )
    return partial(of_mixture, network, radius=radius, factor=factor)


def of_mixture(network: Denoiser, x: Tensor, clean: Tensor, radius: int, factor: float) -> dict:
    """One image's row; where ``factor`` is not one, with and without it."""
    law = mixture_of(network, x, radius)
    found = Intervals(*(t[0].view(x.shape) for t in law.intervals()))
    row = {"PSNR": psnr(found.mean, clean), **intervals(found, clean)}
    for suffix, each in (("", law), (", scaled", scaled(law, factor))):
        row["log p" + suffix] = marginal(each, clean)
        row["joint" + suffix] = joint(each, clean, seed=0)
    return {**row, "factor": factor}


def intervals(found: Intervals, clean: Tensor) -> dict:
    length = (found.high - found.low).mean().item()
    return {"coverage": found.coverage(clean).item(), "length": length}


def log_gaussian(mean: Tensor, clean: Tensor, width: float) -> float:
    """Of a Gaussian's mass on one grey level, tails at 0 and 255."""
    gap = (clean - mean).double()
    near, far = (log_ndtr((half - gap.abs()) / width) for half in (0.5, -0.5))
    mass = near + (-torch.expm1(far - near)).log()
    mass = torch.where(clean == 0, log_ndtr((0.5 + gap) / width), mass)
    return torch.where(clean == 255, log_ndtr((0.5 - gap) / width), mass).mean().item()


def log_logistic(mean: Tensor, clean: Tensor, width: float) -> float:
    """The same of a logistic distribution, with the floor that the NMM has."""
    alpha = LogisticConcentrations(mean.flatten().double(), width, scale=20.0)
    probs = alpha.at(torch.arange(mean.numel(), device=mean.device), clean.flatten())
    return (probs / alpha.totals()).log().mean().item()


DENSITIES = {"log p": log_gaussian, "log p, logistic": log_logistic}


def one_width(pairs: Pairs) -> tuple[float, dict[str, float]]:
    """Of estimates and what is true: half a 90 % interval, and each density's best width."""
    half = torch.cat([(x - y).abs().flatten() for x, y in pairs]).quantile(0.9).item()
    widths = torch.logspace(0, 1.5, 61).tolist()

    def best(density: Callable) -> float:
        return max(widths, key=lambda w: statistics.mean(density(x, y, w) for x, y in pairs))

    return half, {name: best(density) for name, density in DENSITIES.items()}
