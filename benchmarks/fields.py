# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
The NMM as an approximation of Markov random fields, against the best mean field.

    python benchmarks/fields.py strips letter plain amortized scaling

Tasks: ``strips`` (12 x 40, exact log Z), ``letter`` (the paper's: 128 x 128, Murphy's noisy
letter), ``plain`` (128 x 128 without fields, exact log Z), ``amortized`` (one network for many
fields) and ``scaling``. Results are appended to ``--results``, and what is there already is not
run again. With PGMax installed, loopy belief propagation runs beside (``pip install pgmax
"jax==0.4.35"``). One thread unless told otherwise: seconds compare within a row.
"""

from __future__ import annotations

import json
import resource
import time
from argparse import SUPPRESS, ArgumentParser
from statistics import median

import common
import numpy as np
import pyro
import torch
from common import RESULTS, Records, arguments, in_a_process, start
from references import kac_ward
from torch import Tensor

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


def random_field(shape: tuple[int, int], coupling: float | None, seed: int) -> PairwiseMRF:
    """Fields of sd 0.5 on the pixels; without a coupling, one that is drawn from 0.1 to 0.6."""
    generator = torch.Generator().manual_seed(seed)
    if coupling is None:
        coupling = 0.1 + 0.5 * torch.rand((), generator=generator).item()
    noise = torch.randn(shape[0] * shape[1], generator=generator)
    return ising(grid_edges(*shape), coupling, 0.5 * noise)


def loss(mix: NeighborMixture, field: PairwiseMRF, order: Tensor, num_samples: int, chunk: int):
    """The bound's loss E[log p(y, c) / q(c | y) - log p*(y)], and its standard error."""
    with torch.no_grad():
        parts = [
            mix.entropy_bound(chunk, "reward_to_go", order) for _ in range(num_samples // chunk)
        ]
        samples = -torch.cat(parts).double() - field.expected_potential(mix).double()
    return samples.mean().item(), (samples.std() / len(samples) ** 0.5).item()


def divergence(mix: NeighborMixture, field: PairwiseMRF, order: Tensor, num_particles: int):
    """
    E[log p(y) - log p*(y)] with log p(y) by sequential Monte Carlo over the choices in the order
    of the fit: unbiased for p(y), and for its logarithm as far as the particles agree.
    """
    num_samples = 256
    draws = mix.sample((num_samples,))
    log_prob = torch.stack(
        [mix.log_likelihood(y, num_particles=num_particles, order=order) for y in draws]
    )
    samples = (log_prob - field.log_potential(draws)).double()
    return samples.mean().item(), (samples.std() / num_samples**0.5).item()


def fit_free(field: PairwiseMRF, hood: Neighborhood, order, marginals, args, other=None):
    """
    The best of several starts by the loss itself: single pixels' evidence, the mean field, and
    another mixture if given.
    """
    width = int((field.edges[1] - field.edges[0]).max())
    across = hood.source % width - hood.target % width
    down = hood.source // width - hood.target // width
    distance = (across.square() + down.square()).to(marginals)
    starts = []
    for begin, warmup in ((field.unary.softmax(-1), 0.5), (marginals, 0.0)):
        network = FreeNMM(hood, 2, begin, kappa=1.0 if warmup else 4.0, gamma=0.0)
        with torch.no_grad():
            network.logits.sub_(0.5 * distance)
        starts.append((network, warmup, args.lr))
    if other is not None:
        network = FreeNMM(hood, 2)
        with torch.no_grad():
            network.log_alpha.copy_(other.alpha.log())
            network.logits.copy_(other.logits)
        starts.append((network, 0.0, 0.2 * args.lr))
    count, found = max(4, 2**15 // field.num_nodes), []
    for network, warmup, lr in starts:
        steps = {"num_steps": args.num_steps, "num_samples": args.num_samples}
        mix, _ = fit_mixture(field, hood, network, order=order, lr=lr, warmup=warmup, **steps)
        found.append((loss(mix, field, order, 8 * count, count)[0], mix))
    return min(found, key=lambda f: f[0])[1]


def loopy(field: PairwiseMRF, num_iterations: int = 300) -> tuple[Tensor, float] | None:
    """Marginals by PGMax's loopy belief propagation, and seconds; ``None`` without it."""
    try:
        from pgmax import fgraph, fgroup, infer, vgroup
    except ImportError:
        return None
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


def timed(function, *args, **keywords):
    began = time.perf_counter()
    return function(*args, **keywords), time.perf_counter() - began


def strips(args, results: Records) -> None:
    shape = (8, 4) if args.smoke else (40, 12)
    hood, order = Neighborhood.grid(*shape), coarse_to_fine(*shape)
    seeds = range(1 if args.smoke else 3)
    for key in results.missing(task="strips", coupling=COUPLINGS, seed=seeds):
        pyro.set_rng_seed(0)
        field = random_field(shape, key["coupling"], key["seed"])
        log_z, truth = field.log_normalizer().item(), field.marginals()
        independent, seconds = timed(mean_field, field, num_random=12)
        mix, nmm_seconds = timed(fit_free, field, hood, order, independent.marginals, args)
        bound, error = loss(mix, field, order, 1024, 64)
        kl, kl_error = divergence(mix, field, order, 64)
        beliefs, loopy_seconds = loopy(field) or (None, None)
        marginals = {"mean field": independent.marginals, "NMM": mix.marginals(), "loopy": beliefs}
        row = {"log Z": log_z, "mean field": independent.losses[0].item() + log_z}
        row |= {"NMM bound": bound + log_z, "bound error": error}
        row |= {"NMM": kl + log_z, "error": kl_error}
        row["marginals"] = {
            name: None if found is None else (found - truth).abs().mean().item()
            for name, found in marginals.items()
        }
        row["seconds"] = {"mean field": seconds, "NMM": nmm_seconds, "loopy": loopy_seconds}
        results.add(**key, **row)


def compare(field: PairwiseMRF, size: int, log_z: float | None, starts, args) -> dict:
    """Mean field, free NMM and NMM-CNN on one large field."""
    same = bool((field.unary == field.unary[0]).all())
    hood, order = Neighborhood.grid(size, size, args.radius), coarse_to_fine(size, size)
    independent, seconds = timed(mean_field, field, starts, num_random=2)
    row: dict = {"mean field": independent.losses[0].item(), "starts": independent.losses.tolist()}
    row["seconds"] = {"mean field": seconds}
    if log_z is None:
        annealed = timed(annealed_log_normalizer, field, independent.marginals, args.sweeps, 8)
        (log_z, error), row["seconds"]["log Z"] = annealed
        log_z, row["log Z error"] = log_z.item(), error.item()
    row["log Z"] = log_z
    network = ConvolutionalNMM(args.radius)
    options = {"num_steps": args.num_steps, "num_samples": args.num_samples, "lr": 0.003}
    found = timed(fit_mixture, field, hood, network, order=order, **options)
    (shared, _), row["seconds"]["NMM-CNN"] = found
    row["NMM-CNN"] = loss(shared, field, order, 64, 4)[0]
    # Where all pixels are alike, a network that shares its weights among them gets there first.
    known = independent.marginals, args, shared if same else None
    mix, row["seconds"]["NMM"] = timed(fit_free, field, hood, order, *known)
    row["NMM"], row["error"] = loss(mix, field, order, 64, 4)
    row["seconds"]["loopy"] = (loopy(field) or (None, None))[1]
    return row


def letter(args, results: Records) -> None:
    size = 16 if args.smoke else 128
    clean = letters("A", size, size)
    right = torch.stack([1 - clean.flatten(), 1 + clean.flatten()], -1) / 2
    for key in results.missing(task="letter", seed=range(1 if args.smoke else 3)):
        pyro.set_rng_seed(0)
        noise = torch.randn(size, size, generator=torch.Generator().manual_seed(key["seed"]))
        field = ising_posterior(clean + 2 * noise, coupling=1.0, sigma=2.0)
        results.add(**key, **compare(field, size, None, right.clamp(0.001, 0.999)[None], args))


def plain(args, results: Records) -> None:
    size = 16 if args.smoke else 128
    for key in results.missing(task="plain", coupling=COUPLINGS):
        pyro.set_rng_seed(0)
        field = ising(grid_edges(size, size), key["coupling"], torch.zeros(size * size))
        log_z = kac_ward(size, size, key["coupling"])
        results.add(**key, **compare(field, size, log_z, None, args))


def amortized(args, results: Records) -> None:
    """Couplings from 0.1 to 0.6 and fields of sd 0.5: trained on a stream, tested on 20 others."""
    shape = (8, 4) if args.smoke else (40, 12)
    hood, order = Neighborhood.grid(*shape), coarse_to_fine(*shape)

    def stream(step: int) -> PairwiseMRF:
        return random_field(shape, None, 1000 + step)

    for key in results.missing(task="amortized"):
        pyro.set_rng_seed(0)
        network = ConvolutionalNMM(radius=1)
        options = {"num_steps": 3 * args.num_steps, "num_samples": 4, "lr": 0.006}
        _, seconds = timed(fit_mixture, stream, hood, network, order=order, **options)
        row: dict = {"train seconds": seconds, "mean field": [], "NMM-CNN": []}
        row["seconds"] = {"mean field": [], "NMM-CNN": []}
        for seed in range(20):
            field = random_field(shape, None, seed)
            log_z = field.log_normalizer().item()
            independent, seconds = timed(mean_field, field)
            row["mean field"].append(independent.losses[0].item() + log_z)
            row["seconds"]["mean field"].append(seconds)
            with torch.no_grad():
                parameters, seconds = timed(network, hood, field)
            row["seconds"]["NMM-CNN"].append(seconds)
            mix = NeighborMixture(hood, *parameters)
            row["NMM-CNN"].append(loss(mix, field, order, 512, 64)[0] + log_z)
        results.add(**key, **row)


def scaling(args, results: Records) -> None:
    """Seconds and memory of a step, each size in a process of its own."""
    sizes = (8, 16) if args.smoke else (32, 64, 128, 256, 512)
    for key in results.missing(task="scaling", size=sizes):
        row = in_a_process(__file__, "scaling", "--one-step", key["size"])
        results.add(**key, **row)


def one_step(size: int, radius: int = 1) -> dict:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    field = ising(grid_edges(size, size), 0.4, torch.zeros(size * size))
    hood, order = Neighborhood.grid(size, size, radius), coarse_to_fine(size, size)
    network = FreeNMM(hood, 2)
    keywords = {"order": order, "num_steps": 1, "num_samples": 1}
    first, *times = (timed(fit_mixture, field, hood, network, **keywords)[1] for _ in range(6))
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"seconds": median(times), "first": first, "MiB": (after - before) / 1024}


TASKS = {task.__name__: task for task in (strips, letter, plain, amortized, scaling)}


def main(args) -> Records | None:
    start(args.num_threads)
    if args.one_step:
        return print(json.dumps(one_step(args.one_step)))
    if args.smoke:
        args.num_steps, args.sweeps, args.radius = 4, 4, 1
    return common.run(args, TASKS)


def parser() -> ArgumentParser:
    return arguments(
        __doc__, TASKS, "seconds, on tiny grids", num_steps=1000, num_samples=4, lr=0.05,
        radius=(3, "of the 128 x 128 grids' windows"), sweeps=(2000, "of annealing"),
        num_threads=1, results=RESULTS / "fields.jsonl", one_step=(0, SUPPRESS),
    )  # fmt: skip


if __name__ == "__main__":
    main(parser().parse_args())
