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
from drawing.ising import draw

from pyro_nmm import Neighborhood
from pyro_nmm.datasets import letters
from pyro_nmm.guides import fit_mixture, mean_field
from pyro_nmm.models import coarse_to_fine, ising_posterior


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
    mix, curve = fit_mixture(
        field, hood, order=order, num_steps=args.num_steps, lr=0.1,
        progress=partial(progress_bar, desc="NMM"),
    )  # fmt: skip
    with torch.no_grad():
        entropy = mix.entropy_bound(512, order).mean()
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
        curve = [loss + log_z for loss in curve]
        draw(args.output, clean, noisy, marginals, samples, curve, result)
    return result


def parser() -> ArgumentParser:
    return options(
        __doc__, "ising.png", text="NMM", height=(14, "pixels; exact sums take up to 17"), width=44,
        coupling=0.45, sigma=(1.5, "of the noise"), radius=(1, "of the NMM's windows"),
        num_steps=600, seed=0, device="cpu",
    )  # fmt: skip


if __name__ == "__main__":
    main(parser().parse_args())
