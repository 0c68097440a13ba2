# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
The NMM as an approximation of Markov random fields, beside the best mean field.

    python -m benchmarks.random_fields.run strips letter plain amortized scaling deviations

Tasks: ``strips`` (12 x 40 pixels), ``letter`` (the paper's: Murphy's noisy letter), ``plain`` (no
fields), ``amortized`` (one network for many fields), ``scaling`` (cost of a step), ``deviations``
(inputs of NMM-CNN; rows go to deviations.jsonl). With PGMax, loopy belief propagation runs beside.
"""

from statistics import median

import pyro
import torch
from torch import Tensor

from benchmarks.random_fields import fields, nmm
from benchmarks.random_fields.free_energies import loopy
from benchmarks.shared import records
from benchmarks.shared.records import RESULTS, Records
from benchmarks.shared.timing import in_a_process, peak_memory, timed
from pyro_nmm import NeighborMixture
from pyro_nmm.guides import mean_field
from pyro_nmm.models import ConvolutionalNMM, FreeNMM, PairwiseMRF, annealed_log_normalizer

#: Of the windows of NMM-CNN on single fields, and of all windows of 128 x 128 pixels.
RADIUS = 3
#: Of fits, and of annealing; and the sides of the grids of ``scaling``.
STEPS = {"strips": 2000, "large": 600, "annealing": 2000, "amortized": 3000, "deviations": 1000}
SIZES = [32, 64, 128, 256, 512]


def strips(args, results: Records) -> None:
    windows = fields.grid(fields.STRIPS[2])
    for key in results.missing(task="strips", coupling=fields.COUPLINGS[2], seed=fields.SEEDS):
        pyro.set_rng_seed(0)
        field, seconds = fields.random_field(2, key["coupling"], key["seed"]), {}
        log_z, truth = field.log_normalizer().item(), field.marginals()
        independent, seconds["mean field"] = timed(mean_field, field, num_random=12)
        known, steps = (field, windows, independent.marginals), {"num_steps": STEPS["strips"]}
        mix, seconds["NMM"] = timed(nmm.fit_all, *known, **steps)
        row = {"mean field": independent.losses[0].item() + log_z}
        row["NMM bound"] = nmm.loss(mix, field, windows.order, 1024, 64)[0] + log_z
        kl, row["error"] = nmm.divergence(mix, field, windows.order)
        found = {"mean field": independent.marginals, "NMM": mix.marginals()}
        found["loopy"], seconds["loopy"] = loopy(field)
        row["marginals"] = {
            name: (probs - truth).abs().mean().item()
            for name, probs in found.items()
            if probs is not None
        }
        results.add(**key, **row, NMM=kl + log_z, seconds=seconds)


def compare(field: PairwiseMRF, log_z: float | None = None, starts: Tensor | None = None) -> dict:
    """Mean field, free NMM and NMM-CNN on one large field."""
    seconds, windows = {}, fields.grid((fields.SIZE, fields.SIZE), RADIUS)
    steps = {"num_steps": STEPS["large"], "num_samples": 2}
    independent, seconds["mean field"] = timed(mean_field, field, starts, num_random=2)
    row = {"mean field": independent.losses[0].item(), "log Z": log_z, "seconds": seconds}
    if log_z is None:
        found = annealed_log_normalizer(field, independent.marginals, STEPS["annealing"], 8)
        row["log Z"], row["log Z error"] = (value.item() for value in found)
    network = ConvolutionalNMM(RADIUS)
    shared, seconds["NMM-CNN"] = timed(nmm.fit, field, windows, network, lr=0.003, **steps)
    row["NMM-CNN"] = nmm.loss(shared, field, windows.order, 64, 4)[0]
    # If all pixels have the same terms, a network with shared weights gets there first.
    given = shared if field.unary.eq(field.unary[0]).all() else None
    known = field, windows, independent.marginals, given
    mix, seconds["NMM"] = timed(nmm.fit_all, *known, **steps)
    row["NMM"] = nmm.loss(mix, field, windows.order, 64, 4)[0]
    _, seconds["loopy"] = loopy(field)
    return row


def letter(args, results: Records) -> None:
    for key in results.missing(task="letter", seed=fields.SEEDS):
        pyro.set_rng_seed(0)
        field, clean = fields.noisy_letter(key["seed"])
        right = torch.stack([1 - clean.flatten(), 1 + clean.flatten()], -1) / 2
        results.add(**key, **compare(field, starts=right.clamp(0.001, 0.999)[None]))


def plain(args, results: Records) -> None:
    for key in results.missing(task="plain", coupling=fields.COUPLINGS[2]):
        pyro.set_rng_seed(0)
        field = fields.plain_ising(fields.SIZE, key["coupling"])
        log_z = fields.kac_ward(fields.SIZE, fields.SIZE, key["coupling"])
        results.add(**key, **compare(field, log_z))


def amortized(args, results: Records) -> None:
    """Couplings from 0.1 to 0.6 and fields of sd 0.5: trained on a stream, tested on 20 others."""
    windows = fields.grid(fields.STRIPS[2])
    for key in results.missing(task="amortized"):
        pyro.set_rng_seed(0)
        network, steps = ConvolutionalNMM(1), {"num_steps": STEPS["amortized"], "lr": 0.006}
        stream = lambda step: fields.random_field(2, None, 1000 + step)  # noqa: E731
        _, training = timed(nmm.fit, stream, windows, network, **steps)
        row: dict = {"train seconds": training, "mean field": [], "NMM-CNN": []}
        row["seconds"] = {"mean field": [], "NMM-CNN": []}
        for seed in range(20):
            field = fields.random_field(2, None, seed)
            log_z = field.log_normalizer().item()
            independent, seconds = timed(mean_field, field)
            row["mean field"].append(independent.losses[0].item() + log_z)
            row["seconds"]["mean field"].append(seconds)
            with torch.no_grad():
                parameters, seconds = timed(network, windows.hood, field)
            mix = NeighborMixture(windows.hood, *parameters)
            row["NMM-CNN"].append(nmm.loss(mix, field, windows.order, 512, 64)[0] + log_z)
            row["seconds"]["NMM-CNN"].append(seconds)
        results.add(**key, **row)


def scaling(args, results: Records) -> None:
    """Seconds and memory of a step, each size in a process of its own."""
    for key in results.missing(task="scaling", size=SIZES):
        results.add(**key, **in_a_process(args.threads, one_step, key["size"]))


def one_step(size: int) -> dict:
    def steps() -> list[float]:
        field, windows = fields.plain_ising(size, 0.4), fields.grid((size, size))
        network, one = FreeNMM(windows.hood, 2), {"num_steps": 1, "num_samples": 1}
        return [timed(nmm.fit, field, windows, network, **one)[1] for _ in range(6)]

    times, _, above = peak_memory(steps)
    return {"seconds": median(times[1:]), "MiB": above / 2**20}


def deviations(args, results: Records) -> None:
    """NMM-CNN with and without the groups of pixels among its inputs, on fields of ``strips``."""
    results = Records(args.results.with_name("deviations.jsonl"))
    windows = fields.grid(fields.STRIPS[2], RADIUS)
    each = {"seed": fields.SEEDS, "coupling": fields.COUPLINGS[2], "change": ("", "no groups")}
    for key in results.missing(task="fields", **each):
        field = fields.random_field(2, key["coupling"], key["seed"])
        pyro.set_rng_seed(0)
        network = ConvolutionalNMM(RADIUS, groups=not key["change"])
        mix = nmm.fit(field, windows, network, num_steps=STEPS["deviations"], lr=0.003)
        bound = nmm.loss(mix, field, windows.order, 1024, 64)[0]
        results.add(**key, bound=bound + field.log_normalizer().item())


def main(argv: list[str] | None = None) -> Records:
    tasks = strips, letter, plain, amortized, scaling, deviations
    return records.run(argv, __doc__, tasks, results=RESULTS / "fields.jsonl")


if __name__ == "__main__":
    main()
