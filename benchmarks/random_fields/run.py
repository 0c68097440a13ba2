# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The NMM and rivals as approximations of Markov random fields. README.md explains the tasks."""

import time
from collections.abc import Callable
from functools import lru_cache, partial
from statistics import median

import pyro
import torch
from torch import Tensor

from benchmarks.random_fields import fields, methods
from benchmarks.shared.records import RESULTS, Records, command, pick
from benchmarks.shared.timing import in_a_process, peak_memory, timed
from pyro_nmm import NeighborMixture, models
from pyro_nmm.guides import mean_field

#: Of the windows of NMM-CNN on single fields, and of all windows of 128 x 128 pixels.
RADIUS = 3
#: Of fits, and of annealing; and the sides of the grids of ``scaling``.
STEPS = {"strips": 2000, "large": 600, "annealing": 2000, "amortized": 3000, "deviations": 1000}
SIZES = [32, 64, 128, 256, 512]


def compare(args, names: list[str], make: Callable, **keys) -> None:
    """Measure each method on each field; ``make`` returns a field and its log Z, kept for all."""
    make, results = lru_cache(1)(make), Records(args.results.with_name("fields_compared.jsonl"))
    shape = fields.STRIPS.get(keys.get("labels"), (fields.SIZE, fields.SIZE))
    for key in results.missing(**keys, method=names):
        field, log_z = make(key.get("coupling"), key["seed"])
        pyro.set_rng_seed(0)
        score, seconds = timed(methods.fitted, key["method"], field, shape, clock=time.process_time)
        if key["method"] in methods.MESSAGES:
            row = {"change": score.change, "log Z error": score.log_z - log_z}
        else:
            row = dict(zip(("KL", "error"), score(), strict=False))
            row["KL"] += log_z
        results.add(**key, **row, seconds=seconds)


def loopy(field: models.PairwiseMRF) -> tuple[Tensor | None, float | None]:
    """Marginals of two labels by PGMax, and seconds; neither if PGMax is not installed."""
    try:
        from pgmax import fgraph, fgroup, infer, vgroup
    except ImportError:
        return None, None
    began = time.perf_counter()
    nodes = vgroup.NDVarArray(num_states=2, shape=(field.num_nodes,))
    graph = fgraph.FactorGraph(variable_groups=nodes)
    tables = field.strength.expand(field.num_edges)[:, None, None] * field.interaction
    pairs = {"variables_for_factors": [[nodes[i], nodes[j]] for i, j in field.edges.T.tolist()]}
    graph.add_factors(fgroup.PairwiseFactorGroup(**pairs, log_potential_matrix=tables.numpy()))
    program = infer.build_inferer(graph.bp_state, backend="bp")
    state = program.init(evidence_updates={nodes: field.unary.numpy()})
    state = program.run(state, num_iters=300, damping=0.5, temperature=1.0)
    marginals = infer.get_marginals(program.get_beliefs(state))[nodes]
    return torch.tensor(marginals.tolist()), time.perf_counter() - began


def strips(args, results: Records) -> None:
    windows, steps = fields.grid(fields.STRIPS[2]), {"num_steps": STEPS["strips"]}
    for key in results.missing(task="strips", coupling=fields.COUPLINGS[2], seed=fields.SEEDS):
        pyro.set_rng_seed(0)
        (field, log_z), seconds = fields.strip(2, key["coupling"], key["seed"]), {}
        (free, losses), seconds["mean field"] = timed(mean_field, field, num_random=12)
        mix, seconds["NMM"] = timed(methods.fit_all, field, windows, free, **steps)
        row = {"mean field": losses[0].item() + log_z}
        row["NMM bound"] = methods.loss(mix, field, windows.order, 1024, 64)[0] + log_z
        kl, row["error"] = methods.divergence(mix, field, windows.order)
        found = {"mean field": free, "NMM": mix.marginals()}
        found["loopy"], seconds["loopy"] = loopy(field)
        truth = field.marginals()
        errors = {k: (p - truth).abs().mean().item() for k, p in found.items() if p is not None}
        results.add(**key, **row, NMM=kl + log_z, marginals=errors, seconds=seconds)
    for labels, couplings in fields.COUPLINGS.items():
        keys = {"task": "strips" if labels == 2 else "potts", "labels": labels}
        keys |= {"seed": fields.SEEDS, "coupling": couplings}
        compare(args, methods.NARROW[labels], partial(fields.strip, labels), **keys)


def large(field: models.PairwiseMRF, log_z: float | None, starts: Tensor | None = None) -> dict:
    """Mean field, free NMM and NMM-CNN on one large field."""
    seconds, windows = {}, fields.grid((fields.SIZE, fields.SIZE), RADIUS)
    steps = {"num_steps": STEPS["large"], "num_samples": 2}
    (free, losses), seconds["mean field"] = timed(mean_field, field, starts, num_random=2)
    row = {"mean field": losses[0].item(), "log Z": log_z, "seconds": seconds}
    if log_z is None:
        found = models.annealed_log_normalizer(field, free, STEPS["annealing"], 8)
        row["log Z"], row["log Z error"] = (value.item() for value in found)
    network = models.ConvolutionalNMM(RADIUS)
    cnn, seconds["NMM-CNN"] = timed(methods.fit, field, windows, network, lr=0.003, **steps)
    row["NMM-CNN"] = methods.loss(cnn, field, windows.order, 64, 4)[0]
    # If all pixels have the same terms, a network with shared weights gets there first.
    given = cnn if field.unary.eq(field.unary[0]).all() else None
    mix, seconds["NMM"] = timed(methods.fit_all, field, windows, free, given, **steps)
    row["NMM"] = methods.loss(mix, field, windows.order, 64, 4)[0]
    _, seconds["loopy"] = loopy(field)
    return row


def letter(args, results: Records) -> None:
    for key in results.missing(task="letter", seed=fields.SEEDS):
        pyro.set_rng_seed(0)
        field, clean = fields.noisy_letter(key["seed"])
        right = torch.stack([-clean, clean], -1).view(1, -1, 2).clamp(0.001, 0.999)
        results.add(**key, **large(field, None, right))
    log_z = {row["seed"]: row["log Z"] for row in pick(results.rows, task="letter")}
    known = {seed: (fields.noisy_letter(seed)[0], log_z[seed]) for seed in fields.SEEDS}
    compare(args, methods.LARGE, lambda _, seed: known[seed], task="letter", seed=fields.SEEDS)


def plain(args, results: Records) -> None:
    for key in results.missing(task="plain", coupling=fields.COUPLINGS[2]):
        pyro.set_rng_seed(0)
        results.add(**key, **large(*fields.plain(key["coupling"])))
    keys = {"task": "plain", "coupling": fields.COUPLINGS[2], "seed": 0}
    compare(args, methods.LARGE, lambda coupling, _: fields.plain(coupling), **keys)


def amortized(args, results: Records) -> None:
    windows = fields.grid(fields.STRIPS[2])
    for key in results.missing(task="amortized"):
        pyro.set_rng_seed(0)
        network, num_steps = models.ConvolutionalNMM(1), STEPS["amortized"]
        stream = lambda step: fields.random_field(2, None, 1000 + step)  # noqa: E731
        _, training = timed(methods.fit, stream, windows, network, num_steps=num_steps, lr=0.006)
        tests = []
        for seed in range(20):
            field, log_z = fields.strip(2, None, seed)
            (_, losses), slow = timed(mean_field, field)
            with torch.no_grad():
                parameters, fast = timed(network, windows.hood, field)
            mix = NeighborMixture(windows.hood, *parameters)
            bound = methods.loss(mix, field, windows.order, 512, 64)[0] + log_z
            tests.append((losses[0].item() + log_z, bound, slow, fast))
        free, bounds, slow, fast = zip(*tests, strict=True)
        row = {"train seconds": training, "mean field": free, "NMM-CNN": bounds}
        results.add(**key, **row, seconds={"mean field": slow, "NMM-CNN": fast})


def scaling(args, results: Records) -> None:
    for key in results.missing(task="scaling", size=SIZES):
        times, _, above = in_a_process(args.threads, peak_memory, six_steps, key["size"])
        results.add(**key, seconds=median(times[1:]), MiB=above / 2**20)


def six_steps(size: int) -> list[float]:
    field = models.ising(models.grid_edges(size, size), 0.4, torch.zeros(size * size))
    windows = fields.grid((size, size))
    network, one = models.FreeNMM(windows.hood, 2), {"num_steps": 1, "num_samples": 1}
    return [timed(methods.fit, field, windows, network, **one)[1] for _ in range(6)]


def deviations(args, results: Records) -> None:
    results = Records(args.results.with_name("deviations.jsonl"))
    windows = fields.grid(fields.STRIPS[2], RADIUS)
    each = {"seed": fields.SEEDS, "coupling": fields.COUPLINGS[2], "change": ("", "no groups")}
    for key in results.missing(task="fields", **each):
        field, log_z = fields.strip(2, key["coupling"], key["seed"])
        pyro.set_rng_seed(0)
        network = models.ConvolutionalNMM(RADIUS, groups=not key["change"])
        mix = methods.fit(field, windows, network, num_steps=STEPS["deviations"], lr=0.003)
        results.add(**key, bound=methods.loss(mix, field, windows.order, 1024, 64)[0] + log_z)


TASKS = strips, letter, plain, amortized, scaling, deviations
main = command(__doc__, TASKS, results=RESULTS / "fields.jsonl")

if __name__ == "__main__":
    main()
