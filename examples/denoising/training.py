# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Images, patches with noise, and the fits of a U-Net and of an NMM over pixels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_sample_images
from torch import Tensor, nn

from examples.denoising.model import NUM_LEVELS, Denoiser, PixelMixture, UNet
from pyro_nmm.fitting import Steps

#: The largest standard deviation of the noise in training, in grey levels.
MAX_NOISE = 50.0


def photographs() -> dict[str, Tensor]:
    """The two sample photographs of scikit-learn: grey levels ``(3, 427, 640)`` in 0..255."""
    data = load_sample_images()
    return {Path(name).stem: torch.from_numpy(np.array(image)).permute(2, 0, 1).long()
            for name, image in zip(data.filenames, data.images, strict=True)}  # fmt: skip


def image_folder(path: Path) -> dict[str, Tensor]:
    """All ``.png`` and ``.jpg`` images of a folder, by their names, sorted."""
    files = sorted(f for f in path.glob("*") if f.suffix.lower() in (".png", ".jpg", ".jpeg"))
    if not files:
        raise FileNotFoundError(f"{path} has no .png or .jpg files")
    images = {}
    for file in files:
        with Image.open(file) as image:
            pixels = torch.from_numpy(np.array(image.convert("RGB")))
        images[file.name] = pixels.permute(2, 0, 1).long()
    return images


def random_patches(images: Sequence[Tensor], number: int, size: int = 32) -> Tensor:
    """``(number, channels, size, size)``: patches of random images ``(channels, H, W)`` at random
    places, randomly turned by quarters and mirrored."""
    patches = []
    for _ in range(number):
        image = images[int(torch.randint(len(images), ()))]
        top, left = (int(torch.randint(side - size + 1, ())) for side in image.shape[-2:])
        patch = image[:, top : top + size, left : left + size]
        patch = patch.rot90(int(torch.randint(4, ())), (1, 2))
        patches.append(patch.flip(2) if int(torch.randint(2, ())) else patch)
    return torch.stack(patches)


def with_noise(clean: Tensor) -> Tensor:
    """Patches with Gaussian noise, whose standard deviation is uniform in 0 to `MAX_NOISE`."""
    noise = MAX_NOISE * torch.rand(len(clean), 1, 1, 1, device=clean.device)
    return clean + noise * torch.randn(clean.shape, device=clean.device)


def fit_unet(
    unet: UNet, draw: Callable[[], Tensor], steps: Steps, *, loss: str = "squared",
    last_rate: float = 0.0,
) -> list[float]:  # fmt: skip
    r"""Fit a U-Net to clean patches with noise. Over :math:`B` patches of :math:`N` values it
    minimises

    .. math::

        \min_\theta \; \sum_b e_b \quad \text{or} \quad \min_\theta \; \sum_b \log (e_b + 2^2),
        \qquad e_b = \frac1N \sum_{i \in b} (u_i - y_i)^2 .

    :param draw: returns clean patches ``(B, channels, H, W)``, integer grey levels in 0..255.
    :param Steps steps: number and rate of steps of Adam, a checkpoint, a progress bar.
    :param str loss: ``"squared"`` or ``"log"``.
    :param float last_rate: the share of the rate to which it falls linearly.
    :return: every step's loss. The network is in evaluation mode.
    """
    if loss not in ("squared", "log"):
        raise ValueError(f"loss must be 'squared' or 'log', got {loss!r}")

    def objective(clean: Tensor, noisy: Tensor) -> tuple[Tensor, Tensor]:
        image = (NUM_LEVELS - 1) * unet(noisy / (NUM_LEVELS - 1))[0]
        errors = (image - clean).square().flatten(1).mean(1)
        value = (errors if loss == "squared" else (errors + 4).log()).mean()
        return value, value

    optimizer = torch.optim.Adam(unet.parameters(), steps.lr)
    settings = {"loss": loss, "last_rate": last_rate}
    return _fit(unet, draw, steps, optimizer, objective, settings)


def fit_images(
    network: Denoiser, draw: Callable[[], Tensor], steps: Steps, *, radius: int = 1,
    mean_weight: float = 0.5, unet_rate: float = 1.0, last_rate: float = 0.0,
) -> list[float]:  # fmt: skip
    r"""Fit an NMM over pixels to patches with noise: it maximises the bound on the clean labels
    :math:`y` of noisy patches :math:`X`, minus a penalty on the predicted mean,

    .. math::

        \max_\theta \; & \frac1{B N} E_{q(c \mid y)} \sum_i
            \log p_\theta(y_i \mid y_{<i}, c_{<i}, X) \\
        & - \frac{w}{B} \sum_b \log (e_b + 2^2) \\
        e_b = {} & \frac1N \sum_{i \in b} \Bigl(\sum_j L_{ij} u_j - y_i\Bigr)^2 .

    The rate is ten times as large for the network's scalar parameters.

    :param int radius: of the windows around pixels; with zero, pixels are independent.
    :param float mean_weight: :math:`w`; one half is a Gaussian's likelihood, zero the bound alone.
    :param float unet_rate: times ``lr`` is the U-Net's rate; below one for a U-Net fitted before.
    :return: every step's negative bound, in nats a pixel and channel.
    """

    def objective(clean: Tensor, noisy: Tensor) -> tuple[Tensor, Tensor]:
        mixture, y = network(noisy, radius), clean.flatten(2)
        bound = mixture.bound_terms(y).mean()
        penalty = mean_weight * (mean_errors(mixture, y) + 4).log().mean()
        return penalty - bound, -bound

    above = [p for name, p in network.named_parameters() if not name.startswith("unet.")]
    groups: list[dict] = [
        {"params": list(network.unet.parameters()), "lr": unet_rate * steps.lr},
        {"params": [p for p in above if p.dim() > 0]},
        {"params": [p for p in above if p.dim() == 0], "lr": 10 * steps.lr},
    ]
    optimizer = torch.optim.Adam(groups, steps.lr)
    settings = {"radius": radius, "mean_weight": mean_weight, "last_rate": last_rate}
    return _fit(network, draw, steps, optimizer, objective, settings)


def mean_errors(mixture: PixelMixture, y: Tensor) -> Tensor:
    """``(B,)``: mean squares of what labels ``(B, channels, N)`` are off the mixture's means."""
    hood, mean = mixture.hood, mixture.alpha.mean
    means = hood.sum(hood.softmax(mixture.logits) * mean.index_select(-1, hood.source))
    return (means - y).square().flatten(1).mean(1)


def _fit(
    network: nn.Module, draw: Callable[[], Tensor], steps: Steps,
    optimizer: torch.optim.Optimizer, objective: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    settings: dict,
) -> list[float]:  # fmt: skip
    """Steps of ``objective(clean, noisy)``, which returns what to minimise and what to report."""

    def backward(step: int) -> float:
        clean = draw()
        loss, shown = objective(clean, with_noise(clean))
        loss.backward()
        return shown.item()

    fall = (1 - settings["last_rate"]) / steps.num_steps
    losses = steps.train(network, optimizer, backward, lambda step: 1 - fall * step, **settings)
    network.eval()
    return losses
