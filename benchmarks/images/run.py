# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Image denoising (the paper's section 5.2). README.md explains the tasks."""

import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from statistics import mean

import pyro
import torch
from torch import Tensor
from torch.special import log_ndtr
from torchmetrics.functional.image import peak_signal_noise_ratio

from benchmarks.shared.records import RESULTS, Records, command
from examples.denoising.intervals import Intervals
from examples.denoising.model import Denoiser, GaussianLevels, Levels, PixelMixture, UNet
from examples.denoising.training import (
    fit_images,
    fit_unet,
    image_folder,
    random_patches,
)
from pyro_nmm.fitting import Steps

#: Factors of all widths of an NMM, and widths for all values of a U-Net.
FACTORS, WIDTHS = torch.logspace(-0.5, 0.5, 41).tolist(), torch.logspace(0, 1.5, 61).tolist()


def marginal(mix: PixelMixture, clean: Tensor) -> float:
    """Mean log-likelihood of each value alone."""
    return mix.log_marginals(clean.flatten(1)[None]).double().mean().item()


def bound(mix: PixelMixture, labels: Tensor) -> float:
    """A lower bound on the mean log-likelihood of all labels ``(channels, N)``, by one draw."""
    return mix.bound_terms(labels[None]).double().mean().item()


def whole_bound(mix: PixelMixture, clean: Tensor) -> float:
    """The bound of a whole image, of the same draw at every call."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return bound(mix, clean.flatten(1))


def scaled(mix: PixelMixture, factor: float) -> PixelMixture:
    """The mixture with all widths times a factor."""
    return replace(mix, alpha=replace(mix.alpha, width=factor * mix.alpha.width))


def log_gaussian(mean: Tensor, clean: Tensor, width: float) -> float:
    """Mean log mass of a Gaussian on grey levels, with its tails on 0 and 255."""
    gap = (clean - mean).double()
    near, far = (log_ndtr((half - gap.abs()) / width) for half in (0.5, -0.5))
    mass = near + (-torch.expm1(far - near)).log()
    mass = torch.where(clean == 0, log_ndtr((0.5 + gap) / width), mass)
    return torch.where(clean == 255, log_ndtr((0.5 - gap) / width), mass).mean().item()


def log_logistic(mean: Tensor, clean: Tensor, width: float) -> float:
    """Mean log mass of a logistic distribution, with the same floor as an NMM's."""
    mean = mean.flatten().double()
    alpha = Levels(mean, mean.new_tensor(width), mean.new_tensor(20.0))
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

    if isinstance(pairs[0][0], PixelMixture):
        return {"factor": best(FACTORS, lambda mix, y, factor: marginal(scaled(mix, factor), y))}
    errors = torch.cat([(x - y).abs().flatten() for x, y in pairs])
    widths = {name: best(WIDTHS, density) for name, density in DENSITIES.items()}
    return {"half": errors.quantile(0.9).item(), "widths": widths}


def validated(found: Tensor | PixelMixture, clean: Tensor) -> dict:
    """The PSNR in decibels, and likelihoods of an NMM."""
    mixture = isinstance(found, PixelMixture)
    estimate = found.intervals().mean[0].view(clean.shape) if mixture else found
    psnr = peak_signal_noise_ratio(estimate, clean.float(), data_range=(0.0, 255.0)).item()
    more = {"log p": marginal(found, clean), "joint": whole_bound(found, clean)} if mixture else {}
    return {"PSNR": psnr} | more


def tested(found: Tensor | PixelMixture, clean: Tensor, **known) -> dict:
    """The row of a test image; likelihoods of an NMM with widths as trained, and scaled."""
    row = validated(found, clean)
    if isinstance(found, PixelMixture):
        ends = Intervals(*(part[0].view(clean.shape) for part in found.intervals()))
        mix = scaled(found, known["factor"])
        row |= {
            "log p, scaled": marginal(mix, clean),
            "joint, scaled": whole_bound(mix, clean),
        } | known
    else:
        ends = Intervals(found, found - known["half"], found + known["half"])
        row |= {name: log(found, clean, known["widths"][name]) for name, log in DENSITIES.items()}
    length = (ends.high - ends.low).mean().item()
    return row | {"coverage": ends.coverage(clean).item(), "length": length}


FOLDERS = {"bsds300": "bsds300/images/test", "kodak24": "kodak24"}
#: Standard deviation of the noise, validation images and the side of their middles.
NOISE, KEPT, CROP = 25.0, 20, 128
#: Training patches of a step, and their side.
BATCH, PATCH = 16, 32
#: The paper's concentrations and attention. With this scale their sums start at 20.
GAUSSIAN = {"levels": GaussianLevels, "sigma": 12.8, "scale": 0.88}
GAUSSIAN |= {"spread": False, "gamma": 5.0}
#: NMMs: options of the network, and of `fit_images`.
NMMS = {
    # Each pixel attends to itself: a U-Net with widths, trained on the NMM's likelihood.
    "U-Net-widths": {"radius": 0},
    "NMM-one-width": {"network": {"spread": False}},
    "NMM": {},
    "NMM-Gaussian": {"network": GAUSSIAN},
    # In one phase, at a constant rate, on the bound alone.
    "NMM-paper": {"network": GAUSSIAN, "last_rate": 1.0, "mean_weight": 0.0},
}
METHODS = ["U-Net", "U-Net-log", *NMMS]


def build(args, method: str, unet: UNet | None = None) -> UNet | Denoiser:
    """The method's network on a U-Net, by default a new one; the U-Net itself for ``"trunk"``."""
    unet = unet or UNet(width=args.width, depth=args.depth, tile=PATCH).to(args.device)
    if method not in NMMS:
        return unet
    options = NMMS[method].get("network", {})
    network = Denoiser(unet, **options).to(args.device)
    network.gamma.requires_grad_(options is not GAUSSIAN)
    return network


def phases(args, method: str) -> dict[str, tuple[int, int, dict]]:
    """Steps and options of phases: mostly a U-Net, the trunk, then for a fifth an NMM on it."""
    options = {k: v for k, v in NMMS.get(method, {}).items() if k != "network"}
    if method in ("U-Net", "NMM-paper"):
        return {method: (0, args.num_steps, {"lr": args.lr} | options)}
    trunk = {"lr": args.lr, "last_rate": 0.2, "loss": "log"}
    alone, with_nmm = {"lr": 0.2 * args.lr, "loss": "log"}, {"lr": args.lr, "unet_rate": 0.2}
    options |= with_nmm if method in NMMS else alone
    start = args.num_steps - args.num_steps // 5
    return {"trunk": (0, start, trunk), method: (start, args.num_steps, options)}


@torch.no_grad()
def predict(network: UNet | Denoiser, method: str, image: Tensor) -> Tensor | PixelMixture:
    """A U-Net's estimate of the clean image, or an NMM's mixture over its pixels."""
    if method not in NMMS:
        return 255 * network(image[None] / 255)[0][0]
    return network(image[None], NMMS[method].get("radius", 1))


def middle(image: Tensor, side: int) -> Tensor:
    top, left = (max(0, full - side) // 2 for full in image.shape[1:])
    return image[:, top : top + side, left : left + side]


def noisy(image: Tensor, seed: int, sd: float = NOISE) -> Tensor:
    """The image with noise that depends on the seed alone, times ``sd``."""
    noise = torch.randn(image.shape, generator=torch.Generator().manual_seed(seed))
    return image + sd * noise.to(image.device)


def settings(args, *more: str) -> dict:
    """What the training depends on, and further options if they are given."""
    names = ("num_steps", "width", "depth", "batch_size", "lr", "run", *more)
    known = {"batch_size": BATCH} | vars(args)
    return {name: known[name] for name in names if known[name] is not None}


@cache
def training_and_validation(root: Path, device: str) -> tuple[list[Tensor], list[Tensor]]:
    """Training images, and the middles of validation images."""
    images = list(image_folder(root / "bsds300/images/train").values())
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(1)).tolist()
    crops = [middle(images[i], CROP).to(device) for i in order[:KEPT]]
    return [images[i].to(device) for i in order[KEPT:]], crops


def trained(args, results: Records, method: str, seed: int):
    """The method's network. Phases with a checkpoint of the last step are not trained again."""
    pyro.set_rng_seed(seed)  # all methods start from the same weights
    images, crops = training_and_validation(args.data_root, args.device)
    pairs = [(noisy(crop, i), crop) for i, crop in enumerate(crops)]
    draw, network = partial(random_patches, images, BATCH, PATCH), None
    for part, (first, last, options) in phases(args, method).items():
        network = build(args, part, network)
        key = {"task": "train", "method": part, "seed": seed}
        watch = partial(watched, args, results, network, pairs, key, (first, last))
        steps = Steps(
            num_steps=last - first, lr=options.pop("lr"), save_every=100, progress=watch,
            checkpoint=args.checkpoints / f"{part}.{seed}.pt",
        )  # fmt: skip
        fit = fit_images if part in NMMS else fit_unet
        fit(network, draw, steps, **options)
    return network


def watched(args, results, network, pairs, key: dict, phase: tuple, steps) -> Iterator[int]:
    """The steps of a phase, with a row of the validation images after every so many."""
    first, last = phase
    for step in itertools.chain(steps, [last - first]):
        if step and not (first + step) % args.watch_every:
            for now in results.missing(**key, step=first + step, settings=settings(args)):
                found = [validated(predict(network, key["method"], x), y) for x, y in pairs]
                results.add(**now, **{name: mean(row[name] for row in found) for name in found[0]})
        if first + step < last:
            yield step


def train(args, results: Records) -> None:
    for seed, method in itertools.product(args.seeds, args.methods):
        trained(args, results, method, seed)


def each_image(args, results: Records, task: str, methods: list[str]) -> Iterator[tuple]:
    """The key of every row that is not stored, a prediction, and the clean image."""
    network = cache(partial(trained, args, results))
    levels = [None if sd == NOISE else sd for sd in args.noise]
    key = {"method": methods, "seed": args.seeds, "noise": levels}
    for dataset in args.datasets:
        images = image_folder(args.data_root / FOLDERS[dataset])
        each = key | {"image": list(images), "settings": settings(args, "crop")}
        for now in results.missing(task=task, dataset=dataset, **each):
            clean = images[now["image"]].to(args.device)
            clean = middle(clean, args.crop) if args.crop else clean
            seed = 1000 + each["image"].index(now["image"])
            x = noisy(clean, seed, now.get("noise", NOISE))
            yield now, predict(network(now["method"], now["seed"]), now["method"], x), clean


def test(args, results: Records) -> None:
    @cache
    def chosen(method: str, seed: int, sd: float) -> dict:
        """The widths that suit validation images with this noise best."""
        network = trained(args, results, method, seed)
        _, crops = training_and_validation(args.data_root, args.device)
        pairs = ((noisy(crop, i, sd), crop) for i, crop in enumerate(crops))
        return fitted([(predict(network, method, x), y) for x, y in pairs])

    for key, found, clean in each_image(args, results, "test", args.methods):
        known = chosen(key["method"], key["seed"], key.get("noise", NOISE))
        results.add(**key, **tested(found, clean, **known))


CHOICES = {"methods": METHODS, "datasets": list(FOLDERS)}
OPTIONS = CHOICES | {"seeds": [0], "num_steps": 10_000, "lr": 1e-3, "choices": CHOICES}
OPTIONS |= {"width": (48, "filters of the U-Net"), "depth": (5, "its levels")}
OPTIONS |= {"watch_every": (1000, "steps between validations"), "device": "cpu"}
OPTIONS |= {"run": (str, "a name for networks with the settings of others, such as 'second'")}
OPTIONS |= {"noise": ([NOISE], "standard deviations at the test, in grey levels")}
OPTIONS |= {"crop": (int, "side of the test images' middles"), "data_root": Path}
OPTIONS |= {"checkpoints": Path("output/denoising"), "results": RESULTS / "images.jsonl"}
main = command(__doc__, (train, test), **OPTIONS)

if __name__ == "__main__":
    main()
