# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
Denoising with a U-Net, and with an NMM over pixels on the same U-Net (the paper's section 5.2).

    python benchmarks/images.py train test tiles spectra cost --data-root F

Tasks: ``train`` (all methods, from the same weights, on patches of BSD300's training images that
are drawn alike; 20 of the images are kept for validation), ``test`` (BSD300's test images and
Kodak24, with the same noise for all, of the standard deviations ``--noise``), ``tiles`` (how much
pixels of a tile say of each other), ``spectra`` (of samples, and of the error that they stand for)
and ``cost`` (seconds and memory of a step). F holds ``bsds300/images/{train,test}`` and
``kodak24``. Training saves to ``--checkpoints`` and goes on from there. A row without ``noise`` is
of a standard deviation of 25.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from statistics import mean, median

import pyro
import torch
from torch import Tensor

from benchmarks.images import joint as images_joint
from benchmarks.images import scores
from benchmarks.shared.common import RESULTS, Records, run
from benchmarks.shared.timing import median_cost
from pyro_nmm import GaussianConcentrations
from pyro_nmm.datasets.images import image_folder, photographs, random_patches
from pyro_nmm.guides import fit_images, fit_unet
from pyro_nmm.guides.fitting.checkpoints import load_checkpoint, save_checkpoint
from pyro_nmm.models import Denoiser, UNet

#: The paper's concentrations and attention; the scale that makes their sums start at 20.
GAUSSIAN = {"concentrations": GaussianConcentrations, "sigma": 12.8, "scale": 0.88}
GAUSSIAN |= {"spread": False, "gamma": 5.0}
#: Of an NMM on a fitted U-Net: options of its network, its windows and its gradient.
PARTS = {
    "NMM": {},
    # Each pixel for itself: a U-Net with widths, and the NMM's likelihood.
    "U-Net-widths": {"radius": 0},
    "NMM-one-width": {"network": {"spread": False}},
    "NMM-one-step-credit": {"estimator": "one_step_credit"},
    "NMM-Gaussian": {"network": GAUSSIAN},
    # In one phase, at a constant rate, on the bound alone.
    "NMM-paper": {"network": GAUSSIAN, "last_rate": 1.0, "mean_weight": 0.0},
}
METHODS = ["U-Net", "U-Net-log", *PARTS]
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
    top, left = (max(0, full - side) // 2 for full in image.shape[1:])
    return image[:, top : top + side, left : left + side]


def noisy(image: Tensor, seed: int, sd: float = NOISE) -> Tensor:
    """The same for every method and device, and but for its size for every ``sd``."""
    noise = torch.randn(image.shape, generator=torch.Generator().manual_seed(seed))
    return image + sd * noise.to(image.device)


def settings(args) -> dict:
    """What the rows of training depend on; those of testing on the crop, too."""
    names = ("num_steps", "width", "depth", "batch_size", "lr")
    known = {name: getattr(args, name) for name in names}
    return known | ({"run": args.run} if args.run else {})


def unet_of(args) -> UNet:
    return UNet(width=args.width, depth=args.depth, tile=PATCH).to(args.device)


def build(method: str, unet: UNet) -> UNet | Denoiser:
    if method not in PARTS:
        return unet
    network = Denoiser(unet, **PARTS[method].get("network", {}))
    if PARTS[method].get("network") is GAUSSIAN:
        network.gamma.requires_grad_(False)
    return network.to(next(unet.parameters()).device)


def predict(network: UNet | Denoiser, method: str, x: Tensor):
    return scores.predicted(network, x, PARTS.get(method, {}).get("radius", 1))


def phases(args, method: str) -> dict[str, tuple[int, int, dict]]:
    """
    What is fitted from one step to another, and how: a U-Net by its squared error; or one by the
    logarithm of each patch's ("trunk"), and for the last fifth of the steps alone or with an NMM on
    top. The U-Net's rate falls along the same line in all.
    """
    if method == "U-Net":
        return {method: (0, args.num_steps, {"lr": args.lr})}
    options = {"lr": 0.2 * args.lr, "loss": "log"}
    if method in PARTS:
        options = {k: v for k, v in PARTS[method].items() if k != "network"}
        if method == "NMM-paper":
            return {method: (0, args.num_steps, {"lr": args.lr, **options})}
        options |= {"lr": args.lr, "unet_rate": 0.2}
    start = args.num_steps - args.num_steps // 5
    trunk = {"lr": args.lr, "last_rate": 0.2, "loss": "log"}
    return {"trunk": (0, start, trunk), method: (start, args.num_steps, options)}


def fitted(args, part: str, seed: int) -> Path:
    """What ``train`` leaves when a part is at its end, and ``test`` asks for."""
    return args.checkpoints / f"{part}.{seed}.fitted.pt"


def train(args, results: Records) -> None:
    """Fits, or goes on."""
    images, crops = learnt_and_kept(args)
    pairs = [(noisy(crop, i), crop) for i, crop in enumerate(crops)]
    draw = partial(random_patches, images, args.batch_size, PATCH)
    for seed, method in itertools.product(args.seeds, args.methods):
        if fitted(args, method, seed).exists():
            continue
        pyro.set_rng_seed(seed)  # all methods start from the same weights
        network = unet_of(args)
        for part, (first, last, options) in phases(args, method).items():
            network = build(part, network)
            key = {"task": "train", "method": part, "seed": seed}
            loop = fit_unet if isinstance(network, UNet) else fit_images
            loop(
                network, draw, num_steps=last - first, **options,
                checkpoint=args.checkpoints / f"{part}.{seed}.pt",
                settings=f"{seed} {args.width} {args.depth} {args.batch_size}",
                progress=partial(watched, args, results, network, pairs, key, first, last),
            )  # fmt: skip
            state = {"settings": settings(args), "network": network.state_dict()}
            save_checkpoint(state, fitted(args, part, seed))


def watched(args, results, network, pairs, key, first: int, last: int, steps) -> Iterator[int]:
    """The steps, with a row of the validation images after every so many."""
    for step in (*steps, last - first):
        now = key | {"step": first + step, "settings": settings(args)}
        if step and not now["step"] % args.watch_every and not results.has(**now):
            found = [scores.validated(predict(network, key["method"], x), y) for x, y in pairs]
            results.add(**now, **{name: mean(row[name] for row in found) for name in found[0]})
        if step < last - first:
            yield step


def recall(args, method: str, seed: int) -> UNet | Denoiser:
    path = fitted(args, method, seed)
    state = load_checkpoint(path)
    if state is None or state["settings"] != settings(args):
        raise ValueError(f"--checkpoints: {path} is not there for {settings(args)}, run train")
    network = build(method, unet_of(args))
    network.load_state_dict(state["network"])
    return network.eval()


def each_image(args, results: Records, task: str, methods: list[str]) -> Iterator[tuple]:
    """The key of every row that has not been measured yet, a prediction, and the clean image."""
    network = cache(partial(recall, args))
    each = {"method": methods, "seed": args.seeds}
    each["noise"] = [None if sd == NOISE else sd for sd in args.noise]
    setting = settings(args) | ({"crop": args.crop} if args.crop else {})
    for dataset in args.datasets:
        images = load(args, FOLDERS[dataset])
        numbers = {name: number for number, name in enumerate(images)}
        names = {"image": list(images), "settings": setting}
        for key in results.missing(task=task, dataset=dataset, **each, **names):
            clean = images[key["image"]].to(args.device)
            clean = middle(clean, args.crop) if args.crop else clean
            x = noisy(clean, 1000 + numbers[key["image"]], key.get("noise", NOISE))
            yield key, predict(network(key["method"], key["seed"]), key["method"], x), clean


def test(args, results: Records) -> None:
    _, crops = learnt_and_kept(args)

    @cache
    def chosen(method: str, seed: int, sd: float) -> dict:
        """What the validation images choose, with noise of the same size."""
        network = recall(args, method, seed)
        pairs = ((noisy(crop, i, sd), crop) for i, crop in enumerate(crops))
        return scores.fitted([(predict(network, method, x), y) for x, y in pairs])

    for key, found, clean in each_image(args, results, "test", args.methods):
        known = chosen(key["method"], key["seed"], key.get("noise", NOISE))
        results.add(**key, **scores.tested(found, clean, **known))


def of_mixtures(measure: Callable, args, results: Records) -> None:
    """A task that is named as the function: of networks that give a joint distribution."""
    known = [method for method in args.methods if method in PARTS]
    for key, mix, clean in each_image(args, results, measure.__name__, known):
        results.add(**key, **measure(mix, clean))


def tiles(args, results: Records) -> None:
    of_mixtures(images_joint.tiles, args, results)


def spectra(args, results: Records) -> None:
    of_mixtures(images_joint.spectra, args, results)


def stepper(args, method: str) -> Callable[[], float]:
    """A function that returns the median seconds of five steps."""
    network = build(method, unet_of(args))
    loop = fit_unet if isinstance(network, UNet) else fit_images
    patches = random_patches(list(photographs().values()), args.batch_size).to(args.device)

    def run() -> float:
        marks: list[float] = []

        def draw() -> Tensor:
            marks.append(time.perf_counter())
            return patches

        loop(network, draw, num_steps=8, lr=args.lr)
        return median(after - before for before, after in itertools.pairwise(marks[2:]))

    return run


def cost(args, results: Records) -> None:
    """Seconds of a step, the networks in turn, and the process's peak memory under each."""
    makers = {method: partial(stepper, args, method) for method in ("U-Net", "NMM")}
    for key in results.missing(task="cost", settings=settings(args)):
        results.add(**key, **median_cost(makers, 1 if args.smoke else 6))


def main(argv: list[str] | None = None) -> Records:
    small = {"num_steps": 5, "watch_every": 1, "width": 6, "depth": 1, "batch_size": 2}
    return run(
        argv, __doc__, (train, test, tiles, spectra, cost), smoke=small,
        choices={"methods": METHODS, "datasets": list(FOLDERS)},
        methods=METHODS, datasets=list(FOLDERS), seeds=[0], num_steps=10_000,
        run=(str, "tells networks apart whose settings and seeds are the same, such as 'second'"),
        noise=([NOISE], "standard deviations at the test, in grey levels"),
        watch_every=(1000, "steps between validations"),
        batch_size=(16, "patches of 32 x 32"), width=(48, "filters of the U-Net"),
        depth=(5, "of the U-Net"), lr=1e-3, crop=(int, "side of the test images' middles"),
        checkpoints=Path("output/denoising"), data_root=Path, device="cpu",
        results=RESULTS / "images.jsonl",
    )  # fmt: skip


if __name__ == "__main__":
    main()
