# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
The NMM and its rivals as approximations of Markov random fields: KL divergences, errors of log Z,
and seconds of processor time on one thread.

    python -m benchmarks.random_fields.rivals strips potts_strips plain letter

Tasks: ``strips``, ``plain`` and ``letter`` (fields of run.py), and ``potts_strips`` (narrow grids
of four and eight labels).
"""

import re
import time
from collections.abc import Callable
from functools import lru_cache, partial

import pyro
import torch

from benchmarks.random_fields import fields
from benchmarks.random_fields.autoregressive import Autoregressive, Windowed, fit_autoregressive
from benchmarks.random_fields.free_energies import Messages, bethe, chain_mean_field
from benchmarks.random_fields.free_energies import transposed, tree_reweighted
from benchmarks.random_fields.nmm import drawn_bound, fit_all, fit_half, loss, with_error
from benchmarks.shared.records import RESULTS, Records, pick, read, run
from benchmarks.shared.timing import timed
from pyro_nmm.guides import mean_field
from pyro_nmm.models import PairwiseMRF

EVERY = ["mean field", "chains", "Bethe", "tree-reweighted"]
EVERY += ["NMM, 500 steps", "NMM of half, 500 steps", "VAN, 150 steps", "VAN, 600 steps"]
#: As the number of labels allows.
WINDOWS = {
    2: ["windows 3 x 3, 8 given", "windows 5 x 5, 8 given", "windows 7 x 7, 8 given"],
    4: ["windows 3 x 3, 4 given", "windows 5 x 5, 4 given", "windows 7 x 7, 6 given"],
    8: ["windows 3 x 3, 3 given", "windows 5 x 5, 4 given", "windows 7 x 7, 5 given"],
}
#: Further fits for two labels, and methods whose cost allows 128 x 128 pixels.
LONG = ["NMM, 2000 steps", "NMM, 5 x 5, 2000 steps", "NMM of half, 2000 steps"]
LONG += ["NMM of half, row by row, 500 steps", "NMM of half, row by row, 2000 steps"]
LARGE = ["chains", "Bethe", "NMM of half, 500 steps", *WINDOWS[2]]
#: Draws for a KL divergence, and random starts of mean fields and, on large fields, of chains.
DRAWS, STARTS, FEW_STARTS = 2048, 12, 2


def fit(name: str, field: PairwiseMRF, shape: fields.Shape):
    """
    The method of this name, fitted: messages with an estimate of log Z, or a function of the loss
    E[log q - log p*] and, if it is sampled, its standard error.
    """
    kind, numbers = name.split(",")[0], [int(n) for n in re.findall(r"\d+", name)]
    if kind in ("Bethe", "tree-reweighted"):
        return bethe(field) if kind == "Bethe" else tree_reweighted(field)
    if kind == "chains":  # rows or columns
        grids = (field, shape[1]), (transposed(field, shape), shape[0])
        starts = FEW_STARTS if field.num_nodes > 1000 else STARTS
        found = [chain_mean_field(*each, starts)[1] for each in grids]
        return lambda: (min(found),)
    if kind == "VAN":  # a pixel's conditional in the target needs a memory of no more than a row
        options = {"hidden": 8, "num_steps": numbers[0], "lr": 0.005}
        return partial(drawn_loss, fit_autoregressive(field, shape[1] + 1, **options), field)
    if kind.startswith("windows"):
        side, _, given = numbers
        return partial(drawn_loss, Windowed(field, fields.grid(shape, side // 2), given), field)
    if kind not in ("mean field", "NMM", "NMM of half"):
        raise ValueError(f"no method is called {name!r}")
    independent = mean_field(field, num_random=STARTS)
    if kind == "mean field":
        return lambda: (independent.losses[0].item(),)
    marginals, steps = independent.marginals, {"num_steps": numbers[-1]}
    if kind == "NMM of half":
        found = fit_half(field, shape, marginals, "row by row" in name, **steps)
        return partial(drawn_bound, *found, DRAWS)
    around = fields.grid(shape, 2 if "5 x 5" in name else 1)
    mix = fit_all(field, around, marginals, **steps)
    return partial(loss, mix, field, around.order, 1024, 64)


@torch.no_grad()
def drawn_loss(
    family: Autoregressive | Windowed, field: PairwiseMRF, count: int = DRAWS
) -> tuple[float, float]:
    """E[log q(y) - log p*(y)], which is KL(q || p) - log Z, and its standard error."""
    y = family.sample(count)
    return with_error(family.log_prob(y).double() - field.log_potential(y).double())


def measure(args, results: Records, shape: fields.Shape, make: Callable, names, **keys) -> None:
    """
    A row for each method and field that has none. ``make`` returns the field of a coupling and a
    seed, and its log Z, which takes longer than some methods and is computed once for all.
    """
    make = lru_cache(1)(make)
    for key in results.missing(**keys, method=names if args.methods == ["all"] else args.methods):
        field, log_z = make(key.get("coupling"), key["seed"])
        pyro.set_rng_seed(0)
        score, seconds = timed(fit, key["method"], field, shape, clock=time.process_time)
        if isinstance(score, Messages):
            row = {"change": score.change, "log Z error": score.log_z - log_z}
        else:
            row = dict(zip(("KL", "error"), score(), strict=False))
            row["KL"] += log_z
        results.add(**key, **row, seconds=seconds)


def strips(args, results: Records, task: str = "strips", labels: int = 2) -> None:
    def make(coupling: float, seed: int) -> tuple[PairwiseMRF, float]:
        field = fields.random_field(labels, coupling, seed)
        return field, field.log_normalizer().item()

    names = EVERY + WINDOWS[labels] + (LONG if labels == 2 else [])
    keys = {"labels": labels, "seed": fields.SEEDS, "coupling": fields.COUPLINGS[labels]}
    measure(args, results, fields.STRIPS[labels], make, names, task=task, **keys)


def potts_strips(args, results: Records) -> None:
    for labels in (4, 8):
        strips(args, results, "potts", labels)


def plain(args, results: Records) -> None:
    def make(coupling: float, seed: int) -> tuple[PairwiseMRF, float]:
        return fields.plain_ising(fields.SIZE, coupling), fields.kac_ward(*shape, coupling)

    shape, couplings = (fields.SIZE, fields.SIZE), fields.COUPLINGS[2]
    keys = {"labels": 2, "seed": 0, "coupling": couplings}
    measure(args, results, shape, make, LARGE, task="plain", **keys)


def letter(args, results: Records) -> None:
    """With log Z from the rows of run.py, which has it by annealing."""

    def make(coupling: None, seed: int) -> tuple[PairwiseMRF, float]:
        return fields.noisy_letter(seed)[0], log_z[seed]

    rows = pick(read(args.results.with_name("fields.jsonl")), task="letter")
    shape, log_z = (fields.SIZE, fields.SIZE), {row["seed"]: row["log Z"] for row in rows}
    measure(args, results, shape, make, LARGE, task="letter", labels=2, seed=fields.SEEDS)


def main(argv: list[str] | None = None) -> Records:
    tasks, results = (strips, potts_strips, plain, letter), RESULTS / "fields_compared.jsonl"
    return run(argv, __doc__, tasks, methods=(["all"], "names"), results=results)


if __name__ == "__main__":
    main()
