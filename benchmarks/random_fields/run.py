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

from benchmarks.random_fields import fields, nmm
from benchmarks.random_fields.messages import loopy
from benchmarks.shared.records import RESULTS, Records
from benchmarks.shared.records import run as run_tasks
from benchmarks.shared.timing import in_a_process, peak_memory, timed
from pyro_nmm import NeighborMixture
from pyro_nmm.guides import mean_field
from pyro_nmm.models import ConvolutionalNMM, FreeNMM, PairwiseMRF, annealed_log_normalizer

FILE = RESULTS / "fields.jsonl"
#: Of the windows of NMM-CNN on single fields, and of all windows of 128 x 128 pixels.
RADIUS = 3


def strips(args, results: Records) -> None:
    shape, seeds = (args.height, fields.WIDTH), range(args.num_seeds)
    windows, steps = fields.grid(shape), {"num_steps": args.num_steps}
    for key in results.missing(task="strips", coupling=args.couplings, seed=seeds):
        pyro.set_rng_seed(0)
        field, seconds = fields.random_ising(shape, key["coupling"], key["seed"]), {}
        log_z, truth = field.log_normalizer().item(), field.marginals()
        independent, seconds["mean field"] = timed(mean_field, field, num_random=12)
        known = field, windows, independent.marginals
        mix, seconds["NMM"] = timed(nmm.fit_all, *known, **steps)
        bound, bound_error = nmm.loss(mix, field, windows.order, 1024, 64)
        kl, error = nmm.divergence(mix, field, windows.order, 64)
        found = {"mean field": independent.marginals, "NMM": mix.marginals()}
        found["loopy"], seconds["loopy"] = loopy(field)
        row = {"log Z": log_z, "mean field": independent.losses[0].item() + log_z}
        row |= {"NMM bound": bound + log_z, "bound error": bound_error}
        row |= {"NMM": kl + log_z, "error": error}
        row["marginals"] = {
            name: None if probs is None else (probs - truth).abs().mean().item()
            for name, probs in found.items()
        }
        results.add(**key, **row, seconds=seconds)


def compare(args, field: PairwiseMRF, log_z: float | None = None, starts=None) -> dict:
    """Mean field, free NMM and NMM-CNN on one large field."""
    seconds, windows = {}, fields.grid((args.size, args.size), RADIUS)
    steps = {"num_steps": args.num_steps, "num_samples": args.num_samples}
    independent, seconds["mean field"] = timed(mean_field, field, starts, num_random=2)
    marginals, losses = independent.marginals, independent.losses
    row = {"mean field": losses[0].item(), "starts": losses.tolist(), "seconds": seconds}
    if log_z is None:
        found, seconds["log Z"] = timed(annealed_log_normalizer, field, marginals, args.sweeps, 8)
        log_z, row["log Z error"] = (value.item() for value in found)
    row["log Z"], network = log_z, ConvolutionalNMM(RADIUS)
    mix, seconds["NMM-CNN"] = timed(nmm.fit, field, windows, network, lr=0.003, **steps)
    row["NMM-CNN"] = nmm.loss(mix, field, windows.order, 64, 4)[0]
    # If all pixels have the same terms, a network with shared weights gets there first.
    with torch.no_grad():
        same = bool((field.unary == field.unary[0]).all())
        given = network(windows.hood, field) if same else None
    mix, seconds["NMM"] = timed(nmm.fit_all, field, windows, marginals, given, **steps)
    row["NMM"], row["error"] = nmm.loss(mix, field, windows.order, 64, 4)
    _, seconds["loopy"] = loopy(field)
    return row


def letter(args, results: Records) -> None:
    for key in results.missing(task="letter", seed=range(args.num_seeds)):
        pyro.set_rng_seed(0)
        field, clean = fields.noisy_letter(args.size, key["seed"])
        right = torch.stack([1 - clean.flatten(), 1 + clean.flatten()], -1) / 2
        results.add(**key, **compare(args, field, starts=right.clamp(0.001, 0.999)[None]))


def plain(args, results: Records) -> None:
    for key in results.missing(task="plain", coupling=args.couplings):
        pyro.set_rng_seed(0)
        field = fields.plain_ising(args.size, key["coupling"])
        log_z = fields.kac_ward(args.size, args.size, key["coupling"])
        results.add(**key, **compare(args, field, log_z))


def amortized(args, results: Records) -> None:
    """Couplings from 0.1 to 0.6 and fields of sd 0.5: trained on a stream, tested on 20 others."""
    shape = args.height, fields.WIDTH
    windows = fields.grid(shape)
    for key in results.missing(task="amortized"):
        pyro.set_rng_seed(0)
        network, steps = ConvolutionalNMM(1), {"num_steps": 3 * args.num_steps, "lr": 0.006}
        stream = lambda step: fields.random_ising(shape, None, 1000 + step)  # noqa: E731
        _, training = timed(nmm.fit, stream, windows, network, **steps)
        row: dict = {"train seconds": training, "mean field": [], "NMM-CNN": []}
        row["seconds"] = {"mean field": [], "NMM-CNN": []}
        for seed in range(20):
            field = fields.random_ising(shape, None, seed)
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
    for key in results.missing(task="scaling", size=args.sizes):
        results.add(**key, **in_a_process(args.threads, one_step, key["size"]))


def one_step(size: int) -> dict:
    def steps() -> list[float]:
        field, windows = fields.plain_ising(size, 0.4), fields.grid((size, size))
        network, one = FreeNMM(windows.hood, 2), {"num_steps": 1, "num_samples": 1}
        return [timed(nmm.fit, field, windows, network, **one)[1] for _ in range(6)]

    (first, *times), _, above = peak_memory(steps)
    return {"seconds": median(times), "first": first, "MiB": above / 2**20}


def deviations(args, results: Records) -> None:
    """NMM-CNN with and without the groups of pixels among its inputs, on fields of ``strips``."""
    if args.results == FILE:
        results = Records(RESULTS / "deviations.jsonl")
    shape, settings = (args.height, fields.WIDTH), {"num_steps": args.num_steps, "radius": RADIUS}
    windows, options = fields.grid(shape, RADIUS), {"num_steps": args.num_steps, "lr": 0.003}
    each = {"seed": range(args.num_seeds), "coupling": args.couplings, "settings": settings}
    for key in results.missing(task="fields", **each, change=("", "no groups")):
        field = fields.random_ising(shape, key["coupling"], key["seed"])
        pyro.set_rng_seed(0)
        network = ConvolutionalNMM(RADIUS, groups=not key["change"])
        mix, log_z = nmm.fit(field, windows, network, **options), field.log_normalizer().item()
        bound, error = nmm.loss(mix, field, windows.order, 1024, 64)
        row = {"bound": bound + log_z, "error": error}
        row["mean field"] = mean_field(field, num_random=12).losses[0].item() + log_z
        results.add(**key, **row)


def main(argv: list[str] | None = None) -> Records:
    return run_tasks(
        argv, __doc__, (strips, letter, plain, amortized, scaling, deviations),
        num_seeds=3, couplings=[0.2, 0.4, 0.6], num_steps=1000,
        num_samples=(4, "of the letter and the plain field"), height=(40, "of the narrow grids"),
        size=(128, "of the letter and the plain field"), sweeps=(2000, "of annealing"),
        sizes=([32, 64, 128, 256, 512], "of scaling"), results=FILE,
    )  # fmt: skip


if __name__ == "__main__":
    main()
