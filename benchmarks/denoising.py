# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
Denoising with a U-Net, and with an NMM over pixels on the same U-Net (the paper's section 5.2).

    python benchmarks/denoising.py train test cost --data-root F

Tasks: ``train`` (all methods, from the same weights, on patches of BSD300's training images that
are drawn alike; 20 of the images are kept for validation), ``test`` (BSD300's test images and
Kodak24, with the same noise of standard deviation 25 for all) and ``cost`` (seconds and memory of a
step). F holds ``bsds300/images/{train,test}`` and ``kodak24``. Training saves to ``--checkpoints``
and goes on from there; ``--results`` gets a line for each point of the curves and for each image,
and what is there already is not run again. ``benchmarks/report.py`` makes the tables and the
figure.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path

import pyro
import torch
from records import Records
from speed import PeakMemory
from torch import Tensor
from torch.special import log_ndtr
from torchmetrics.functional.image import peak_signal_noise_ratio

from pyro_nmm import LogisticConcentrations, Neighborhood
from pyro_nmm.guides import fit_denoiser
from pyro_nmm.images import image_folder, photographs, random_patches
from pyro_nmm.models import Denoiser, Prediction, UNet, pixel_log_probs, predict_pixels

RESULTS = Path(__file__).parent / "results" / "denoising.jsonl"
METHODS = ("U-Net", "U-Net-log", "NMM")
Watch = Callable[[UNet | Denoiser, str, int], None]
FOLDERS = {"bsds300": "bsds300/images/test", "kodak24": "kodak24"}
NOISE, KEPT, CROP, PATCH = 25.0, 20, 128, 32


def load(args, folder: str) -> dict[str, Tensor]:
    if args.smoke:
        return {name: image[:, :60, :70] for name, image in photographs().items()}
    return image_folder(args.data_root / folder)


def learnt_and_kept(args) -> tuple[list[Tensor], list[Tensor]]:
    """Training images, and the middles of those that validate."""
    images = list(load(args, "bsds300/images/train").values())
    kept = 1 if args.smoke else KEPT
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(1)).tolist()
    side = min(CROP, *(min(image.shape[1:]) for image in images))
    crops = []
    for image in (images[i] for i in order[:kept]):
        top, left = (image.shape[1] - side) // 2, (image.shape[2] - side) // 2
        crops.append(image[:, top : top + side, left : left + side].to(args.device))
    return [images[i].to(args.device) for i in order[kept:]], crops


def noisy(image: Tensor, seed: int) -> Tensor:
    """The same for every method and device."""
    noise = torch.randn(image.shape, generator=torch.Generator().manual_seed(seed))
    return image + NOISE * noise.to(image.device)


def estimate(network: UNet | Denoiser, image: Tensor) -> Tensor:
    """The mean, which either network gives for its estimate; images ``(channels, H, W)``."""
    with torch.no_grad():
        if isinstance(network, UNet):
            return 255 * network(image[None] / 255)[0][0]
        return predict(network, image)[0].mean[0]


def settings(args) -> dict:
    """What the rows of training and test depend on."""
    names = ("num_steps", "width", "depth", "batch_size", "lr")
    return {name: getattr(args, name) for name in names}


@torch.no_grad()
def predict(network: Denoiser, image: Tensor):
    """Every pixel's distribution, and what it follows from."""
    size = image.shape[-2], image.shape[-1]
    hood = Neighborhood.grid(*size, device=image.device)
    law = hood, *network(hood, image[None])
    return predict_pixels(*law, size), law


def psnr(image: Tensor, clean: Tensor) -> float:
    """In decibels, of values clipped to grey levels."""
    return peak_signal_noise_ratio(image, clean.float(), data_range=(0.0, 255.0)).item()


def log_gaussian(mean: Tensor, clean: Tensor, width: float) -> float:
    """Nats a value: of a Gaussian's mass on one grey level, tails at 0 and 255."""
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


def learn(args, method: str, seed: int, images: list[Tensor], watch: Watch | None = None):
    """
    Fits, goes on, or loads what has been fitted: a U-Net by its squared error; or one by the
    logarithm of each patch's ("trunk"), and for the last fifth of the steps alone or with an NMM
    on top. The U-Net's rate falls along the same line in all.
    """
    pyro.set_rng_seed(seed)  # all methods start from the same weights
    unet = UNet(width=args.width, depth=args.depth, tile=PATCH).to(args.device)
    start = args.num_steps - args.num_steps // 5

    def fit(network: UNet | Denoiser, part: str, steps: tuple[int, int], **options):
        first, last = steps
        path = args.checkpoints / f"{part}.{seed}.pt"

        def watched(steps: range) -> Iterator[int]:
            if steps and not images:
                raise ValueError(f"--checkpoints: {path} is not at its end, run the task train")
            for step in (*steps, last - first):
                if watch is not None and step:
                    watch(network, part, first + step)
                if step < last - first:
                    yield step

        fit_denoiser(
            network, partial(random_patches, images, args.batch_size, PATCH),
            num_steps=last - first, checkpoint=path,
            settings=f"{seed} {args.width} {args.depth} {args.batch_size}", progress=watched,
            **options,
        )  # fmt: skip
        return network

    if method == "U-Net":
        return fit(unet, method, (0, args.num_steps), lr=args.lr)
    fit(unet, "trunk", (0, start), lr=args.lr, last_rate=0.2, loss="log")
    rest = start, args.num_steps
    if method == "U-Net-log":
        return fit(unet, method, rest, lr=0.2 * args.lr, loss="log")
    return fit(Denoiser(unet).to(args.device), method, rest, lr=args.lr, unet_rate=0.2)


def train(args, results: Records) -> None:
    images, crops = learnt_and_kept(args)
    noised = [noisy(crop, i) for i, crop in enumerate(crops)]
    for seed, method in itertools.product(range(args.num_seeds), args.methods):

        def watch(network, part: str, step: int, seed=seed) -> None:
            key = {"task": "train", "method": part, "seed": seed, "step": step,
                   "settings": settings(args)}  # fmt: skip
            if step % args.watch_every == 0 and not results.has(**key):
                pairs = zip(noised, crops, strict=True)
                found = [psnr(estimate(network, x), y) for x, y in pairs]
                results.add(**key, PSNR=statistics.mean(found))

        learn(args, method, seed, images, watch)


def test(args, results: Records) -> None:
    _, crops = learnt_and_kept(args)
    for seed, method in itertools.product(range(args.num_seeds), args.methods):
        network = learn(args, method, seed, [])
        if isinstance(network, UNet):
            pairs = [(estimate(network, noisy(y, i)), y) for i, y in enumerate(crops)]
            half = torch.cat([(x - y).abs().flatten() for x, y in pairs]).quantile(0.9).item()
            widths = {}
            for name, density in DENSITIES.items():
                quality = partial(mean_over, pairs, density)
                widths[name] = max(torch.logspace(0, 1.5, 61).tolist(), key=quality)
        for dataset, folder in FOLDERS.items():
            for number, (name, image) in enumerate(load(args, folder).items()):
                key = {"task": "test", "dataset": dataset, "method": method, "seed": seed,
                       "image": name, "settings": settings(args)}  # fmt: skip
                if results.has(**key):
                    continue
                clean = image.to(args.device)
                x = noisy(clean, 1000 + number)
                if isinstance(network, UNet):
                    mean = estimate(network, x)
                    found = Prediction(mean, mean - half, mean + half)
                    row = {k: f(mean, clean, widths[k]) for k, f in DENSITIES.items()}
                else:
                    found, law = predict(network, x)
                    found = Prediction(*(t[0] for t in found))
                    row = {"log p": pixel_log_probs(*law, clean.flatten(1)).mean().item()}
                row["coverage"] = found.coverage(clean).item()
                row["length"] = (found.high - found.low).mean().item()
                results.add(**key, PSNR=psnr(found.mean, clean), **row)


def mean_over(pairs: list[tuple[Tensor, Tensor]], density: Callable, width: float) -> float:
    return statistics.mean(density(x, y, width) for x, y in pairs)


def cost(args, results: Records) -> None:
    """Seconds of a step, the networks in turn, and the process's peak memory under each."""
    key = {"task": "cost", "settings": settings(args)}
    if results.has(**key):
        return
    patches = random_patches(list(photographs().values()), args.batch_size).to(args.device)
    runs, memory, seconds = {}, {}, {method: [] for method in ("U-Net", "NMM")}
    for method in seconds:  # the NMM's after the U-Net's, and with it in memory
        unet = UNet(width=args.width, depth=args.depth, tile=PATCH).to(args.device)
        network = unet if method == "U-Net" else Denoiser(unet).to(args.device)
        runs[method] = partial(fit_denoiser, network, lambda: patches, num_steps=7, lr=args.lr)
        runs[method]()
        watcher = PeakMemory()
        runs[method]()
        watcher.done.set()
        memory[method] = watcher.peak / 2**20
    for _ in range(1 if args.smoke else 6):
        for method, run in runs.items():
            marks: list[float] = []
            run(progress=partial(clocked, marks))
            seconds[method].append(statistics.median(b - a for a, b in pairwise(marks[2:])))
    ratio = statistics.median(b / a for a, b in zip(*seconds.values(), strict=True))
    medians = {method: statistics.median(times) for method, times in seconds.items()}
    results.add(**key, ratio=ratio, MiB=memory, seconds=medians)


def clocked(marks: list[float], steps: range) -> Iterator[int]:
    """When each step starts, and the last one ends."""
    for step in steps:
        marks.append(time.perf_counter())
        yield step
    marks.append(time.perf_counter())


TASKS = {"train": train, "test": test, "cost": cost}


def main(args) -> Records:
    torch.set_num_threads(args.num_threads)
    if args.smoke:
        args.num_steps, args.watch_every, args.num_seeds = 5, 1, 1
        args.width, args.depth, args.batch_size = 6, 1, 2
    results = Records(args.results)
    for task in args.tasks:
        TASKS[task](args, results)
    return results


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tasks", nargs="+", choices=TASKS)
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    parser.add_argument("--num-seeds", type=int, default=1)
    parser.add_argument("--num-steps", type=int, default=10_000)
    parser.add_argument("--watch-every", type=int, default=1000, help="steps between validations")
    parser.add_argument("--batch-size", type=int, default=16, help="patches of 32 x 32")
    parser.add_argument("--width", type=int, default=48, help="filters of the U-Net")
    parser.add_argument("--depth", type=int, default=5, help="of the U-Net")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--num-threads", type=int, default=1)
    parser.add_argument("--checkpoints", type=Path, default=Path("output/denoising"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--smoke", action="store_true", help="seconds, on two photographs")
    return parser


if __name__ == "__main__":
    main(parser().parse_args())
