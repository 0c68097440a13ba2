# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor

from pyro_nmm import Neighborhood, OrderedConditional
from pyro_nmm.guides.fitting.fingerprint import fingerprint
from pyro_nmm.guides.fitting.loop import (
    check_loss,
    check_weights,
    generators,
    resume,
    save_checkpoint,
    set_generators,
)
from pyro_nmm.models.denoiser import Denoiser
from pyro_nmm.models.unet import UNet
from pyro_nmm.validation import check_integers, check_positive

LOSSES = ("squared", "log")


def fit_denoiser(
    network: UNet | Denoiser,
    draw: Callable[[], Tensor],
    *,
    num_steps: int = 1000,
    lr: float = 1e-3,
    last_rate: float = 0.0,
    unet_rate: float = 1.0,
    max_noise: float = 50.0,
    loss: str = "squared",
    estimator: str = "em",
    mean_weight: float = 0.5,
    radius: int = 1,
    checkpoint: Path | None = None,
    save_every: int = 100,
    settings: str = "",
    progress: Callable[[range], Iterable[int]] = iter,
) -> list[float]:
    r"""
    Fits a denoiser to clean patches, to which Gaussian noise is added whose standard deviation is
    uniform in 0 to ``max_noise``, one for each patch. A U-Net minimises the mean over patches of
    the squared error, or of its logarithm, which is the likelihood of a Gaussian whose width is
    each patch's own best,

    .. math::

        \min_\theta \; \sum_b e_b \quad \text{or} \quad \min_\theta \; \sum_b \log (e_b + 2^2),
        \qquad e_b = \frac1N \sum_{i \in b} (u_i - y_i)^2

    of :math:`B` patches of :math:`N` values; an NMM maximises its bound on the clean labels
    :math:`y` of noisy ones :math:`X`, and with a weight :math:`w`, of which one half stands for
    the likelihood, the same about the mean that it predicts,

    .. math::

        \max_\theta \; \frac1{B N} E_{q(c \mid y)} \sum_i \log p_\theta(y_i \mid y_{<i}, c_{<i}, X)
        - \frac{w}{B} \sum_b \log (e_b + 2^2), \qquad
        e_b = \frac1N \sum_{i \in b} \Bigl(\sum_j L_{ij} u_j - y_i\Bigr)^2 ,

    the first by :meth:`~pyro_nmm.OrderedConditional.surrogate`, which is what Pyro's
    ``TraceGraph_ELBO`` makes of it. Parameters that need no gradient stay as they are. Adam, whose
    rate falls linearly, and is ten times as large for an NMM's single numbers, which have a longer
    way than weights.

    >>> patches = torch.randint(256, (2, 1, 1, 1)).expand(2, 3, 8, 8)
    >>> network = Denoiser(UNet(width=6, depth=1))
    >>> losses = fit_denoiser(network, lambda: patches, num_steps=3)

    :param network: the U-Net alone, or with an NMM on it.
    :param draw: gives clean patches ``(B, channels, H, W)``, integer grey levels of any type, from
        zero; a U-Net's unit is 255 of them, an NMM's labels end at ``num_classes - 1``.
    :param float last_rate: times ``lr``, what the rate falls to: zero, or more for a fit that
        another one carries on.
    :param float unet_rate: times ``lr`` is the rate of the U-Net under an NMM; below one for a
        U-Net that has been fitted before.
    :param float max_noise: in grey levels.
    :param str loss: of a U-Net, ``"squared"`` or ``"log"``.
    :param str estimator: of the bound's gradient, see :class:`~pyro_nmm.OrderedConditional`.
    :param float mean_weight: :math:`w`; zero for the bound alone.
    :param int radius: of the windows around an NMM's pixels. With zero every pixel attends to
        itself alone, and pixels are independent.
    :param Path checkpoint: where to save, every ``save_every`` steps and at the end, and to go on
        from. It knows these numbers, the seed, and the network with the weights that it had at the
        call: resuming with others is an error, as in :func:`~pyro_nmm.guides.fitting.loop.train`.
    :param str settings: what the run depends on besides. ``draw`` is a function, so that its images
        and its sizes are not known: name them here.
    :param progress: wraps the range of steps, for example ``tqdm``.
    :return: every step's loss: the mean squared error in grey levels squared, or its logarithm, or
        the negative bound in nats a pixel and channel. The network is in evaluation mode.
    :raises ValueError: for numbers and patches that cannot be, a loss that is not finite, weights
        that are NaN, which are not saved, and a checkpoint of another run.
    """
    check_integers(1, num_steps=num_steps, save_every=save_every)
    check_positive(lr=lr)
    others = {"max_noise": max_noise, "mean_weight": mean_weight, "unet_rate": unet_rate}
    for name, amount in others.items():
        if not 0 <= amount < math.inf:
            raise ValueError(f"{name} must be finite and not negative, got {amount}")
    if not 0 <= last_rate <= 1:
        raise ValueError(f"last_rate must lie in 0..1, got {last_rate}")
    if loss not in LOSSES:
        raise ValueError(f"loss must be one of {LOSSES}, got {loss!r}")
    groups: list[dict] = [{"params": list(network.parameters())}]
    if isinstance(network, Denoiser):
        added = [p for name, p in network.named_parameters() if not name.startswith("unet.")]
        groups = [{"params": list(network.unet.parameters()), "lr": unet_rate * lr},
                  {"params": [p for p in added if p.dim() > 0]},
                  {"params": [p for p in added if p.dim() == 0], "lr": 10 * lr}]  # fmt: skip
    optimizer = torch.optim.Adam(groups, lr)
    fall = (1 - last_rate) / num_steps
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - fall * step)
    losses: list[float] = []
    here: dict[str, str] = {}
    if checkpoint is not None:
        named = {"settings": settings, "num_steps": num_steps, "last_rate": last_rate,
                 "max_noise": max_noise, "loss": loss, "estimator": estimator,
                 "mean_weight": mean_weight, "radius": radius}  # fmt: skip
        here = fingerprint(network, optimizer, named)
        if (state := resume(checkpoint, here)) is not None:
            network.load_state_dict(state["network"])
            optimizer.load_state_dict(state["optimizer"])
            schedule.load_state_dict(state["schedule"])
            losses = state["losses"]
            set_generators(state["generators"])
    network.train()
    hood: Neighborhood | None = None
    size: tuple[int, ...] = ()
    for step in progress(range(len(losses), num_steps)):
        clean = _grey_levels(draw(), step, getattr(network, "num_classes", None))
        noise = max_noise * torch.rand(len(clean), 1, 1, 1, device=clean.device)
        noisy = clean + noise * torch.randn(clean.shape, device=clean.device)
        optimizer.zero_grad()
        if isinstance(network, UNet):
            errors = (255 * network(noisy / 255)[0] - clean).square().flatten(1).mean(1)
            value = (errors if loss == "squared" else (errors + 4).log()).mean()
            value.backward()
        else:
            if hood is None or size != clean.shape[-2:]:
                size = height, width = clean.shape[-2:]
                hood = Neighborhood.grid(height, width, radius=radius, device=clean.device)
            alpha, logits = network(hood, noisy)
            y = clean.flatten(2)
            q = OrderedConditional(hood, alpha, logits, y, estimator=estimator,
                                   validate_args=step == 0)  # fmt: skip
            c, number = q.sample(), clean.numel()
            about_mean = (mean_errors(hood, alpha.mean, logits, y) + 4).log().mean()
            (mean_weight * about_mean - q.surrogate(c).sum() / number).backward()
            with torch.no_grad():
                value = -q.log_labels(c).sum() / number
        check_loss(value.item(), f"step {step}")
        optimizer.step()
        schedule.step()
        losses.append(value.item())
        due = len(losses) % save_every == 0 or len(losses) == num_steps
        if due:
            check_weights(network, f"step {step}")
        if due and checkpoint is not None:
            state = {"settings": here, "network": network.state_dict(),
                     "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict(),
                     "losses": losses, "generators": generators()}  # fmt: skip
            save_checkpoint(state, checkpoint)
    network.eval()
    return losses


def _grey_levels(clean: Tensor, step: int, num_classes: int | None) -> Tensor:
    """Patches as ``torch.long``, whatever integers they were."""
    good = isinstance(clean, Tensor) and clean.dim() == 4 and clean.numel() and not clean.is_meta
    if not good or clean.is_floating_point() or clean.is_complex() or clean.dtype == torch.bool:
        got = type(clean)
        found = f"{clean.dtype} of shape {tuple(clean.shape)}" if isinstance(clean, Tensor) else got
        raise ValueError(
            f"draw must give integer grey levels of shape (B, channels, H, W), got {found}"
        )
    low, high = clean.min().item(), clean.max().item()
    if low < 0 or (num_classes is not None and high >= num_classes):
        top = "" if num_classes is None else f": they must lie in 0..{num_classes - 1}"
        raise ValueError(f"draw gave grey level {low if low < 0 else high} in step {step}{top}")
    return clean.long()


def mean_errors(hood: Neighborhood, mean: Tensor, logits: Tensor, y: Tensor) -> Tensor:
    """``(B,)``: mean squares of what labels ``(B, ..., N)`` are off an NMM's means."""
    means = hood.sum(hood.softmax(logits) * mean.index_select(-1, hood.source))
    return (means - y).square().flatten(1).mean(1)
