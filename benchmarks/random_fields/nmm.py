# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Fits of an NMM to a Markov random field, and estimates of how close it is."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.random_fields.fields import Grid, Shape, grid
from pyro_nmm import ChosenLabels, NeighborChoice, Neighborhood, NeighborMixture
from pyro_nmm.guides import fit_mixture
from pyro_nmm.models import FreeNMM, MarginalField, PairwiseMRF
from pyro_nmm.models.random_fields import RandomField, coarseness

LR = 0.05


def with_error(samples: Tensor) -> tuple[float, float]:
    """The mean and its standard error."""
    return samples.mean().item(), (samples.std() / len(samples) ** 0.5).item()


@torch.no_grad()
def loss(mix: NeighborMixture, field: PairwiseMRF, order: Tensor, num_samples: int, chunk: int):
    """The bound's loss E[log p(y, c) / q(c | y) - log p*(y)], and its standard error."""
    parts = [mix.entropy_bound(chunk, "reward_to_go", order) for _ in range(num_samples // chunk)]
    return with_error(-torch.cat(parts).double() - field.expected_potential(mix).double())


def divergence(mix: NeighborMixture, field: PairwiseMRF, order: Tensor):
    """
    E[log p(y) - log p*(y)] and its standard error, log p(y) by sequential Monte Carlo in the order
    of the fit: unbiased for p(y), and for its logarithm as far as the particles agree.
    """
    draws = mix.sample((256,))
    log_prob = torch.stack([mix.log_likelihood(y, order=order) for y in draws])
    return with_error((log_prob - field.log_potential(draws)).double())


@torch.no_grad()
def drawn_bound(mix: NeighborMixture, half: MarginalField, order: Tensor, count: int):
    """
    The loss of :func:`loss` by sampling, and its standard error. Choices and labels are drawn
    together: with choices drawn from q(c | y) the estimate would be a lower bound.
    """
    parts = []
    for _ in range(count // 64):
        c = NeighborChoice(mix.hood, mix.logits).sample((64,))
        y = ChosenLabels(mix.alpha, c).sample()
        terms = mix.choices(y, order=order).log_labels(c)
        parts.append(terms.sum(-1).double() - half.log_potential(y).double())
    return with_error(torch.cat(parts))


def fit(target, windows: Grid, network: nn.Module, **options) -> NeighborMixture:
    """The NMM of a network, fitted from coarse to fine."""
    return fit_mixture(target, windows.hood, network, order=windows.order, **options)[0]


def best(
    target: RandomField, windows: Grid, starts: list, score: Callable, **steps: int
) -> NeighborMixture:
    """
    The mixture of the lowest ``score`` among fits from several starts: a network, the share of the
    steps over which interactions rise, and a rate.
    """
    # One by one, because fits and scores draw from the same stream of random numbers.
    fits = (fit(target, windows, net, warmup=warm, lr=lr, **steps) for net, warm, lr in starts)
    return min(fits, key=score)


def near(hood: Neighborhood, alpha: Tensor, logits: Tensor, **options: float) -> FreeNMM:
    """Free parameters that start near these; ``options`` are those of the class."""
    network = FreeNMM(hood, alpha.shape[1], alpha.contiguous(), gamma=0.0, **options)
    with torch.no_grad():
        network.logits.add_(logits)
    return network


def two_starts(unary: Tensor, marginals: Tensor, windows: Grid, decay: float) -> list:
    """Near each pixel's own evidence, and near the mean field; attention falls with distance."""
    logits = -decay * windows.distance
    evidence = near(windows.hood, unary.softmax(-1), logits, kappa=1.0)
    return [(evidence, 0.5, LR), (near(windows.hood, marginals, logits, kappa=4.0), 0.0, LR)]


def fit_all(field: PairwiseMRF, windows: Grid, marginals: Tensor, given=None, **steps: int):
    """The NMM of all pixels: the best of two starts, and of a ``given`` mixture, if any."""
    starts = two_starts(field.unary, marginals, windows, 0.5)
    if given is not None:
        network = near(windows.hood, given.table, given.logits, kappa=1.0, epsilon=0.0)
        starts.append((network, 0.0, 0.2 * LR))
    count = max(4, 2**15 // field.num_nodes)

    def score(mix: NeighborMixture) -> float:
        return loss(mix, field, windows.order, 8 * count, count)[0]

    return best(field, windows, starts, score, **steps)


def fit_half(
    field: PairwiseMRF, shape: Shape, marginals: Tensor, by_row: bool, num_steps: int
) -> tuple[NeighborMixture, MarginalField, Tensor]:
    """
    The NMM of every other pixel in windows of 5 x 5, the rest summed out of the target: the pixels
    that coarse to fine puts first or, ``by_row``, the others, which it leaves in the order of rows.

    :return: the mixture, the field of the pixels that stay, and the order of the fit.
    """
    half = MarginalField(field, (coarseness(*shape) == 2) == by_row)
    windows, stay = grid(shape, 2, half.stay), half.nodes
    # The nearest pixels are diagonal, at a squared distance of 2.
    starts = two_starts(field.unary[stay], marginals[stay], windows, 0.25)

    def score(mix: NeighborMixture) -> float:
        return drawn_bound(mix, half, windows.order, 256)[0]

    return best(half, windows, starts, score, num_steps=num_steps), half, windows.order
