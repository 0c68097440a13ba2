# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Networks that denoise: U-Nets and NMMs on them, how they are trained and what they predict."""

import torch
from torch import Tensor

from pyro_nmm import GaussianConcentrations, Neighborhood, NeighborMixture
from pyro_nmm.models.images import Denoiser, UNet

#: Training patches of a step, and their side.
BATCH, PATCH = 16, 32
#: The paper's concentrations and attention. With this scale their sums start at 20.
GAUSSIAN = {"concentrations": GaussianConcentrations, "sigma": 12.8, "scale": 0.88}
GAUSSIAN |= {"spread": False, "gamma": 5.0}
#: NMMs: options of the network, and of `fit_images`.
NMMS = {
    # Each pixel attends to itself: a U-Net with widths, trained on the NMM's likelihood.
    "U-Net-widths": {"radius": 0},
    "NMM-one-width": {"network": {"spread": False}},
    "NMM": {},
    "NMM-one-step-credit": {"estimator": "one_step_credit"},
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
def predict(network: UNet | Denoiser, method: str, image: Tensor) -> Tensor | NeighborMixture:
    """A U-Net's estimate of the clean image, or an NMM's mixture over its pixels."""
    if method not in NMMS:
        return 255 * network(image[None] / 255)[0][0]
    radius = NMMS[method].get("radius", 1)
    hood = Neighborhood.grid(*image.shape[-2:], radius, device=image.device)
    return NeighborMixture(hood, *network(hood, image[None]), validate_args=False)
