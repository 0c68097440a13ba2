# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor

from pyro_nmm import Neighborhood, OrderedConditional
from pyro_nmm.models.denoiser import Denoiser
from pyro_nmm.models.unet import UNet
from pyro_nmm.training import generators, load_checkpoint, save_checkpoint, set_generators

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
    :param draw: gives clean patches ``(B, channels, H, W)``, integer grey levels; a U-Net's unit
        is 255 of them.
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
    :param Path checkpoint: where to save, every ``save_every`` steps, and to go on from.
    :param str settings: what the run depends on besides; resuming under others is an error.
    :param progress: wraps the range of steps, for example ``tqdm``.
    :return: every step's loss: the mean squared error in grey levels squared, or its logarithm, or
        the negative bound in nats a pixel and channel. The network is in evaluation mode.
    """
    if min(num_steps, save_every) < 1 or not 0 <= max_noise < math.inf:
        raise ValueError(
            f"num_steps and save_every must be positive and max_noise not negative, got "
            f"{num_steps}, {save_every} and {max_noise}"
        )
    if not 0 <= last_rate <= 1 or not mean_weight >= 0:
        raise ValueError(
            f"last_rate must lie in 0..1 and mean_weight not be negative, got {last_rate} and "
            f"{mean_weight}"
        )
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
    settings = (
        f"{num_steps=} {lr=} {last_rate=} {unet_rate=} {max_noise=} {loss=} {estimator=} "
        f"{mean_weight=} {radius=} {settings}"
    )
    if checkpoint is not None and (state := load_checkpoint(checkpoint)) is not None:
        if state["settings"] != settings:
            raise ValueError(
                f"checkpoint {checkpoint} was made with settings {state['settings']!r}, not "
                f"{settings!r}: remove it or give another path"
            )
        for part, name in ((network, "network"), (optimizer, "optimizer"), (schedule, "schedule")):
            part.load_state_dict(state[name])
        losses = state["losses"]
        set_generators(state["generators"])
    network.train()
    hood: Neighborhood | None = None
    size: tuple[int, ...] = ()
    for _ in progress(range(len(losses), num_steps)):
        clean = draw()
        if clean.dim() != 4 or clean.is_floating_point():
            raise ValueError(
                f"draw must give integer grey levels of shape (B, channels, H, W), got "
                f"{clean.dtype} of shape {tuple(clean.shape)}"
            )
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
                                   validate_args=not losses)  # fmt: skip
            c, number = q.sample(), clean.numel()
            about_mean = (mean_errors(hood, alpha.mean, logits, y) + 4).log().mean()
            (mean_weight * about_mean - q.surrogate(c).sum() / number).backward()
            with torch.no_grad():
                value = -q.log_labels(c).sum() / number
        optimizer.step()
        schedule.step()
        losses.append(value.item())
        last = len(losses) == num_steps
        if checkpoint is not None and (last or len(losses) % save_every == 0):
            state = {"settings": settings, "network": network.state_dict(),
                     "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict(),
                     "losses": losses, "generators": generators()}  # fmt: skip
            save_checkpoint(state, checkpoint)
    network.eval()
    return losses


def mean_errors(hood: Neighborhood, mean: Tensor, logits: Tensor, y: Tensor) -> Tensor:
    """``(B,)``: mean squares of what labels ``(B, ..., N)`` are off an NMM's means."""
    means = hood.sum(hood.softmax(logits) * mean.index_select(-1, hood.source))
    return (means - y).square().flatten(1).mean(1)
