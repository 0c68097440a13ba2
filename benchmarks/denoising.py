# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
Denoising with a U-Net, and with an NMM over pixels on the same U-Net (the paper's section 5.2).

    python benchmarks/denoising.py train test cost --data-root F

Tasks: ``train`` (all methods, the same patches of BSD300's training images and the same noise;
20 of the images are kept for validation), ``test`` (BSD300's test images and Kodak24, noise of
standard deviation 25) and ``cost`` (seconds and memory of a step). F holds
``bsds300/images/{train,test}`` and ``kodak24``. Training saves to ``--checkpoints`` and goes on
from there; ``--results`` gets a line for each point of the curves and for each image, and what is
there already is not run again. ``benchmarks/report.py`` makes the tables and the figure.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import NormalDist

import pyro
import torch
from records import Records
from speed import PeakMemory
from torch import Tensor
from torchmetrics.functional.image import peak_signal_noise_ratio

from pyro_nmm import Neighborhood
from pyro_nmm.guides import fit_denoiser
from pyro_nmm.images import image_folder, photographs, random_patches
from pyro_nmm.models import Denoiser, UNet, pixel_log_probs, predict_pixels

RESULTS = Path(__file__).parent / "results" / "denoising.jsonl"
METHODS = {"U-Net": "squared", "U-Net-log": "log", "NMM": None}
Watch = Callable[[UNet | Denoiser, int], None]
FOLDERS = {"bsds300": "bsds300/images/test", "kodak24": "kodak24"}
NOISE, KEPT, CROP = 25.0, 20, 128


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
    upper = torch.special.ndtr((clean + 0.5 - mean) / width).where(clean < 255, 1.0)
    lower = torch.special.ndtr((clean - 0.5 - mean) / width).where(clean > 0, 0.0)
    return (upper - lower).clamp(min=1e-12).log().mean().item()


def learn(args, method: str, seed: int, images: list[Tensor], watch: Watch | None = None):
    """
    Fits, goes on, or loads what has been fitted: a U-Net, by its squared error or by the logarithm
    of each patch's; or the latter with an NMM on top for the last fifth of the steps.
    """
    pyro.set_rng_seed(seed)  # both methods start from the same weights
    unet = UNet(width=args.width, depth=args.depth).to(args.device)
    refining = args.num_steps // 5

    def fit(network: UNet | Denoiser, part: str, first: int, last: int, loss: str = "squared"):
        def watched(steps: range) -> Iterator[int]:
            for step in (*steps, last - first):
                if watch is not None and step:
                    watch(network, first + step)
                if step < last - first:
                    yield step

        fit_denoiser(
            network, partial(random_patches, images, args.batch_size), lr=args.lr,
            unet_rate=0.2, loss=loss, num_steps=last - first,
            checkpoint=args.checkpoints / f"{part}.{seed}.pt",
            settings=f"{seed} {args.width} {args.depth} {args.batch_size}", progress=watched,
        )  # fmt: skip
        return network

    if loss := METHODS[method]:
        return fit(unet, method, 0, args.num_steps, loss)
    fit(unet, "trunk", 0, args.num_steps - refining, loss="log")
    network = Denoiser(unet).to(args.device)
    return fit(network, method, args.num_steps - refining, args.num_steps)


def train(args, results: Records) -> None:
    images, crops = learnt_and_kept(args)
    noised = [noisy(crop, i) for i, crop in enumerate(crops)]
    for seed, method in itertools.product(range(args.num_seeds), args.methods):

        def watch(network, step: int, method=method, seed=seed) -> None:
            key = {"task": "train", "method": method, "seed": seed, "step": step}
            if step % args.watch_every == 0 and not results.has(**key):
                pairs = zip(noised, crops, strict=True)
                found = [psnr(estimate(network, x), y) for x, y in pairs]
                results.add(**key, PSNR=statistics.mean(found))

        learn(args, method, seed, images, watch)


def test(args, results: Records) -> None:
    _, crops = learnt_and_kept(args)
    for seed, method in itertools.product(range(args.num_seeds), args.methods):
        if not (args.checkpoints / f"{method}.{seed}.pt").exists():
            raise ValueError(f"--checkpoints has no {method}.{seed}.pt: run the task train first")
        network = learn(args, method, seed, [])
        width = 0.0
        if isinstance(network, UNet):
            pairs = [(estimate(network, noisy(y, i)), y) for i, y in enumerate(crops)]
            widths = torch.logspace(0, 1.5, 61).tolist()
            width = max(widths, key=lambda w: sum(log_gaussian(x, y, w) for x, y in pairs))
        for dataset, folder in FOLDERS.items():
            for number, (name, image) in enumerate(load(args, folder).items()):
                key = {"task": "test", "dataset": dataset, "method": method, "seed": seed,
                       "image": name}  # fmt: skip
                if results.has(**key):
                    continue
                clean = image.to(args.device)
                x = noisy(clean, 1000 + number)
                if isinstance(network, UNet):
                    mean = estimate(network, x)
                    inside = (mean - clean).abs() <= -NormalDist().inv_cdf(0.05) * width
                    row = {"width": width, "log p": log_gaussian(mean, clean, width)}
                else:
                    (means, low, high), law = predict(network, x)
                    mean, inside = means[0], (clean >= low[0]) & (clean <= high[0])
                    row = {"log p": pixel_log_probs(*law, clean.flatten(1)).mean().item()}
                row["coverage"] = inside.float().mean().item()
                results.add(**key, PSNR=psnr(mean, clean), **row)


def cost(args, results: Records) -> None:
    """Seconds of a step, the networks in turn, and the process's peak memory under each."""
    if results.has(task="cost"):
        return
    patches = random_patches(list(photographs().values()), args.batch_size).to(args.device)
    steps, memory, seconds = {}, {}, {method: [] for method in ("U-Net", "NMM")}
    for method in seconds:
        unet = UNet(width=args.width, depth=args.depth).to(args.device)
        network = unet if method == "U-Net" else Denoiser(unet).to(args.device)
        steps[method] = partial(fit_denoiser, network, lambda: patches, num_steps=1, lr=args.lr)
        steps[method]()
        watcher = PeakMemory()
        for _ in range(3):
            steps[method]()
        watcher.done.set()
        memory[method] = watcher.peak / 2**20
    for _ in range(3 if args.smoke else 25):
        for method, step in steps.items():
            start = time.perf_counter()
            step()
            seconds[method].append(time.perf_counter() - start)
    ratio = statistics.median(b / a for a, b in zip(*seconds.values(), strict=True))
    medians = {method: statistics.median(times) for method, times in seconds.items()}
    results.add(task="cost", ratio=ratio, MiB=memory, seconds=medians, width=args.width,
                depth=args.depth, patches=args.batch_size)  # fmt: skip


TASKS = {"train": train, "test": test, "cost": cost}


def main(args) -> Records:
    torch.set_num_threads(args.num_threads)
    if args.smoke:
        args.num_steps, args.watch_every, args.num_seeds = 5, 2, 1
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
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
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
