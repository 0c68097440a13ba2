# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Fits to patches of images with noise: a U-Net, and an NMM over pixels."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import pyro
import torch
from pyro import poutine
from pyro.infer import TraceGraph_ELBO
from torch import Tensor

from pyro_nmm import Neighborhood
from pyro_nmm.fitting import Steps, ordinary, with_gradients, with_options
from pyro_nmm.guides.ordered import ordered_guide
from pyro_nmm.guides.shared_forward import SharedForward, unvalidated
from pyro_nmm.models.images import Denoiser, UNet
from pyro_nmm.models.nmm import nmm


@dataclass(frozen=True)
class PatchRun(Steps):
    """Options of :func:`fit_unet` and :func:`fit_images`, besides the options of
    :class:`~pyro_nmm.fitting.Steps`.

    :param float last_rate: the share of ``lr`` to which the rate falls linearly.
    :param float max_noise: in grey levels.
    """

    save_every: int = 100
    lr: float = 1e-3
    last_rate: float = 0.0
    max_noise: float = 50.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.max_noise < math.inf:
            raise ValueError(f"max_noise must be finite and not negative, got {self.max_noise}")
        if not 0 <= self.last_rate <= 1:
            raise ValueError(f"last_rate must lie in 0..1, got {self.last_rate}")

    def fit(self, network, optimizer, backward, **settings) -> list[float]:
        """The steps, after which the network is in evaluation mode."""
        fall = (1 - self.last_rate) / self.num_steps
        settings |= {"last_rate": self.last_rate, "max_noise": self.max_noise}
        losses = self.train(network, optimizer, backward, lambda step: 1 - fall * step, **settings)
        network.eval()
        return losses


@with_options
@with_gradients
def fit_unet(
    unet: UNet, draw: Callable[[], Tensor], *, loss: str = "squared", options: PatchRun = PatchRun()
) -> list[float]:
    r"""Fit a U-Net to clean patches with Gaussian noise, whose standard deviation is uniform in 0
    to ``max_noise`` for each patch. Over :math:`B` patches of :math:`N` values it minimises

    .. math::

        \min_\theta \; \sum_b e_b \quad \text{or} \quad \min_\theta \; \sum_b \log (e_b + 2^2),
        \qquad e_b = \frac1N \sum_{i \in b} (u_i - y_i)^2 .

    >>> patches = torch.randint(256, (2, 1, 1, 1)).expand(2, 3, 8, 8)
    >>> losses = fit_unet(UNet(width=6, depth=1), lambda: patches, num_steps=3)

    :param draw: returns clean patches ``(B, channels, H, W)``, integer grey levels in 0 to 255.
        Name its images in ``settings``, so that a checkpoint knows them.
    :param str loss: ``"squared"`` or ``"log"``.
    :param options: keywords of :class:`~pyro_nmm.guides.images.PatchRun`.
    :return: every step's loss. The network is in evaluation mode.
    """
    if loss not in ("squared", "log"):
        raise ValueError(f"loss must be 'squared' or 'log', got {loss!r}")
    optimizer = torch.optim.Adam(unet.parameters(), options.lr)

    def backward(step: int) -> float:
        clean, noisy = _noisy(draw(), step, options.max_noise, 256)
        errors = (255 * unet(noisy / 255)[0] - clean).square().flatten(1).mean(1)
        value = (errors if loss == "squared" else (errors + 4).log()).mean()
        value.backward()
        return value.item()

    return options.fit(unet, optimizer, backward, loss=loss)


@with_options
@with_gradients
def fit_images(
    network: Denoiser, draw: Callable[[], Tensor], *, radius: int = 1, estimator: str = "no_score",
    mean_weight: float = 0.5, unet_rate: float = 1.0, options: PatchRun = PatchRun(),
) -> list[float]:  # fmt: skip
    r"""Fit an NMM over pixels to patches with the noise of :func:`fit_unet`: it maximises the bound
    on the clean labels :math:`y` of noisy patches :math:`X`, minus a penalty on the predicted mean,

    .. math::

        \max_\theta \; & \frac1{B N} E_{q(c \mid y)} \sum_i
            \log p_\theta(y_i \mid y_{<i}, c_{<i}, X) \\
        & - \frac{w}{B} \sum_b \log (e_b + 2^2) \\
        e_b = {} & \frac1N \sum_{i \in b} \Bigl(\sum_j L_{ij} u_j - y_i\Bigr)^2 .

    A step is one of Pyro's ``TraceGraph_ELBO`` on :func:`~pyro_nmm.models.nmm` in two plates,
    images and channels, with the factor ``mean``. Pyro's parameter store is left as it was. The
    rate is ten times as large for the network's scalar parameters.

    >>> patches = torch.randint(256, (2, 1, 1, 1)).expand(2, 3, 8, 8)
    >>> losses = fit_images(Denoiser(UNet(width=6, depth=1)), lambda: patches, num_steps=3)

    :param draw: ``(B, channels, H, W)`` as for :func:`fit_unet`; labels end at ``num_classes - 1``.
    :param int radius: of the windows around pixels; with zero, pixels are independent.
    :param str estimator: see :class:`~pyro_nmm.OrderedConditional`.
    :param float mean_weight: :math:`w`; one half is a Gaussian's likelihood, zero the bound alone.
    :param float unet_rate: times ``lr`` is the U-Net's rate; below one for a U-Net fitted before.
    :param options: keywords of :class:`~pyro_nmm.guides.images.PatchRun`.
    :return: every step's negative bound, in nats a pixel and channel.
    """
    for name, amount in (("mean_weight", mean_weight), ("unet_rate", unet_rate)):
        if not 0 <= amount < math.inf:
            raise ValueError(f"{name} must be finite and not negative, got {amount}")
    above = [p for name, p in network.named_parameters() if not name.startswith("unet.")]
    groups: list[dict] = [
        {"params": list(network.unet.parameters()), "lr": unet_rate * options.lr},
        {"params": [p for p in above if p.dim() > 0]},
        {"params": [p for p in above if p.dim() == 0], "lr": 10 * options.lr},
    ]
    optimizer = torch.optim.Adam(groups, options.lr)
    elbo = TraceGraph_ELBO()

    @functools.lru_cache(maxsize=1)
    def program(height: int, width: int, device: torch.device) -> _Program:
        hood = Neighborhood.grid(height, width, radius=radius, device=device)
        return _Program(hood, network, estimator, mean_weight)

    def backward(step: int) -> float:
        clean, noisy = _noisy(draw(), step, options.max_noise, network.num_classes)
        pair = program(*clean.shape[-2:], clean.device)
        scale = poutine.scale(scale=1 / clean.numel())
        with unvalidated():
            arguments = noisy, clean.flatten(2)
            loss = elbo.loss_and_grads(scale(pair.model), scale(pair.guide), *arguments)
        return loss - pair.penalty

    with pyro.get_param_store().scope():
        settings = {"radius": radius, "estimator": estimator, "mean_weight": mean_weight}
        return options.fit(network, optimizer, backward, **settings)


class _Program(SharedForward):
    def __init__(self, hood: Neighborhood, network: Denoiser, estimator: str, mean_weight: float):
        super().__init__(hood, network, "denoiser")
        self.estimator, self.mean_weight, self.penalty = estimator, mean_weight, 0.0

    def guide(self, noisy: Tensor, y: Tensor) -> None:
        alpha, logits = self.give((noisy,))
        with pyro.plate("images", len(y), dim=-2), pyro.plate("channels", y.shape[1], dim=-1):
            ordered_guide(self.hood, alpha, logits, y, collapsed=True, estimator=self.estimator)

    def model(self, noisy: Tensor, y: Tensor) -> None:
        alpha, logits = self.take((noisy,))
        errors = mean_errors(self.hood, alpha.mean, logits, y)
        penalty = self.mean_weight * (errors + 4).log().mean()
        self.penalty = penalty.item()
        pyro.factor("mean", -y.numel() * penalty)
        with pyro.plate("images", len(y), dim=-2), pyro.plate("channels", y.shape[1], dim=-1):
            nmm(self.hood, alpha, logits, y, collapsed=True)


def _noisy(clean: Tensor, step: int, max_noise: float, num_classes: int) -> tuple[Tensor, Tensor]:
    """Checked grey levels, and the same with noise."""
    good = isinstance(clean, Tensor) and clean.dim() == 4 and clean.numel() and not clean.is_meta
    if not good or clean.is_floating_point() or clean.is_complex() or clean.dtype == torch.bool:
        got = (clean.dtype, tuple(clean.shape)) if isinstance(clean, Tensor) else type(clean)
        must = "integer grey levels of shape (B, channels, H, W)"
        raise ValueError(f"draw must give {must}, got {got}")
    low, high = clean.min().item(), clean.max().item()
    if low < 0 or high >= num_classes:
        level, must = low if low < 0 else high, f"they must lie in 0..{num_classes - 1}"
        raise ValueError(f"draw gave grey level {level} in step {step}: {must}")
    clean = ordinary(clean.long())
    noise = max_noise * torch.rand(len(clean), 1, 1, 1, device=clean.device)
    return clean, clean + noise * torch.randn(clean.shape, device=clean.device)


def mean_errors(hood: Neighborhood, mean: Tensor, logits: Tensor, y: Tensor) -> Tensor:
    """``(B,)``: mean squares of what labels ``(B, ..., N)`` are off an NMM's means."""
    means = hood.sum(hood.softmax(logits) * mean.index_select(-1, hood.source))
    return (means - y).square().flatten(1).mean(1)
