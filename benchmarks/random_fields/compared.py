# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
The NMM and its rivals as approximations of Markov random fields: KL divergences, errors of log Z,
and seconds of processor time on one thread.

    python benchmarks/fields_compared.py strips potts_strips plain letter

Tasks: ``strips`` (the Ising models of fields.py's strips), ``potts_strips`` (4 labels on 8 x 40
pixels and 8 on 5 x 40, couplings as near to the critical one as those of the strips), ``plain`` and
``letter`` (fields.py's 128 x 128 pixels).
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable
from functools import partial

import pyro
import torch

from benchmarks.random_fields.half import drawn_bound, fit_half
from benchmarks.random_fields.ordered import Windowed, drawn_loss, fit_autoregressive
from benchmarks.random_fields.rivals import bethe, chain_mean_field, tree_reweighted
from benchmarks.random_fields.run import (
    COUPLINGS,
    fit_free,
    grid,
    loss,
    narrow,
    noisy_letter,
    random_field,
    with_error,
)
from benchmarks.shared.common import RESULTS, Records, pick, read, run
from benchmarks.shared.references import kac_ward
from benchmarks.shared.timing import timed
from pyro_nmm.guides import mean_field
from pyro_nmm.models import PairwiseMRF, coarse_to_fine, grid_edges, ising, potts

#: Widths of grids that have an exact log Z, and their couplings, by the number of labels.
WIDTHS = {4: 8, 8: 5}
POTTS = {4: (0.5, 1.0, 1.5), 8: (0.61, 1.22, 1.83)}
#: Windows' radius and most pixels that are given, as the number of labels allows.
WINDOWS = {2: ((1, 8), (2, 8), (3, 8)), 4: ((1, 4), (2, 4), (3, 6)), 8: ((1, 3), (2, 4), (3, 5))}
#: Steps of the fits, about the same seconds for both.
STEPS = {"NMM": (500, 2000), "VAN": (150, 600)}
#: A method takes a field, its shape and the arguments, for which its seconds count, and returns
#: what scores it: a loss E[log q - log p*], with its standard error if it is sampled, or an
#: estimate of log Z.
Method = Callable[[PairwiseMRF, tuple[int, int], Namespace], Callable[[], dict]]


def independent(field: PairwiseMRF, shape: tuple[int, int], args):
    found = mean_field(field, num_random=args.num_random)
    return lambda: {"loss": found.losses[0].item()}


def chains(field: PairwiseMRF, shape: tuple[int, int], args):
    """Rows or columns, whichever are better by their own loss."""
    options = {"num_random": args.num_random}
    each = [chain_mean_field(field, shape, down=down, **options) for down in (False, True)]
    return lambda: {"loss": min(found.losses[0].item() for found in each)}


def by_bethe(field: PairwiseMRF, shape: tuple[int, int], args):
    found = bethe(field)
    return lambda: {"estimate": found.log_z, "change": found.change}


def by_trees(field: PairwiseMRF, shape: tuple[int, int], args):
    found = tree_reweighted(field)
    return lambda: {"estimate": found.log_z, "change": found.change}


def nmm(num_steps: int, radius: int = 1) -> Method:
    """The bound of the better of two starts, one of which is the mean field."""

    def fit(field: PairwiseMRF, shape: tuple[int, int], args):
        hood, order = grid(shape, radius)
        marginals = mean_field(field, num_random=args.num_random).marginals
        options = Namespace(**vars(args) | {"num_steps": 4 if args.smoke else num_steps})
        mix = fit_free(field, hood, order, marginals, options)
        return lambda: dict(zip(("loss", "error"), loss(mix, field, order, 1024, 64), strict=True))

    return fit


def half(num_steps: int, by_row: bool = False) -> Method:
    """Of every other pixel, the rest given these; the same two starts."""

    def fit(field: PairwiseMRF, shape: tuple[int, int], args):
        marginals = mean_field(field, num_random=args.num_random).marginals
        options = Namespace(**vars(args) | {"num_steps": 4 if args.smoke else num_steps})
        found = fit_half(field, shape, marginals, options, by_row)
        bound = partial(drawn_bound, *found, args.num_draws)
        return lambda: dict(zip(("loss", "error"), bound(), strict=True))

    return fit


def network(num_steps: int) -> Method:
    """Its memory is a row and a pixel: the target's own conditionals need no more than a row."""

    def fit(field: PairwiseMRF, shape: tuple[int, int], args):
        options = {"num_steps": 4 if args.smoke else num_steps, "lr": args.rate}
        fitted = fit_autoregressive(field, shape[1] + 1, hidden=8, **options)
        return lambda: sampled(fitted, field, args.num_draws)

    return fit


def windows(radius: int, neighbors: int) -> Method:
    def fit(field: PairwiseMRF, shape: tuple[int, int], args):
        at_once = 64 if field.num_classes == 2 else 8
        family = Windowed(field, shape, coarse_to_fine(*shape), radius, neighbors, at_once)
        return lambda: sampled(family, field, args.num_draws)

    return fit


def sampled(family, field: PairwiseMRF, count: int) -> dict:
    return dict(zip(("loss", "error"), with_error(drawn_loss(family, field, count)), strict=True))


def methods(labels: int) -> dict[str, Method]:
    """Of more than two labels the NMM's short fits alone."""
    count = 2 if labels == 2 else 1
    found: dict[str, Method] = {"mean field": independent, "chains": chains}
    found |= {"Bethe": by_bethe, "tree-reweighted": by_trees}
    for radius, neighbors in WINDOWS[labels]:
        side = 2 * radius + 1
        found[f"windows {side} x {side}, {neighbors} given"] = windows(radius, neighbors)
    found |= {f"NMM, {steps} steps": nmm(steps) for steps in STEPS["NMM"][:count]}
    if labels == 2:
        found["NMM, 5 x 5, 2000 steps"] = nmm(2000, radius=2)
        for steps in STEPS["NMM"]:
            found[f"NMM of half, row by row, {steps} steps"] = half(steps, by_row=True)
    found |= {f"NMM of half, {steps} steps": half(steps) for steps in STEPS["NMM"][:count]}
    return found | {f"VAN, {steps} steps": network(steps) for steps in STEPS["VAN"]}


def measure(args, results: Records, key: dict, names: dict[str, Method], make: Callable) -> None:
    """A row for each method that has none; log Z, which all of them need, at most once."""
    names = {
        name: fit
        for name, fit in names.items()
        if name.startswith(tuple(args.methods)) and not results.has(**key, method=name)
    }
    if not names:
        return
    field, shape, log_z = make()
    for name, fit in names.items():
        pyro.set_rng_seed(0)
        score, seconds = timed(fit, field, shape, args, clock=time.process_time)
        row = score()
        if "loss" in row:
            row["KL"] = row.pop("loss") + log_z
        else:
            row["log Z error"] = row.pop("estimate") - log_z
        results.add(**key, method=name, **{"log Z": log_z}, **row, seconds=seconds)


def strips(args, results: Records) -> None:
    def make(coupling: float, seed: int):
        field = random_field(narrow(args), coupling, seed)
        return field, narrow(args), field.log_normalizer().item()

    for seed in range(1 if args.smoke else 3):
        for coupling in COUPLINGS:
            key = {"task": "strips", "labels": 2, "coupling": coupling, "seed": seed}
            measure(args, results, key, methods(2), lambda c=coupling, s=seed: make(c, s))


def random_potts(shape: tuple[int, int], labels: int, coupling: float, seed: int) -> PairwiseMRF:
    """Unary terms of sd 0.5."""
    generator = torch.Generator().manual_seed(seed)
    unary = 0.5 * torch.randn(shape[0] * shape[1], labels, generator=generator)
    return potts(grid_edges(*shape), coupling, unary)


def by_labels(args, results: Records, labels: int, seed: int) -> None:
    shape = (4, 3) if args.smoke else (40, WIDTHS[labels])

    def make(coupling: float):
        field = random_potts(shape, labels, coupling, seed)
        return field, shape, field.log_normalizer().item()

    for coupling in POTTS[labels]:
        key = {"task": "potts", "labels": labels, "coupling": coupling, "seed": seed}
        measure(args, results, key, methods(labels), lambda c=coupling: make(c))


def potts_strips(args, results: Records) -> None:
    for seed in range(1 if args.smoke else 3):
        for labels in POTTS:
            by_labels(args, results, labels, seed)


def large(args, results: Records, key: dict, make: Callable) -> None:
    """Without those whose cost does not allow it; NMMs of all pixels are in fields.py's results."""
    kept = ("windows 3", "windows 5") if args.smoke else ("windows",)
    kept += ("NMM of half, 500", "Bethe", "chains")
    names = {name: fit for name, fit in methods(2).items() if name.startswith(kept)}
    measure(args, results, key | {"labels": 2}, names, make)


def plain(args, results: Records) -> None:
    size = 16 if args.smoke else 128

    def make(coupling: float):
        field = ising(grid_edges(size, size), coupling, torch.zeros(size * size))
        return field, (size, size), kac_ward(size, size, coupling)

    for coupling in COUPLINGS[:1] if args.smoke else COUPLINGS:
        key = {"task": "plain", "coupling": coupling, "seed": 0}
        large(args, results, key, partial(make, coupling))


def letter(args, results: Records) -> None:
    """log Z is what annealing has found for fields.py's results."""
    size = 8 if args.smoke else 128

    def make(seed: int):
        field, _ = noisy_letter(size, seed)
        if args.smoke:
            return field, (size, size), field.log_normalizer().item()
        (known,) = pick(read(RESULTS / "fields.jsonl"), task="letter", seed=seed)
        return field, (size, size), known["log Z"]

    for seed in range(1 if args.smoke else 3):
        large(args, results, {"task": "letter", "seed": seed}, partial(make, seed))


def main(argv: list[str] | None = None) -> Records:
    return run(
        argv, __doc__, (strips, potts_strips, plain, letter),
        smoke={"num_random": 1, "num_draws": 64},
        num_samples=4, lr=0.05, num_random=12, rate=(0.005, "of the autoregressive network"),
        methods=([""], "that begin with these words"), num_draws=(2048, "for a KL divergence"),
        results=RESULTS / "fields_compared.jsonl",
    )  # fmt: skip


if __name__ == "__main__":
    main()
