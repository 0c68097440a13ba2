# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
Denoising with a U-Net, and with an NMM over pixels on the same U-Net (the paper's section 5.2).

    python benchmarks/images.py train test cost --data-root F

Tasks: ``train`` (all methods, from the same weights, on patches of BSD300's training images that
are drawn alike; 20 of the images are kept for validation), ``test`` (BSD300's test images and
Kodak24, with the same noise of standard deviation 25 for all) and ``cost`` (seconds and memory of a
step). F holds ``bsds300/images/{train,test}`` and ``kodak24``. Training saves to ``--checkpoints``
and goes on from there; ``--results`` gets a line for each point of the curves and for each image,
and what is there already is not run again. ``benchmarks/report.py`` makes the tables and the
figure.
"""

from __future__ import annotations

import itertools
import time
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import NamedTuple

import common
import images_scores as scores
import pyro
import torch
from common import RESULTS, Records, arguments
from torch import Tensor

from pyro_nmm import GaussianConcentrations
from pyro_nmm.datasets.images import image_folder, photographs, random_patches
from pyro_nmm.guides import fit_images, fit_unet
from pyro_nmm.guides.fitting.checkpoints import load_checkpoint, save_checkpoint
from pyro_nmm.models import Denoiser, UNet


class Part(NamedTuple):
    """Of a method on a fitted U-Net: its network, its windows, its gradient."""

    network: dict = {}
    radius: int = 1
    estimator: str = "no_score"


PARTS = {
    "NMM": Part(),
    # Each pixel for itself: a U-Net with widths, and the NMM's likelihood.
    "U-Net-widths": Part(radius=0),
    "NMM-one-width": Part({"spread": False}),
    "NMM-one-step-credit": Part(estimator="one_step_credit"),
    # The paper's concentrations and attention; the scale that makes their sums start at 20.
    "NMM-Gaussian": Part({"spread": False, "concentrations": GaussianConcentrations,
                          "sigma": 12.8, "scale": 0.88, "gamma": 5.0}),
}  # fmt: skip
METHODS = ["U-Net", "U-Net-log", *PARTS]
Watch = Callable[[UNet | Denoiser, str, int], None]
FOLDERS = {"bsds300": "bsds300/images/test", "kodak24": "kodak24"}
NOISE, KEPT, CROP, PATCH = 25.0, 20, 128, 32


def load(args, folder: str) -> dict[str, Tensor]:
    if args.smoke:
        return {name: image[:, :60, :70] for name, image in photographs().items()}
    return image_folder(args.data_root / folder)


def learnt_and_kept(args) -> tuple[list[Tensor], list[tuple[Tensor, Tensor]]]:
    """Training images, and the middles of those that validate, noisy and clean."""
    images = list(load(args, "bsds300/images/train").values())
    kept = 1 if args.smoke else KEPT
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(1)).tolist()
    crops = [middle(images[i], CROP).to(args.device) for i in order[:kept]]
    pairs = [(noisy(crop, i), crop) for i, crop in enumerate(crops)]
    return [images[i].to(args.device) for i in order[kept:]], pairs


def middle(image: Tensor, side: int) -> Tensor:
    height, width = (min(side, full) for full in image.shape[1:])
    top, left = (image.shape[1] - height) // 2, (image.shape[2] - width) // 2
    return image[:, top : top + height, left : left + width]


def noisy(image: Tensor, seed: int) -> Tensor:
    """The same for every method and device."""
    noise = torch.randn(image.shape, generator=torch.Generator().manual_seed(seed))
    return image + NOISE * noise.to(image.device)


def settings(args) -> dict:
    """What the rows of training depend on; those of testing on the crop, too."""
    names = ("num_steps", "width", "depth", "batch_size", "lr")
    return {name: getattr(args, name) for name in names}


def unet_of(args) -> UNet:
    return UNet(width=args.width, depth=args.depth, tile=PATCH)


def learn(args, method: str, seed: int, images: list[Tensor], watch: Watch) -> None:
    """
    Fits, or goes on: a U-Net by its squared error; or one by the logarithm of each patch's
    ("trunk"), and for the last fifth of the steps alone or with an NMM on top. The U-Net's rate
    falls along the same line in all.
    """
    pyro.set_rng_seed(seed)  # all methods start from the same weights
    unet = unet_of(args).to(args.device)
    start = args.num_steps - args.num_steps // 5

    def fit(network: UNet | Denoiser, part: str, steps: tuple[int, int], **options) -> None:
        first, last = steps

        def watched(steps: range) -> Iterator[int]:
            for step in (*steps, last - first):
                if step:
                    watch(network, part, first + step)
                if step < last - first:
                    yield step

        loop = fit_unet if isinstance(network, UNet) else fit_images
        loop(
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
    network = build(method, unet_of(args))
    network.load_state_dict(state["network"])
    return network.to(args.device).eval()


def train(args, results: Records) -> None:
    images, pairs = learnt_and_kept(args)
    for seed, method in itertools.product(args.seeds, args.methods):
        if fitted(args, method, seed).exists():
            continue
        radius = PARTS[method].radius if method in PARTS else 1

        def watch(network, part: str, step: int, seed=seed, radius=radius) -> None:
            key = {"task": "train", "method": part, "seed": seed, "step": step}
            key["settings"] = settings(args)
            if step % args.watch_every or results.has(**key):
                return
            found = [scores.validated(network, x, clean, radius) for x, clean in pairs]
            results.add(**key, **{name: mean(row[name] for row in found) for name in found[0]})

        learn(args, method, seed, images, watch)


def test(args, results: Records) -> None:
    _, pairs = learnt_and_kept(args)
    for seed, method in itertools.product(args.seeds, args.methods):
        left = [image for image in tested(args, method, seed) if not results.has(**image[0])]
        if left:
            radius = PARTS[method].radius if method in PARTS else 1
            score = scores.fitted_score(recall(args, method, seed), pairs, radius)
            for key, clean, x in left:
                results.add(**key, **score(x, clean))


def tested(args, method: str, seed: int) -> Iterator[tuple[dict, Tensor, Tensor]]:
    """Images, clean and noisy, and what their rows begin with."""
    crop = {"crop": args.crop} if args.crop else {}
    for dataset, folder in FOLDERS.items():
        for number, (name, image) in enumerate(load(args, folder).items()):
            key = {"task": "test", "dataset": dataset, "method": method, "seed": seed}
            key |= {"image": name, "settings": settings(args) | crop}
            clean = (middle(image, args.crop) if args.crop else image).to(args.device)
            yield key, clean, noisy(clean, 1000 + number)


def cost(args, results: Records) -> None:
    """Seconds of a step, the networks in turn, and the process's peak memory under each."""
    patches = random_patches(list(photographs().values()), args.batch_size).to(args.device)

    def run(network: UNet | Denoiser) -> float:
        marks: list[float] = []

        def clocked(steps: range) -> Iterator[int]:
            for step in steps:
                marks.append(time.perf_counter())
                yield step
            marks.append(time.perf_counter())

        loop = fit_unet if isinstance(network, UNet) else fit_images
        loop(network, lambda: patches, num_steps=7, lr=args.lr, progress=clocked)
        return median(b - a for a, b in itertools.pairwise(marks[2:]))

    makers = {
        "U-Net": lambda: partial(run, unet_of(args).to(args.device)),
        "NMM": lambda: partial(run, Denoiser(unet_of(args)).to(args.device)),
    }
    for key in results.missing(task="cost", settings=settings(args)):
        results.add(**key, **common.cost(makers, 1 if args.smoke else 6))


TASKS = {task.__name__: task for task in (train, test, cost)}


def main(args) -> Records:
    torch.set_num_threads(args.num_threads)
    if args.smoke:
        args.num_steps, args.watch_every, args.seeds = 5, 1, [0]
        args.width, args.depth, args.batch_size = 6, 1, 2
    return common.run(args, TASKS)


def parser() -> ArgumentParser:
    return arguments(
        __doc__, TASKS, "seconds, on two photographs", {"methods": METHODS}, methods=METHODS,
        seeds=[0], num_steps=10_000, watch_every=(1000, "steps between validations"),
        batch_size=(16, "patches of 32 x 32"), width=(48, "filters of the U-Net"),
        depth=(5, "of the U-Net"), lr=1e-3, crop=(int, "side of the test images' middles"),
        num_threads=1, checkpoints=Path("output/denoising"), results=RESULTS / "images.jsonl",
        data_root=Path, device="cpu",
    )  # fmt: skip


if __name__ == "__main__":
    main(parser().parse_args())
