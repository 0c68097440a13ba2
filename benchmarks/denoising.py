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
from typing import NamedTuple

import pyro
import torch
from pixel_scores import (
    DENSITIES,
    best_factor,
    estimate,
    intervals,
    joint,
    law_of,
    marginal,
    one_width,
    psnr,
    score,
)
from records import Records
from speed import PeakMemory
from torch import Tensor

from pyro_nmm import GaussianConcentrations
from pyro_nmm.datasets.images import image_folder, photographs, random_patches
from pyro_nmm.guides import fit_denoiser
from pyro_nmm.guides.fitting.loop import load_checkpoint, save_checkpoint
from pyro_nmm.models import Denoiser, Prediction, UNet

RESULTS = Path(__file__).parent / "results" / "denoising.jsonl"


class Part(NamedTuple):
    """Of a method on a fitted U-Net: its network, its windows, its gradient."""

    network: dict = {}
    radius: int = 1
    estimator: str = "em"


PARTS = {
    "NMM": Part(),
    # Each pixel for itself: a U-Net with widths, and the NMM's likelihood.
    "U-Net-widths": Part(radius=0),
    "NMM-one-width": Part({"spread": False}),
    "NMM-horizon": Part(estimator="horizon"),
    # The paper's concentrations and attention; the scale that makes their sums start at 20.
    "NMM-Gaussian": Part({"spread": False, "concentrations": GaussianConcentrations,
                          "sigma": 12.8, "scale": 0.88, "gamma": 5.0}),
}  # fmt: skip
METHODS = ("U-Net", "U-Net-log", *PARTS)
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
    crops = [middle(images[i], CROP).to(args.device) for i in order[:kept]]
    return [images[i].to(args.device) for i in order[kept:]], crops


def middle(image: Tensor, side: int) -> Tensor:
    height, width = (min(side, full) for full in image.shape[1:])
    top, left = (image.shape[1] - height) // 2, (image.shape[2] - width) // 2
    return image[:, top : top + height, left : left + width]


def noisy(image: Tensor, seed: int) -> Tensor:
    """The same for every method and device."""
    noise = torch.randn(image.shape, generator=torch.Generator().manual_seed(seed))
    return image + NOISE * noise.to(image.device)


def settings(args) -> dict:
    """What the rows of training and test depend on."""
    names = ("num_steps", "width", "depth", "batch_size", "lr")
    return {name: getattr(args, name) for name in names}


def image_settings(args) -> dict:
    return settings(args) | ({"crop": args.crop} if args.crop else {})


def learn(args, method: str, seed: int, images: list[Tensor], watch: Watch) -> None:
    """
    Fits, or goes on: a U-Net by its squared error; or one by the logarithm of each patch's
    ("trunk"), and for the last fifth of the steps alone or with an NMM on top. The U-Net's rate
    falls along the same line in all.
    """
    pyro.set_rng_seed(seed)  # all methods start from the same weights
    unet = UNet(width=args.width, depth=args.depth, tile=PATCH).to(args.device)
    start = args.num_steps - args.num_steps // 5

    def fit(network: UNet | Denoiser, part: str, steps: tuple[int, int], **options) -> None:
        first, last = steps

        def watched(steps: range) -> Iterator[int]:
            for step in (*steps, last - first):
                if step:
                    watch(network, part, first + step)
                if step < last - first:
                    yield step

        fit_denoiser(
            network, partial(random_patches, images, args.batch_size, PATCH),
            num_steps=last - first, checkpoint=args.checkpoints / f"{part}.{seed}.pt",
            settings=f"{seed} {args.width} {args.depth} {args.batch_size}", progress=watched,
            **options,
        )  # fmt: skip
        state = {"settings": settings(args), "network": network.state_dict()}
        save_checkpoint(state, fitted(args, part, seed))

    if method == "U-Net":
        return fit(unet, method, (0, args.num_steps), lr=args.lr)
    fit(unet, "trunk", (0, start), lr=args.lr, last_rate=0.2, loss="log")
    rest = start, args.num_steps
    if method == "U-Net-log":
        return fit(unet, method, rest, lr=0.2 * args.lr, loss="log")
    network, part = build(method, unet), PARTS[method]
    options = {"radius": part.radius, "estimator": part.estimator}
    return fit(network.to(args.device), method, rest, lr=args.lr, unet_rate=0.2, **options)


def build(method: str, unet: UNet) -> UNet | Denoiser:
    if method not in PARTS:
        return unet
    network = Denoiser(unet, **PARTS[method].network)
    if method == "NMM-Gaussian":
        network.gamma.requires_grad_(False)
    return network


def fitted(args, part: str, seed: int) -> Path:
    """What ``train`` leaves when a part is at its end, and ``test`` asks for."""
    return args.checkpoints / f"{part}.{seed}.fitted.pt"


def recall(args, method: str, seed: int) -> UNet | Denoiser:
    path = fitted(args, method, seed)
    state = load_checkpoint(path)
    if state is None or state["settings"] != settings(args):
        raise ValueError(f"--checkpoints: {path} is not there for {settings(args)}, run train")
    network = build(method, UNet(width=args.width, depth=args.depth, tile=PATCH))
    network.load_state_dict(state["network"])
    return network.to(args.device).eval()


def train(args, results: Records) -> None:
    images, crops = learnt_and_kept(args)
    noised = [noisy(crop, i) for i, crop in enumerate(crops)]
    for seed, method in itertools.product(args.seeds, args.methods):
        if fitted(args, method, seed).exists():
            continue
        radius = PARTS[method].radius if method in PARTS else 1

        def watch(network, part: str, step: int, seed=seed, radius=radius) -> None:
            key = {"task": "train", "method": part, "seed": seed, "step": step,
                   "settings": settings(args)}  # fmt: skip
            if step % args.watch_every or results.has(**key):
                return
            pairs = list(zip(noised, crops, strict=True))
            row = {"PSNR": [psnr(estimate(network, x, radius), y) for x, y in pairs]}
            if isinstance(network, Denoiser):
                laws = [law_of(network, x, radius) for x in noised]
                both = list(zip(laws, crops, strict=True))
                row["log p"] = [marginal(law, y) for law, y in both]
                row["joint"] = [joint(law, y, seed=0) for law, y in both]
            results.add(**key, **{name: statistics.mean(found) for name, found in row.items()})

        learn(args, method, seed, images, watch)


def test(args, results: Records) -> None:
    _, crops = learnt_and_kept(args)
    noised = [noisy(crop, i) for i, crop in enumerate(crops)]
    for seed, method in itertools.product(args.seeds, args.methods):
        left = [(key, clean, x) for key, clean, x in tested(args, method, seed)
                if not results.has(**key)]  # fmt: skip
        if not left:
            continue
        network = recall(args, method, seed)
        if isinstance(network, UNet):
            pairs = [(estimate(network, x), y) for x, y in zip(noised, crops, strict=True)]
            half, widths = one_width(pairs)
        else:
            radius = PARTS[method].radius
            factor = best_factor([law_of(network, x, radius) for x in noised], crops)
        for key, clean, x in left:
            if isinstance(network, UNet):
                mean = estimate(network, x)
                row = {k: f(mean, clean, widths[k]) for k, f in DENSITIES.items()}
                found = Prediction(mean, mean - half, mean + half)
                row = {"PSNR": psnr(mean, clean), **row, **intervals(found, clean)}
            else:
                row = score(network, x, clean, radius, factor)
            results.add(**key, **row)


def tested(args, method: str, seed: int) -> Iterator[tuple[dict, Tensor, Tensor]]:
    """Images, clean and noisy, and what their rows begin with."""
    for dataset, folder in FOLDERS.items():
        for number, (name, image) in enumerate(load(args, folder).items()):
            key = {"task": "test", "dataset": dataset, "method": method, "seed": seed,
                   "image": name, "settings": image_settings(args)}  # fmt: skip
            clean = (middle(image, args.crop) if args.crop else image).to(args.device)
            yield key, clean, noisy(clean, 1000 + number)


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
        args.num_steps, args.watch_every, args.seeds = 5, 1, [0]
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
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--num-steps", type=int, default=10_000)
    parser.add_argument("--watch-every", type=int, default=1000, help="steps between validations")
    parser.add_argument("--batch-size", type=int, default=16, help="patches of 32 x 32")
    parser.add_argument("--width", type=int, default=48, help="filters of the U-Net")
    parser.add_argument("--depth", type=int, default=5, help="of the U-Net")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--crop", type=int, help="side of the test images' middles; default whole")
    parser.add_argument("--num-threads", type=int, default=1)
    parser.add_argument("--checkpoints", type=Path, default=Path("output/denoising"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--smoke", action="store_true", help="seconds, on two photographs")
    return parser


if __name__ == "__main__":
    main(parser().parse_args())
