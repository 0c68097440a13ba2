# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
Denoise photographs by a U-Net, and by an NMM over all pixels on the same U-Net, which adds an
interval for each pixel. By default it trains on patches of one of scikit-learn's two photographs
and denoises the other.

    python -m examples.denoising --output output/denoising.png
"""

from __future__ import annotations

import time
from argparse import ArgumentParser
from functools import partial
from pathlib import Path

import pyro
import torch
from torch import Tensor
from torchmetrics.functional.image import peak_signal_noise_ratio

from examples.common import options, progress_bar
from examples.denoising.drawing import draw
from examples.denoising.intervals import Intervals
from examples.denoising.model import Denoiser, UNet
from examples.denoising.training import (
    fit_images,
    fit_unet,
    image_folder,
    photographs,
    random_patches,
)
from pyro_nmm.fitting import Steps


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
    size, mixture = (noisy.shape[-2], noisy.shape[-1]), network(noisy[None])
    intervals, hood = mixture.intervals(level)._asdict(), mixture.hood
    images = {name: value[0].unflatten(-1, size) for name, value in intervals.items()}
    attention = hood.softmax(mixture.logits)[0, 0]
    return images | {"itself": attention[hood.source == hood.target].view(size)}


def learn(args, name: str, train: list[Tensor]) -> UNet | Denoiser:
    """Fit a U-Net, or a U-Net with an NMM on top in the last fifth of the steps."""
    refining = max(1, args.num_steps // 5)

    def patches() -> Tensor:
        return random_patches(train, args.batch_size)

    def steps(part: str, number: int) -> Steps:
        checkpoint = args.checkpoint and args.checkpoint.with_suffix(f".{part}.pt")
        bar = partial(progress_bar, desc=part)
        return Steps(num_steps=number, lr=args.lr, checkpoint=checkpoint, progress=bar)

    unet = UNet(width=args.width, depth=args.depth, tile=32).to(args.device)
    if name == "U-Net":
        fit_unet(unet, patches, steps(name, args.num_steps))
        return unet
    trunk = steps("trunk", max(1, args.num_steps - refining))
    fit_unet(unet, patches, trunk, loss="log", last_rate=0.2)
    network = Denoiser(unet).to(args.device)
    fit_images(network, patches, steps(name, refining), unet_rate=0.2)
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
