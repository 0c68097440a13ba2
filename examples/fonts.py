# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
One network for many Markov random fields. It reads posteriors of noisy words in one font, and
answers for words in other fonts and with other noise: without a fit, and with a few steps on top.
The images are narrow enough for exact KL divergences.

    python examples/fonts.py --output output/fonts.png
"""

from __future__ import annotations

from argparse import ArgumentParser
from copy import deepcopy
from functools import partial
from time import perf_counter

import pyro
import torch
from common import options, progress_bar
from drawing.fonts import draw

from pyro_nmm import Neighborhood, NeighborMixture
from pyro_nmm.datasets import letters
from pyro_nmm.guides import fit_mixture, mean_field
from pyro_nmm.models import ConvolutionalNMM, MeanFieldCorrection, coarse_to_fine, ising_posterior

SHAPE, COUPLING = (14, 44), 0.45
#: Words, fonts and standard deviations of the noise that the network is not trained on.
TESTS = [
    ("Rag", "DejaVu Serif", 1.0), ("EMU", "DejaVu Serif", 2.0),
    ("BVA", "DejaVu Sans Mono", 1.0), ("KGb", "DejaVu Sans Mono", 2.0),
]  # fmt: skip


def posterior(text: str, font: str, sigma: float):
    """The image with noise, and the field of its clean pixels."""
    noisy = letters(text, *SHAPE, font=font) + sigma * torch.randn(SHAPE)
    return noisy, ising_posterior(noisy, COUPLING, sigma)


def stream(step: int):
    """Three capitals in DejaVu Sans, with a noise of 1.2 to 1.7."""
    text = "".join(chr(65 + k) for k in torch.randint(26, (3,)).tolist())
    return posterior(text, "DejaVu Sans", 1.2 + 0.5 * torch.rand(()).item())[1]


def main(args) -> list[dict]:
    pyro.set_rng_seed(args.seed)
    hood, order = Neighborhood.grid(*SHAPE), coarse_to_fine(*SHAPE)
    network = MeanFieldCorrection(
        ConvolutionalNMM(radius=1, channels=32, kernel=7),
        num_random=0, num_rises=0, num_sweeps=10,  # of the mean field in every answer
    )  # fmt: skip
    fit_mixture(
        stream, hood, network, order=order, num_steps=args.num_steps, lr=args.lr,
        progress=partial(progress_bar, desc="network"),
    )  # fmt: skip

    @torch.no_grad()
    def answer(field):
        return NeighborMixture(hood, *network(hood, field))

    def fit(field):
        return fit_mixture(field, hood, deepcopy(network), order=order, num_steps=30, lr=0.003)[0]

    ways = {"mean field": mean_field, "network": answer, "30 steps more": fit}
    results, pictures = [], []
    print("KL divergence in nats (of the NMM at most), milliseconds")
    for test in TESTS:
        noisy, field = posterior(*test)
        log_z, row = field.log_normalizer().item(), {}
        for name, way in ways.items():
            began = perf_counter()
            found = way(field)
            row[name] = {"ms": 1000 * (perf_counter() - began)}
            if name == "mean field":
                row[name]["KL"] = found.losses[0].item() + log_z
                marginals = [field.marginals(), found.marginals]
            else:
                with torch.no_grad():
                    entropy = found.entropy_bound(512, order).mean()
                    bound = -entropy - field.expected_potential(found)
                row[name]["KL"] = bound.item() + log_z
                marginals.append(found.marginals())
        print(*test, *(f"| {k} {v['KL']:.1f}, {v['ms']:.0f} ms" for k, v in row.items()))
        results.append(row)
        pictures.append((test, noisy, marginals))
    if args.output:
        draw(args.output, pictures, results)
    return results


def parser() -> ArgumentParser:
    return options(
        __doc__, "fonts.png", num_steps=(400, "of the network's training"), seed=0,
        lr=(0.006, "of the training; 0.015 can end at the mean field"),
    )  # fmt: skip


if __name__ == "__main__":
    main(parser().parse_args())
