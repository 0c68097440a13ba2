# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
The NMM as an approximation of Markov random fields, against the best mean field.

    python benchmarks/fields.py strips letter plain amortized scaling

Tasks: ``strips`` (12 x 40, exact log Z), ``letter`` (the paper's: 128 x 128, Murphy's noisy
letter), ``plain`` (128 x 128 without fields, exact log Z), ``amortized`` (one network for many
fields) and ``scaling``. With PGMax installed, loopy belief propagation runs beside (``pip install
pgmax "jax==0.4.35"``). Seconds compare within a row.
"""

from __future__ import annotations

import time
from statistics import median

import numpy as np
import pyro
import torch
from torch import Tensor

from benchmarks.shared.common import RESULTS, Records, run
from benchmarks.shared.references import kac_ward
from benchmarks.shared.timing import in_a_process, peak_memory, timed
from pyro_nmm import Neighborhood, NeighborMixture
from pyro_nmm.datasets import letters
from pyro_nmm.guides import fit_mixture, mean_field
from pyro_nmm.models import (
    ConvolutionalNMM,
    FreeNMM,
    PairwiseMRF,
    annealed_log_normalizer,
    coarse_to_fine,
    grid_edges,
    ising,
    ising_posterior,
)

COUPLINGS = (0.2, 0.4, 0.6)
SIZES = (32, 64, 128, 256, 512)


def grid(shape: tuple[int, int], radius: int = 1) -> tuple[Neighborhood, Tensor]:
    """Windows, and the order of the fit."""
    return Neighborhood.grid(*shape, radius), coarse_to_fine(*shape)


def random_field(shape: tuple[int, int], coupling: float | None, seed: int) -> PairwiseMRF:
    """Fields of sd 0.5 on the pixels; without a coupling, one that is drawn from 0.1 to 0.6."""
    generator = torch.Generator().manual_seed(seed)
    if coupling is None:
        coupling = 0.1 + 0.5 * torch.rand((), generator=generator).item()
    noise = torch.randn(shape[0] * shape[1], generator=generator)
    return ising(grid_edges(*shape), coupling, 0.5 * noise)


def with_error(samples: Tensor) -> tuple[float, float]:
    """The mean and its standard error."""
    return samples.mean().item(), (samples.std() / len(samples) ** 0.5).item()


@torch.no_grad()
def loss(mix: NeighborMixture, field: PairwiseMRF, order: Tensor, num_samples: int, chunk: int):
    """The bound's loss E[log p(y, c) / q(c | y) - log p*(y)], and its standard error."""
    parts = [mix.entropy_bound(chunk, "reward_to_go", order) for _ in range(num_samples // chunk)]
    return with_error(-torch.cat(parts).double() - field.expected_potential(mix).double())


def divergence(mix: NeighborMixture, field: PairwiseMRF, order: Tensor, num_particles: int):
    """
    E[log p(y) - log p*(y)] with log p(y) by sequential Monte Carlo over the choices in the order
    of the fit: unbiased for p(y), and for its logarithm as far as the particles agree.
    """
    draws = mix.sample((256,))
    log_prob = [mix.log_likelihood(y, num_particles=num_particles, order=order) for y in draws]
    return with_error((torch.stack(log_prob) - field.log_potential(draws)).double())


def fit_free(field: PairwiseMRF, hood: Neighborhood, order, marginals, args, other=None):
    """
    The best of several starts by the loss itself: single pixels' evidence, the mean field, and
    another mixture if given.
    """
    width = int((field.edges[1] - field.edges[0]).max())
    distance = distances(hood, torch.arange(field.num_nodes), width).to(marginals)
    evidence = FreeNMM(hood, field.num_classes, field.unary.softmax(-1), kappa=1.0, gamma=0.0)
    independent = FreeNMM(hood, field.num_classes, marginals, kappa=4.0, gamma=0.0)
    starts = [(evidence, 0.5, args.lr), (independent, 0.0, args.lr)]
    with torch.no_grad():
        for network, *_ in starts:
            network.logits.sub_(0.5 * distance)
        if other is not None:
            starts.append((FreeNMM(hood, field.num_classes), 0.0, 0.2 * args.lr))
            starts[-1][0].log_alpha.copy_(other.alpha.log())
            starts[-1][0].logits.copy_(other.logits)
    count, found = max(4, 2**15 // field.num_nodes), []
    for network, warmup, lr in starts:
        steps = {"num_steps": args.num_steps, "num_samples": args.num_samples}
        mix, _ = fit_mixture(field, hood, network, order=order, lr=lr, warmup=warmup, **steps)
        found.append((loss(mix, field, order, 8 * count, count)[0], mix))
    return min(found, key=lambda f: f[0])[1]


def distances(hood: Neighborhood, pixels: Tensor, width: int) -> Tensor:
    """``(num_edges,)``: squared distances of the ends of edges, whose nodes are such pixels."""
    ends = pixels[torch.stack([hood.source, hood.target])]
    across, down = (ends % width).diff(dim=0), (ends // width).diff(dim=0)
    return (across.square() + down.square())[0]


def loopy(field: PairwiseMRF, num_iterations: int = 300) -> tuple[Tensor | None, float | None]:
    """Marginals by PGMax's loopy belief propagation, and seconds; neither without it."""
    try:
        from pgmax import fgraph, fgroup, infer, vgroup
    except ImportError:
        return None, None
    began = time.perf_counter()
    nodes = vgroup.NDVarArray(num_states=2, shape=(field.num_nodes,))
    graph = fgraph.FactorGraph(variable_groups=nodes)
    strength = field.strength.expand(field.edges.shape[1])
    tables = (strength[:, None, None] * field.interaction).numpy()
    pairs = [[nodes[i], nodes[j]] for i, j in field.edges.T.tolist()]
    graph.add_factors(
        fgroup.PairwiseFactorGroup(variables_for_factors=pairs, log_potential_matrix=tables)
    )
    program = infer.build_inferer(graph.bp_state, backend="bp")
    state = program.init(evidence_updates={nodes: field.unary.numpy()})
    state = program.run(state, num_iters=num_iterations, damping=0.5, temperature=1.0)
    marginals = infer.get_marginals(program.get_beliefs(state))[nodes]
    return torch.tensor(np.array(marginals)), time.perf_counter() - began


def narrow(args) -> tuple[int, int]:
    return (8, 4) if args.smoke else (40, 12)


def strips(args, results: Records) -> None:
    hood, order = grid(narrow(args))
    seeds = range(1 if args.smoke else 3)
    for key in results.missing(task="strips", coupling=COUPLINGS, seed=seeds):
        pyro.set_rng_seed(0)
        field, seconds = random_field(narrow(args), key["coupling"], key["seed"]), {}
        log_z, truth = field.log_normalizer().item(), field.marginals()
        independent, seconds["mean field"] = timed(mean_field, field, num_random=12)
        mix, seconds["NMM"] = timed(fit_free, field, hood, order, independent.marginals, args)
        bound, bound_error = loss(mix, field, order, 1024, 64)
        kl, error = divergence(mix, field, order, 64)
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


def compare(args, field: PairwiseMRF, size: int, log_z: float | None, starts=None) -> dict:
    """Mean field, free NMM and NMM-CNN on one large field."""
    seconds, (hood, order) = {}, grid((size, size), args.radius)
    independent, seconds["mean field"] = timed(mean_field, field, starts, num_random=2)
    marginals, losses = independent.marginals, independent.losses
    row = {"mean field": losses[0].item(), "starts": losses.tolist(), "seconds": seconds}
    if log_z is None:
        found, seconds["log Z"] = timed(annealed_log_normalizer, field, marginals, args.sweeps, 8)
        log_z, row["log Z error"] = (value.item() for value in found)
    row["log Z"] = log_z
    options = {"num_steps": args.num_steps, "num_samples": args.num_samples, "lr": 0.003}
    network = ConvolutionalNMM(args.radius)
    found, seconds["NMM-CNN"] = timed(fit_mixture, field, hood, network, order=order, **options)
    row["NMM-CNN"] = loss(found[0], field, order, 64, 4)[0]
    # Where all pixels are alike, a network that shares its weights among them gets there first.
    shared = found[0] if bool((field.unary == field.unary[0]).all()) else None
    mix, seconds["NMM"] = timed(fit_free, field, hood, order, marginals, args, shared)
    row["NMM"], row["error"] = loss(mix, field, order, 64, 4)
    _, seconds["loopy"] = loopy(field)
    return row


def large(args) -> int:
    return 16 if args.smoke else 128


def noisy_letter(size: int, seed: int) -> tuple[PairwiseMRF, Tensor]:
    """The posterior of a letter's pixels, and the clean ones, -1 or 1."""
    clean = letters("A", size, size)
    noise = torch.randn(size, size, generator=torch.Generator().manual_seed(seed))
    return ising_posterior(clean + 2 * noise, coupling=1.0, sigma=2.0), clean


def letter(args, results: Records) -> None:
    size = large(args)
    for key in results.missing(task="letter", seed=range(1 if args.smoke else 3)):
        pyro.set_rng_seed(0)
        field, clean = noisy_letter(size, key["seed"])
        right = torch.stack([1 - clean.flatten(), 1 + clean.flatten()], -1) / 2
        results.add(**key, **compare(args, field, size, None, right.clamp(0.001, 0.999)[None]))


def plain(args, results: Records) -> None:
    size = large(args)
    for key in results.missing(task="plain", coupling=COUPLINGS):
        pyro.set_rng_seed(0)
        field = ising(grid_edges(size, size), key["coupling"], torch.zeros(size * size))
        results.add(**key, **compare(args, field, size, kac_ward(size, size, key["coupling"])))


def amortized(args, results: Records) -> None:
    """Couplings from 0.1 to 0.6 and fields of sd 0.5: trained on a stream, tested on 20 others."""
    hood, order = grid(narrow(args))

    def stream(step: int) -> PairwiseMRF:
        return random_field(narrow(args), None, 1000 + step)

    for key in results.missing(task="amortized"):
        pyro.set_rng_seed(0)
        network = ConvolutionalNMM(radius=1)
        options = {"num_steps": 3 * args.num_steps, "num_samples": 4, "lr": 0.006}
        _, training = timed(fit_mixture, stream, hood, network, order=order, **options)
        row: dict = {"train seconds": training, "mean field": [], "NMM-CNN": []}
        row["seconds"] = {"mean field": [], "NMM-CNN": []}
        for seed in range(20):
            field = random_field(narrow(args), None, seed)
            log_z = field.log_normalizer().item()
            independent, seconds = timed(mean_field, field)
            row["mean field"].append(independent.losses[0].item() + log_z)
            row["seconds"]["mean field"].append(seconds)
            with torch.no_grad():
                parameters, seconds = timed(network, hood, field)
            bound, _ = loss(NeighborMixture(hood, *parameters), field, order, 512, 64)
            row["NMM-CNN"].append(bound + log_z)
            row["seconds"]["NMM-CNN"].append(seconds)
        results.add(**key, **row)


def scaling(args, results: Records) -> None:
    """Seconds and memory of a step, each size in a process of its own."""
    for key in results.missing(task="scaling", size=(8, 16) if args.smoke else SIZES):
        results.add(**key, **in_a_process(args.threads, one_step, key["size"]))


def one_step(size: int) -> dict:
    def steps() -> list[float]:
        field = ising(grid_edges(size, size), 0.4, torch.zeros(size * size))
        hood, order = grid((size, size))
        known, options = (field, hood, FreeNMM(hood, 2)), {"num_steps": 1, "num_samples": 1}
        return [timed(fit_mixture, *known, order=order, **options)[1] for _ in range(6)]

    (first, *times), _, above = peak_memory(steps)
    return {"seconds": median(times), "first": first, "MiB": above / 2**20}


def main(argv: list[str] | None = None) -> Records:
    return run(
        argv, __doc__, (strips, letter, plain, amortized, scaling),
        smoke={"num_steps": 4, "sweeps": 4, "radius": 1}, num_steps=1000, num_samples=4, lr=0.05,
        radius=(3, "of the 128 x 128 grids' windows"), sweeps=(2000, "of annealing"),
        results=RESULTS / "fields.jsonl",
    )  # fmt: skip


if __name__ == "__main__":
    main()
