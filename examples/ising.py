# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
Approximate the posterior of noisy letters under an Ising prior: by independent pixels, and by an
NMM with correlated pixels. The image is narrow enough for the exact posterior, so the example
measures both.

    python examples/ising.py --output output/ising.png
"""

from __future__ import annotations

from argparse import ArgumentParser
from functools import partial

import pyro
import torch
from common import options, progress_bar
from plotting import canvas, save
from torch import Tensor

from pyro_nmm import Neighborhood
from pyro_nmm.datasets import letters
from pyro_nmm.guides import fit_mixture, mean_field
from pyro_nmm.models import FreeNMM, coarse_to_fine, ising_posterior


def main(args) -> dict:
    pyro.set_rng_seed(args.seed)
    shape = args.height, args.width
    clean = letters(args.text, *shape)
    noisy = (clean + args.sigma * torch.randn(shape)).to(args.device)
    field = ising_posterior(noisy, args.coupling, args.sigma)
    log_z, truth = field.log_normalizer().item(), field.marginals()

    independent = mean_field(field)
    hood = Neighborhood.grid(*shape, args.radius, device=args.device)
    order = coarse_to_fine(*shape, device=args.device)
    network = FreeNMM(hood, 2, field.unary.softmax(-1), kappa=1.0, gamma=0.0)
    mix, curve = fit_mixture(
        field, hood, network.to(args.device), order=order, num_steps=args.num_steps,
        progress=partial(progress_bar, desc="NMM"),
    )  # fmt: skip
    with torch.no_grad():
        entropy = mix.entropy_bound(512, "reward_to_go", order).mean()
        bound = -entropy - field.expected_potential(mix)

    result = {}
    print(f"{'':12}{'KL, nats':>12}{'error of marginals':>20}")
    for name, loss, marginals in (
        ("mean field", independent.losses[0], independent.marginals),
        ("NMM", bound, mix.marginals()),
    ):
        error = (marginals - truth).abs().mean().item()
        result[name] = {"KL": loss.item() + log_z, "error": error}
        print(f"{name:12}{'<' if name == 'NMM' else ' '}{loss.item() + log_z:11.2f}{error:20.4f}")
    print(f"exact posterior of {field.num_nodes} pixels: log Z {log_z:.2f}")
    if args.output:
        marginals = {"exact": truth, "mean field": independent.marginals, "NMM": mix.marginals()}
        uniform = torch.rand(2, *shape)
        samples = {
            "exact": field.sample((2,)).view(2, *shape),
            "mean field": uniform < independent.marginals[:, 1].view(shape).cpu(),
            "NMM": mix.sample((2,)).view(2, *shape),
        }
        draw(args, clean, noisy, marginals, samples, [loss + log_z for loss in curve], result)
    return result


def draw(args, clean: Tensor, noisy: Tensor, marginals: dict[str, Tensor],
         samples: dict[str, Tensor], curve: list[float], result: dict) -> None:  # fmt: skip
    figure, axes = canvas(4, 4, (13, 6.2), font=9, box=True)
    shape, exact = clean.shape, marginals["exact"]
    grey = {"cmap": "gray_r", "vmin": 0, "vmax": 1}
    show(axes[0, 0], clean > 0, "letters", **grey)
    show(axes[1, 0], noisy, f"observed, noise of sd {args.sigma:g}", cmap="gray_r")
    for column, name in enumerate(marginals, start=1):
        probs = marginals[name][:, 1].view(shape)
        top = show(axes[0, column], probs, f"{name}: $p(x_i = 1)$", **grey)
        for row in (0, 1):
            show(axes[2 + row, column], samples[name][row], f"{name}: a sample", **grey)
        if name == "exact":
            axes[1, column].axis("off")
            continue
        # Orange and blue are distinguishable with colour blindness.
        error = probs - exact[:, 1].view(shape)
        title = f"{name} − exact, mean size {result[name]['error']:.3f}"
        middle = show(axes[1, column], error, title, cmap="PuOr", vmin=-0.5, vmax=0.5)
    figure.colorbar(top, ax=axes[0, 3], shrink=0.9)
    figure.colorbar(middle, ax=axes[1, 3], shrink=0.9)

    for axis in axes[2:, 0]:
        axis.remove()
    axis, half = figure.add_subplot(axes[0, 0].get_gridspec()[2:, 0]), len(curve) // 2
    noisy_steps = torch.tensor(curve[half:])
    axis.plot(range(half, len(curve)), noisy_steps, color="#0072B2", lw=0.5, alpha=0.4)
    smooth = noisy_steps.unfold(0, min(25, len(noisy_steps)), 1).mean(-1)
    steps = range(len(curve) - len(smooth), len(curve))
    axis.plot(steps, smooth, color="#0072B2", label="NMM, bound: a step, mean of 25")
    axis.axhline(result["mean field"]["KL"], color="#D55E00", ls="--", label="mean field")
    axis.set(xlabel="step", ylabel="KL divergence, nats", ylim=(0, None))
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False)
    save(figure, args.output)


def show(axis, image: Tensor, title: str, **style):
    axis.set_title(title, fontsize=9)
    axis.set_xticks([])
    axis.set_yticks([])
    return axis.imshow(image.cpu(), **style)


def parser() -> ArgumentParser:
    return options(
        __doc__, "ising.png", text="NMM", height=(14, "pixels; exact sums take up to 17"), width=44,
        coupling=0.45, sigma=(1.5, "of the noise"), radius=(1, "of the NMM's windows"),
        num_steps=600, seed=0, device="cpu",
    )  # fmt: skip


if __name__ == "__main__":
    main(parser().parse_args())
