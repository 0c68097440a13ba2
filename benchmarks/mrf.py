# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
The NMM as an approximation of Markov random fields, against the best mean field.

    python benchmarks/mrf.py strips letter plain amortized scaling

Tasks: ``strips`` (12 x 40, exact log Z), ``letter`` (the paper's: 128 x 128, Murphy's noisy
letter), ``plain`` (128 x 128 without fields, exact log Z), ``amortized`` (one network for many
fields) and ``scaling``. Results are appended to ``--results``, and what is there already is not
run again. With PGMax installed, loopy belief propagation runs beside (``pip install pgmax
"jax==0.4.35"``). One thread unless told otherwise: seconds compare within a row.
"""

from __future__ import annotations

import argparse
import itertools
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyro
import torch
from kac_ward import kac_ward
from torch import Tensor

from pyro_nmm import Neighborhood, NeighborMixture
from pyro_nmm.guides import fit_mixture, mean_field
from pyro_nmm.models import (
    ConvolutionalNMM,
    FreeNMM,
    PairwiseMRF,
    annealed_log_normalizer,
    coarse_to_fine,
    denoising,
    grid_edges,
    ising,
)

sys.path.append(str(Path(__file__).parent.parent / "examples"))
from letters import letters

RESULTS = Path(__file__).parent / "results" / "mrf.jsonl"


def loss(mix: NeighborMixture, field: PairwiseMRF, order: Tensor, num_samples: int, chunk: int):
    """The bound's loss E[log p(y, c) / q(c | y) - log p*(y)], and its standard error."""
    with torch.no_grad():
        parts = [mix.entropy_bound(chunk, "later", order) for _ in range(num_samples // chunk)]
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


def fit_free(
    field: PairwiseMRF, hood: Neighborhood, order: Tensor, marginals: Tensor, args,
    other: NeighborMixture | None = None,
) -> NeighborMixture:  # fmt: skip
    """
    The best of several starts by the loss itself: single pixels' evidence, the mean field, and
    another mixture if given.
    """
    width = int((field.edges[1] - field.edges[0]).max())
    across = hood.source % width - hood.target % width
    down = hood.source // width - hood.target // width
    distance = (across.square() + down.square()).to(marginals)
    starts = []
    for start, warmup in ((field.unary.softmax(-1), 0.5), (marginals, 0.0)):
        network = FreeNMM(hood, 2, start, kappa=1.0 if warmup else 4.0, gamma=0.0)
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
        mix, _ = fit_mixture(
            field, hood, network, order=order, num_steps=args.num_steps,
            num_samples=args.num_samples, lr=lr, warmup=warmup,
        )  # fmt: skip
        found.append((loss(mix, field, order, 8 * count, count)[0], mix))
    return min(found, key=lambda f: f[0])[1]


def loopy(field: PairwiseMRF, num_iterations: int = 300) -> tuple[Tensor, float] | None:
    """Marginals by PGMax's loopy belief propagation, and seconds; ``None`` without it."""
    try:
        from pgmax import fgraph, fgroup, infer, vgroup
    except ImportError:
        return None
    start = time.perf_counter()
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
    return torch.tensor(np.array(marginals)), time.perf_counter() - start


def timed(function, *args, **keywords):
    start = time.perf_counter()
    return function(*args, **keywords), time.perf_counter() - start


def strips(args) -> list[tuple[dict, object]]:
    height, width = (8, 4) if args.smoke else (40, 12)
    hood, order = Neighborhood.grid(height, width), coarse_to_fine(height, width)

    def run(coupling, seed):
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randn(height * width, generator=generator)
        field = ising(grid_edges(height, width), coupling, 0.5 * noise)
        log_z, truth = field.log_normalizer().item(), field.marginals()
        independent, seconds = timed(mean_field, field, num_random=12)
        mix, nmm_seconds = timed(fit_free, field, hood, order, independent.marginals, args)
        bound, error = loss(mix, field, order, 1024, 64)
        kl, kl_error = divergence(mix, field, order, 64)
        loopy_run = loopy(field)

        def wrong(marginals):
            return (marginals - truth).abs().mean().item()

        return {
            "log Z": log_z, "mean field": independent.losses[0].item() + log_z,
            "NMM bound": bound + log_z, "bound error": error,
            "NMM": kl + log_z, "error": kl_error,
            "marginals": {
                "mean field": wrong(independent.marginals), "NMM": wrong(mix.marginals()),
                "loopy": wrong(loopy_run[0]) if loopy_run else None,
            },
            "seconds": {"mean field": seconds, "NMM": nmm_seconds,
                        "loopy": loopy_run[1] if loopy_run else None},
        }  # fmt: skip

    seeds = range(1 if args.smoke else 3)
    keys = [{"coupling": j, "seed": s} for j, s in itertools.product((0.2, 0.4, 0.6), seeds)]
    return [(key, run) for key in keys]


def compare(field: PairwiseMRF, size: int, log_z: float | None, starts, args) -> dict:
    """Mean field, free NMM and NMM-CNN on one large field."""
    same = bool((field.unary == field.unary[0]).all())
    hood = Neighborhood.grid(size, size, args.radius)
    order = coarse_to_fine(size, size)
    independent, seconds = timed(mean_field, field, starts, num_random=2)
    row: dict = {"mean field": independent.losses[0].item(), "starts": independent.losses.tolist()}
    row["seconds"] = {"mean field": seconds}
    if log_z is None:
        annealed = timed(annealed_log_normalizer, field, independent.marginals, args.sweeps, 8)
        (log_z, error), row["seconds"]["log Z"] = annealed[0], annealed[1]
        log_z, row["log Z error"] = log_z.item(), error.item()
    row["log Z"] = log_z
    network = ConvolutionalNMM(args.radius)
    (amortized, _), row["seconds"]["NMM-CNN"] = timed(
        fit_mixture, field, hood, network, order=order, num_steps=args.num_steps,
        num_samples=args.num_samples, lr=0.003,
    )  # fmt: skip
    row["NMM-CNN"] = loss(amortized, field, order, 64, 4)[0]
    # Where all pixels are alike, a network that shares its weights among them gets there first.
    start = amortized if same else None
    mix, row["seconds"]["NMM"] = timed(
        fit_free, field, hood, order, independent.marginals, args, start
    )
    row["NMM"], row["error"] = loss(mix, field, order, 64, 4)
    loopy_run = loopy(field)
    row["seconds"]["loopy"] = loopy_run[1] if loopy_run else None
    return row


def letter_task(args) -> list[tuple[dict, object]]:
    size = 16 if args.smoke else 128

    def run(seed):
        clean = letters("A", size, size)
        noise = torch.randn(size, size, generator=torch.Generator().manual_seed(seed))
        field = denoising(clean + 2 * noise, coupling=1.0, sigma=2.0)
        right = torch.stack([1 - clean.flatten(), 1 + clean.flatten()], -1) / 2
        return compare(field, size, None, right.clamp(0.001, 0.999)[None], args)

    return [({"seed": seed}, run) for seed in range(1 if args.smoke else 3)]


def plain(args) -> list[tuple[dict, object]]:
    size = 16 if args.smoke else 128

    def run(coupling):
        field = ising(grid_edges(size, size), coupling, torch.zeros(size * size))
        return compare(field, size, kac_ward(size, size, coupling), None, args)

    return [({"coupling": coupling}, run) for coupling in (0.2, 0.4, 0.6)]


def amortized(args) -> list[tuple[dict, object]]:
    """Couplings from 0.1 to 0.6 and fields of sd 0.5: trained on a stream, tested on 20 others."""
    height, width = (8, 4) if args.smoke else (40, 12)
    hood, order = Neighborhood.grid(height, width), coarse_to_fine(height, width)

    def draw(seed):
        generator = torch.Generator().manual_seed(seed)
        coupling = 0.1 + 0.5 * torch.rand((), generator=generator).item()
        noise = torch.randn(height * width, generator=generator)
        return ising(grid_edges(height, width), coupling, 0.5 * noise)

    def run():
        network = ConvolutionalNMM(radius=1)
        _, seconds = timed(
            fit_mixture, lambda step: draw(1000 + step), hood, network, order=order,
            num_steps=3 * args.num_steps, num_samples=4, lr=0.006,
        )  # fmt: skip
        row: dict = {"train seconds": seconds, "mean field": [], "NMM-CNN": []}
        row["seconds"] = {"mean field": [], "NMM-CNN": []}
        for seed in range(20):
            field = draw(seed)
            log_z = field.log_normalizer().item()
            independent, seconds = timed(mean_field, field)
            row["mean field"].append(independent.losses[0].item() + log_z)
            row["seconds"]["mean field"].append(seconds)
            with torch.no_grad():
                parameters, seconds = timed(network, hood, field)
            row["seconds"]["NMM-CNN"].append(seconds)
            mix = NeighborMixture(hood, *parameters)
            row["NMM-CNN"].append(loss(mix, field, order, 512, 64)[0] + log_z)
        return row

    return [({}, run)]


def scaling(args) -> list[tuple[dict, object]]:
    """Seconds and memory of a step, each size in a process of its own."""
    sizes = (8, 16) if args.smoke else (32, 64, 128, 256, 512)

    def run(size):
        call = [sys.executable, __file__, "scaling", "--one-step", str(size)]
        output = subprocess.run(call, check=True, capture_output=True, text=True).stdout
        return json.loads(output)

    return [({"size": size}, run) for size in sizes]


def one_step(size: int, radius: int = 1) -> dict:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    field = ising(grid_edges(size, size), 0.4, torch.zeros(size * size))
    hood, order = Neighborhood.grid(size, size, radius), coarse_to_fine(size, size)
    network = FreeNMM(hood, 2)
    keywords = {"order": order, "num_samples": 1}
    _, first = timed(fit_mixture, field, hood, network, num_steps=1, **keywords)
    times = [timed(fit_mixture, field, hood, network, num_steps=1, **keywords)[1]
             for _ in range(5)]  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"seconds": sorted(times)[2], "first": first, "MiB": (after - before) / 1024}


TASKS = {"strips": strips, "letter": letter_task, "plain": plain, "amortized": amortized,
         "scaling": scaling}  # fmt: skip


def main(args) -> list[dict]:
    torch.set_num_threads(args.num_threads)
    pyro.enable_validation(False)
    if args.one_step:
        print(json.dumps(one_step(args.one_step)))
        return []
    if args.smoke:
        args.num_steps, args.sweeps, args.radius = 4, 4, 1
    rows = []
    if args.results.exists():
        rows = [json.loads(line) for line in args.results.read_text().splitlines()]
    for task in args.tasks:
        for key, run in TASKS[task](args):
            key = {"task": task} | key
            if any(key.items() <= row.items() for row in rows):
                continue
            pyro.set_rng_seed(0)
            rows.append(key | run(**{k: v for k, v in key.items() if k != "task"}))
            args.results.parent.mkdir(parents=True, exist_ok=True)
            with args.results.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
            print(rows[-1], flush=True)
    return rows


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tasks", nargs="*", choices=TASKS)
    parser.add_argument("--num-steps", type=int, default=1000)
    parser.add_argument("--num-samples", type=int, default=4)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--radius", type=int, default=3, help="of the 128 x 128 grids' windows")
    parser.add_argument("--sweeps", type=int, default=2000, help="of annealing")
    parser.add_argument("--num-threads", type=int, default=1)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--smoke", action="store_true", help="seconds, on tiny grids")
    parser.add_argument("--one-step", type=int, default=0, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    main(parser().parse_args())
