# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The NMM of half of a grid's pixels, with the other half exactly given these."""

from __future__ import annotations

import torch

from benchmarks.random_fields.run import distances, grid, with_error
from pyro_nmm import ChosenLabels, NeighborChoice, NeighborMixture
from pyro_nmm.guides import fit_mixture
from pyro_nmm.models import FreeNMM, MarginalField, PairwiseMRF
from pyro_nmm.models.random_fields.pairwise import coarseness


def fit_half(field: PairwiseMRF, shape: tuple[int, int], marginals, args, by_row: bool = False):
    """
    The better by its own bound of the two starts of fields.py's ``fit_free``, single pixels'
    evidence and the mean field; windows of 5 x 5, of which every other pixel stays: those that
    coarse to fine puts first, or, ``by_row``, the others, which it leaves in the order of rows.

    :return: the mixture, the field of the pixels that stay, and the order of the fit.
    """
    windows, order = grid(shape, 2)
    half = MarginalField(field, (coarseness(*shape) == 2) == by_row)
    hood, place = windows.subgraph(half.nodes), half.stay.cumsum(0) - 1
    order = place[order[half.stay[order]]]
    apart = distances(hood, half.nodes, shape[1]).to(marginals)
    starts, found = [(field.unary.softmax(-1), 1.0, 0.5), (marginals, 4.0, 0.0)], []
    for start, kappa, warmup in starts:
        network = FreeNMM(hood, field.num_classes, start[half.nodes], kappa=kappa, gamma=0.0)
        with torch.no_grad():
            network.logits.sub_(0.25 * apart)  # as fields.py: neighbours on the diagonal are near
        steps = {"num_steps": args.num_steps, "num_samples": args.num_samples, "lr": args.lr}
        mix, _ = fit_mixture(half, hood, network, order=order, warmup=warmup, **steps)
        found.append((drawn_bound(mix, half, order, 256)[0], mix))
    return min(found, key=lambda each: each[0])[1], half, order


@torch.no_grad()
def drawn_bound(
    mix: NeighborMixture, half: MarginalField, order, count: int
) -> tuple[float, float]:
    """
    The loss E[log p(y, c) / q(c | y) - log p*(y)] of the bound, and its standard error. Choices and
    labels are drawn together: with choices of q(c | y) it would be a bound from below.
    """
    parts = []
    for size in torch.full((count // 64,), 64).tolist():
        c = NeighborChoice(mix.hood, mix.logits).sample((size,))
        y = ChosenLabels(mix.alpha, c).sample()
        terms = mix.choices(y, order=order).log_labels(c)
        parts.append(terms.sum(-1).double() - half.log_potential(y).double())
    return with_error(torch.cat(parts))
