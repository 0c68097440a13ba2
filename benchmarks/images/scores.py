# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""What images.py measures of a network that has been fitted: likelihoods, in nats a value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import mean

import torch
from torch import Tensor
from torch.special import log_ndtr
from torchmetrics.functional.image import peak_signal_noise_ratio

from pyro_nmm import Intervals, LogisticConcentrations, Neighborhood, NeighborMixture
from pyro_nmm.models import Denoiser, UNet

#: A U-Net's estimate of an image ``(channels, H, W)``, or a mixture over its pixels.
Prediction = Tensor | NeighborMixture
#: With what is true.
Pairs = Sequence[tuple[Prediction, Tensor]]
#: By which all widths are multiplied, of which validation images choose one.
FACTORS = torch.logspace(-0.5, 0.5, 41).tolist()
#: Of which they choose one for all values of a U-Net.
WIDTHS = torch.logspace(0, 1.5, 61).tolist()


@torch.no_grad()
def predicted(network: UNet | Denoiser, image: Tensor, radius: int = 1) -> Prediction:
    if isinstance(network, UNet):
        return 255 * network(image[None] / 255)[0][0]
    hood = Neighborhood.grid(*image.shape[-2:], radius, device=image.device)
    return NeighborMixture(hood, *network(hood, image[None]), validate_args=False)


def psnr(image: Tensor, clean: Tensor) -> float:
    """In decibels, of values clipped to grey levels."""
    return peak_signal_noise_ratio(image, clean.float(), data_range=(0.0, 255.0)).item()


def marginal(mix: NeighborMixture, clean: Tensor) -> float:
    """Of each value alone."""
    return mix.node_log_probs(clean.flatten(1)).double().mean().item()


def joint(mix: NeighborMixture, clean: Tensor, seed: int = 0) -> float:
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


def validated(found: Prediction, clean: Tensor) -> dict:
    if isinstance(found, Tensor):
        return {"PSNR": psnr(found, clean)}
    estimate = found.intervals().mean[0].view(clean.shape)
    return {"PSNR": psnr(estimate, clean), "log p": marginal(found, clean),
            "joint": joint(found, clean)}  # fmt: skip


def highest(values: list[float], score: Callable[[float], float], step: int = 4) -> float:
    """
    The value of the highest score, where scores rise to one peak and fall, as likelihoods do over
    widths: every fourth is tried, and then those between the best's neighbours.
    """
    coarse = [*range(0, len(values), step), len(values) - 1]
    peak = max(coarse, key=lambda k: score(values[k]))
    near = range(max(peak - step + 1, 0), min(peak + step, len(values)))
    return values[max(near, key=lambda k: score(values[k]))]


def fitted(pairs: Pairs) -> dict:
    """
    What suits the validation images best: of an NMM a factor of its widths; of a U-Net half a 90 %
    interval, and each density's width.
    """

    def best(values: list[float], score: Callable) -> float:
        return highest(values, lambda value: mean(score(x, y, value) for x, y in pairs))

    if isinstance(pairs[0][0], NeighborMixture):
        return {"factor": best(FACTORS, lambda mix, y, factor: marginal(scaled(mix, factor), y))}
    errors = torch.cat([(x - y).abs().flatten() for x, y in pairs])
    widths = {name: best(WIDTHS, density) for name, density in DENSITIES.items()}
    return {"half": errors.quantile(0.9).item(), "widths": widths}


def tested(found: Prediction, clean: Tensor, **known) -> dict:
    """A test image's row; of an NMM with its own widths, and times the factor."""
    if isinstance(found, Tensor):
        half, widths = known["half"], known["widths"]
        ends = Intervals(found, found - half, found + half)
        row = {name: density(found, clean, widths[name]) for name, density in DENSITIES.items()}
    else:
        ends, row = Intervals(*(t[0].view(clean.shape) for t in found.intervals())), {}
        for suffix, mix in (("", found), (", scaled", scaled(found, known["factor"]))):
            row |= {"log p" + suffix: marginal(mix, clean), "joint" + suffix: joint(mix, clean)}
        row["factor"] = known["factor"]
    length = (ends.high - ends.low).mean().item()
    row |= {"coverage": ends.coverage(clean).item(), "length": length}
    return {"PSNR": psnr(ends.mean, clean)} | row


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
