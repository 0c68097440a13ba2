# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Fits of an NMM to a Markov random field, how close it is, and every method by its row's name."""

import re
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn

from benchmarks.random_fields import rivals
from benchmarks.random_fields.fields import Grid, Shape, grid
from pyro_nmm import ChosenLabels, NeighborChoice, NeighborMixture
from pyro_nmm.guides import fit_mixture, mean_field
from pyro_nmm.models import FreeNMM, MarginalField, PairwiseMRF
from pyro_nmm.models.random_fields import coarseness

EVERY = ["mean field", "chains", "Bethe", "tree-reweighted"]
EVERY += ["NMM, 500 steps", "NMM of half, 500 steps", "VAN, 150 steps", "VAN, 600 steps"]
#: Further fits for two labels, and windows as the number of labels allows.
LONG = ["NMM, 2000 steps", "NMM, 5 x 5, 2000 steps", "NMM of half, 2000 steps"]
LONG += ["NMM of half, row by row, 500 steps", "NMM of half, row by row, 2000 steps"]
WINDOWS = {
    2: ["windows 3 x 3, 8 given", "windows 5 x 5, 8 given", "windows 7 x 7, 8 given"],
    4: ["windows 3 x 3, 4 given", "windows 5 x 5, 4 given", "windows 7 x 7, 6 given"],
    8: ["windows 3 x 3, 3 given", "windows 5 x 5, 4 given", "windows 7 x 7, 5 given"],
}
#: By the number of labels; and those whose cost allows 128 x 128 pixels.
NARROW = {2: EVERY + WINDOWS[2] + LONG, 4: EVERY + WINDOWS[4], 8: EVERY + WINDOWS[8]}
LARGE = ["chains", "Bethe", "NMM of half, 500 steps", *WINDOWS[2]]
MESSAGES = {"Bethe": rivals.bethe, "tree-reweighted": rivals.tree_reweighted}
#: Draws for a KL divergence, and random starts of mean fields.
DRAWS, STARTS = 2048, 12


def with_error(samples: Tensor) -> tuple[float, float]:
    """The mean and its standard error."""
    return samples.mean().item(), (samples.std() / len(samples) ** 0.5).item()


@torch.no_grad()
def loss(mix: NeighborMixture, field: PairwiseMRF, order: Tensor, num_samples: int, chunk: int):
    """The bound's loss E[log p(y, c) / q(c | y) - log p*(y)], and its standard error."""
    parts = [mix.entropy_bound(chunk, "reward_to_go", order) for _ in range(num_samples // chunk)]
    return with_error(-torch.cat(parts).double() - field.expected_potential(mix).double())


@torch.no_grad()
def drawn_bound(mix: NeighborMixture, half: MarginalField, order: Tensor, num_samples: int):
    """The loss of :func:`loss` by joint draws; choices drawn from q(c | y) would bound it."""
    parts = []
    for _ in range(num_samples // 64):
        c = NeighborChoice(mix.hood, mix.logits).sample((64,))
        y = ChosenLabels(mix.alpha, c).sample()
        terms = mix.choices(y, order=order).log_labels(c)
        parts.append(terms.sum(-1).double() - half.log_potential(y).double())
    return with_error(torch.cat(parts))


def divergence(mix: NeighborMixture, field: PairwiseMRF, order: Tensor) -> tuple[float, float]:
    """E[log p(y) - log p*(y)] and its standard error, log p(y) by sequential Monte Carlo."""
    draws = mix.sample((256,))
    log_prob = torch.stack([mix.log_likelihood(y, order=order) for y in draws])
    return with_error((log_prob - field.log_potential(draws)).double())


@torch.no_grad()
def drawn_loss(family, field: PairwiseMRF, count: int = DRAWS) -> tuple[float, float]:
    """E[log q(y) - log p*(y)], which is KL(q || p) - log Z, and its standard error."""
    y = family.sample(count)
    return with_error(family.log_prob(y).double() - field.log_potential(y).double())


def fit(target, windows: Grid, network: nn.Module, **options) -> NeighborMixture:
    """The NMM of a network, fitted from coarse to fine."""
    return fit_mixture(target, windows.hood, network, order=windows.order, **options)[0]


def fits(target, windows: Grid, starts: list, **steps: int) -> Iterator[NeighborMixture]:
    """NMMs one by one from starts: alpha, logits, and options of ``FreeNMM`` and of the fit."""
    for alpha, logits, free, options in starts:
        network = FreeNMM(windows.hood, alpha.shape[1], alpha.contiguous(), gamma=0.0, **free)
        with torch.no_grad():
            network.logits.add_(logits)
        yield fit(target, windows, network, **steps, **options)


def two_starts(unary: Tensor, marginals: Tensor, logits: Tensor) -> list[tuple]:
    """Near each pixel's own evidence, and near the mean field."""
    evidence = unary.softmax(-1), logits, {"kappa": 1.0}, {}
    return [evidence, (marginals, logits, {}, {"warmup": 0.0})]


def fit_all(field: PairwiseMRF, windows: Grid, marginals: Tensor, given=None, **steps: int):
    """The NMM of all pixels: the best of two starts, and of a ``given`` mixture, if any."""
    starts = two_starts(field.unary, marginals, -0.5 * windows.distance)
    if given is not None:
        options = {"kappa": 1.0, "epsilon": 0.0}, {"warmup": 0.0, "lr": 0.01}
        starts.append((given.table, given.logits, *options))
    count = max(4, 2**15 // field.num_nodes)
    score = partial(loss, field=field, order=windows.order, num_samples=8 * count, chunk=count)
    return min(fits(field, windows, starts, **steps), key=score)


def fit_half(field: PairwiseMRF, shape: Shape, marginals: Tensor, by_row: bool, **steps: int):
    """
    The NMM of every other pixel, the rest summed out: first from coarse to fine or, ``by_row``,
    the others. Also the field of the pixels that stay, and the order of the fit.
    """
    half = MarginalField(field, (coarseness(*shape) == 2) == by_row)
    windows, stay = grid(shape, 2, half.stay), half.nodes
    # The nearest pixels are diagonal, at a squared distance of 2.
    starts = two_starts(field.unary[stay], marginals[stay], -0.25 * windows.distance)
    score = partial(drawn_bound, half=half, order=windows.order, num_samples=256)
    return min(fits(half, windows, starts, **steps), key=score), half, windows.order


def fitted(name: str, field: PairwiseMRF, shape: Shape):
    """Messages with an estimate of log Z, or a function of the loss and, if sampled, its error."""
    kind, numbers = name.split(",")[0], [int(n) for n in re.findall(r"\d+", name)]
    if kind in MESSAGES:
        return MESSAGES[kind](field)
    if kind == "chains":
        rows = torch.arange(field.num_nodes).view(shape)
        starts = STARTS if field.num_nodes < 1000 else 2  # for speed
        found = [rivals.chain_mean_field(field, each, starts)[1] for each in (rows, rows.T)]
        return lambda: (min(found),)
    if kind == "VAN":  # a pixel's conditional in the target needs a memory of no more than a row
        return partial(drawn_loss, rivals.fit_van(field, shape[1] + 1, numbers[0]), field)
    if kind.startswith("windows"):
        side, _, given = numbers
        return partial(drawn_loss, rivals.Windowed(field, grid(shape, side // 2), given), field)
    if kind not in ("mean field", "NMM", "NMM of half"):
        raise ValueError(f"no method is called {name!r}")
    marginals, losses = mean_field(field, num_random=STARTS)
    if kind == "mean field":
        return lambda: (losses[0].item(),)
    if kind == "NMM of half":
        found = fit_half(field, shape, marginals, "row by row" in name, num_steps=numbers[-1])
        return partial(drawn_bound, *found, DRAWS)
    windows = grid(shape, 2 if "5 x 5" in name else 1)
    mix = fit_all(field, windows, marginals, num_steps=numbers[-1])
    return partial(loss, mix, field, windows.order, 1024, 64)
