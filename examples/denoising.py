# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
Denoise photographs by a U-Net, and by an NMM over all pixels on the same U-Net, which adds an
interval for each pixel. By default it trains on patches of one of scikit-learn's two photographs
and denoises the other.

    python examples/denoising.py --output output/denoising.png
"""

from __future__ import annotations

import time
from argparse import ArgumentParser
from functools import partial
from pathlib import Path

import pyro
import torch
from common import options, progress_bar
from drawing.denoising import draw
from torch import Tensor
from torchmetrics.functional.image import peak_signal_noise_ratio

from pyro_nmm import Intervals, Neighborhood, NeighborMixture
from pyro_nmm.datasets import image_folder, photographs, random_patches
from pyro_nmm.guides import fit_images, fit_unet
from pyro_nmm.models import Denoiser, UNet


def load(args) -> tuple[list[Tensor], Tensor]:
    """Training images, and the image to denoise."""
    if args.data_root is None:
        images = photographs()
        train, test = [images["china"]], images["flower"]
    else:
        train = list(image_folder(args.data_root / "bsds300/images/train").values())
        test = next(iter(image_folder(args.data_root / "kodak24").values()))
    side = args.crop or max(test.shape)
    top, left = (max(0, (extent - side) // 2) for extent in test.shape[-2:])
    return train, test[:, top : top + side, left : left + side]


def psnr(image: Tensor, clean: Tensor) -> float:
    """Peak signal-to-noise ratio in decibels, of values clipped to grey levels."""
    return peak_signal_noise_ratio(image, clean.float(), data_range=(0.0, 255.0)).item()


@torch.no_grad()
def denoise(network: UNet | Denoiser, noisy: Tensor, level: float = 0.9) -> dict[str, Tensor]:
    """Images ``(channels, H, W)``: the mean; for an NMM also the interval and self-attention."""
    if isinstance(network, UNet):
        return {"mean": 255 * network(noisy[None] / 255)[0][0]}
    size = noisy.shape[-2], noisy.shape[-1]
    hood = Neighborhood.grid(*size, device=noisy.device)
    mix = NeighborMixture(hood, *network(hood, noisy[None]))
    intervals = mix.intervals(level)._asdict()
    images = {name: value[0].unflatten(-1, size) for name, value in intervals.items()}
    return images | {"itself": mix.attention[0, 0][hood.source == hood.target].view(size)}


def learn(args, name: str, train: list[Tensor]) -> UNet | Denoiser:
    """Fit a U-Net, or a U-Net with an NMM on top in the last fifth of the steps."""
    refining = max(1, args.num_steps // 5)

    def fit(network: UNet | Denoiser, part: str, num_steps: int, **options) -> None:
        loop = fit_unet if isinstance(network, UNet) else fit_images
        loop(
            network, lambda: random_patches(train, args.batch_size), lr=args.lr,
            num_steps=num_steps, **options,
            checkpoint=args.checkpoint and args.checkpoint.with_suffix(f".{part}.pt"),
            progress=partial(progress_bar, desc=part),
        )  # fmt: skip

    unet = UNet(width=args.width, depth=args.depth, tile=32).to(args.device)
    if name == "U-Net":
        fit(unet, name, args.num_steps)
        return unet
    fit(unet, "trunk", max(1, args.num_steps - refining), loss="log", last_rate=0.2)
    network = Denoiser(unet).to(args.device)
    fit(network, name, refining, unet_rate=0.2)
    return network


def main(args) -> dict:
    train, clean = load(args)
    train, clean = [image.to(args.device) for image in train], clean.to(args.device)
    networks: dict[str, UNet | Denoiser] = {}
    result: dict[str, dict] = {}
    pyro.set_rng_seed(args.seed)
    noisy = clean + args.noise * torch.randn(clean.shape).to(args.device)
    for name in ("U-Net", "NMM"):
        pyro.set_rng_seed(args.seed)
        start = time.perf_counter()
        networks[name] = learn(args, name, train)
        result[name] = {"seconds": time.perf_counter() - start}
    predictions = {name: denoise(network, noisy) for name, network in networks.items()}
    shown = {"noisy": noisy} | {name: p["mean"] for name, p in predictions.items()}
    prediction = predictions["NMM"]
    intervals = Intervals(*(prediction[name] for name in Intervals._fields))
    print(f"{'':8}{'PSNR, dB':>10}{'seconds':>10}")
    for name, image in shown.items():
        result.setdefault(name, {})["PSNR"] = psnr(image, clean)
        seconds = f"{result[name]['seconds']:10.1f}" if "seconds" in result[name] else ""
        print(f"{name:8}{result[name]['PSNR']:10.2f}{seconds}")
    result["NMM"]["coverage"] = intervals.coverage(clean).item()
    print(f"{100 * result['NMM']['coverage']:.1f} % of values lie in the NMM's 90 % intervals")
    if args.output:
        extra = {"90 % interval, grey levels": (prediction["high"] - prediction["low"]).mean(0),
                 "attention to the pixel itself": prediction["itself"]}  # fmt: skip
        draw(args.output, clean, shown, extra, result)
    return result


def parser() -> ArgumentParser:
    return options(
        __doc__, "denoising.png", noise=(25.0, "standard deviation at the test"),
        crop=(256, "side of the test image; 0: all"), width=24, depth=3, batch_size=8, lr=1e-3,
        num_steps=1500, checkpoint=(Path, "resumes from there"), seed=0, device="cpu",
        data_root=(Path, "with bsds300/images/train and kodak24"),
    )  # fmt: skip


if __name__ == "__main__":
    main(parser().parse_args())
