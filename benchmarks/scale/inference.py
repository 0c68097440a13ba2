# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Posteriors of hyperparameters by the kernel of MCMC and by SVI. README.md explains them."""

import gc
import random
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

import networkx as nx
import numpy as np
import pyro
import pyro.distributions as dist
import torch
from pandas import DataFrame, concat
from pyro import poutine
from pyro.infer import MCMC, NUTS, SVI, Trace_ELBO
from pyro.infer.autoguide import AutoMultivariateNormal, AutoNormal
from pyro.infer.mcmc import RandomWalkKernel
from pyro.ops.stats import split_gelman_rubin
from pyro.optim import ClippedAdam
from scipy.stats import chisquare
from torch import Tensor

from benchmarks.scale import of_readme
from benchmarks.scale.of_readme import draws_of
from benchmarks.shared.records import Files, Records, command
from benchmarks.shared.tables import (
    Cell,
    average,
    bracketed,
    count,
    frame,
    markdown,
    ordered,
    table,
)
from benchmarks.shared.timing import peak_memory, timed
from pyro_nmm import EvidenceConditional, Neighborhood, NeighborMixture
from pyro_nmm.guides import AutoNMM, Chains, FieldGibbs, nested_posterior
from pyro_nmm.guides.calibration import rank
from pyro_nmm.guides.fit_check import MOST_SHIFT, MOST_WIDTH
from pyro_nmm.guides.nested import MOST_APART, MOST_MISFIT
from pyro_nmm.models import nmm, nmm_counts
from pyro_nmm.ops.diagnostics import effective_size

RANKED = "kappa", "beta"
#: Guides of many parameters.
GUIDES = {"covariance": AutoMultivariateNormal, "no correlations": AutoNormal}
#: Draws among which the true parameter has a rank.
FEW = 19
#: Motions on which the members of the karate club vote.
NUM_MOTIONS = 30

#: Samplers of NumPyro, which are in peers.py.
PEERS = "NUTS, choices summed by hand", "NUTS, choices enumerated", "DiscreteHMCGibbs"
PEERS += ("HMCGibbs, conditionals by hand",)
#: Choices of the kernel beside the samplers of peers.py.
BESIDE: dict[str, dict] = {
    "FieldGibbs, default": {},
    "FieldGibbs, random walk": {"kernel": RandomWalkKernel},
    "FieldGibbs": {"kernel": NUTS},
}
SAMPLERS, REFERENCE = [*BESIDE, *PEERS], "FieldGibbs, random walk"


class Club:
    """Votes of the karate club: concentration, and attention to members with many friends."""

    def __init__(self) -> None:
        graph = nx.karate_club_graph()
        ends = torch.tensor([*graph.edges]).T
        self.hood = Neighborhood(torch.cat([ends, ends.flip(0)], 1), len(graph))
        degree = torch.tensor([float(count) for _, count in graph.degree])
        self.fame = degree.log()[self.hood.source]

    def field(self, kappa: Tensor, beta: Tensor) -> tuple[Neighborhood, Tensor, Tensor]:
        half = torch.full((self.hood.num_nodes, 2), 0.5)
        return self.hood, kappa[..., None, None] * half, beta[..., None] * self.fame

    def model(self, votes: Tensor | None = None) -> None:
        kappa = pyro.sample("kappa", dist.LogNormal(0.0, 1.5))
        beta = pyro.sample("beta", dist.Normal(0.0, 2.0))
        with pyro.plate("motions", NUM_MOTIONS):
            nmm(*self.field(kappa, beta), votes, collapsed=True)


def by_kernel(
    model: Callable, votes: Tensor, args, longer: int = 1, **options
) -> dict[str, Tensor]:  # fmt: skip
    gibbs = FieldGibbs(model, options.pop("kernel", NUTS), **options)
    sizes = longer * args.num_samples, longer * args.warmup
    chains = MCMC(gibbs, *sizes, disable_progbar=True)
    chains.run(votes)
    return chains.get_samples()


def by_svi(
    model: Callable, votes: Tensor, args, estimator: str | Chains, steps: int = 300,
    decay: float = 0.98, parents: type = AutoNormal,
) -> dict[str, Tensor]:  # fmt: skip
    pyro.clear_param_store()
    guide = AutoNMM(model, parents, estimator=estimator)
    elbo = Trace_ELBO(4, vectorize_particles=True, max_plate_nesting=1)
    svi = SVI(model, guide, ClippedAdam({"lr": 0.1, "lrd": decay}), elbo)
    for _ in range(steps):
        svi.step(votes)
    return draws_of(guide, votes)


METHODS: dict[str, Callable] = {
    "kernel, random walk": partial(by_kernel, kernel=RandomWalkKernel),
    "kernel": by_kernel,
    "kernel, no joint moves, longer": partial(by_kernel, num_sweeps=20, num_moves=0, longer=4),
    "kernel, no joint moves": partial(by_kernel, num_sweeps=20, num_moves=0),
    "AutoNMM, chains, 600 steps, covariance": lambda *given: by_svi(
        *given, Chains(5), 600, 0.995, AutoMultivariateNormal
    ),
    "AutoNMM, chains, 600 steps": lambda *given: by_svi(*given, Chains(5), 600, 0.995),
    "AutoNMM, chains": lambda *given: by_svi(*given, Chains(5)),
    "AutoNMM": lambda *given: by_svi(*given, "reward_to_go"),
}


def club(args, results: Records) -> None:
    """Data sets of parameters drawn from their priors, the karate club's graph."""
    members = Club()
    for key in results.missing(task="club", seed=range(args.num_sets), method=args.methods):
        pyro.set_rng_seed(key["seed"])
        truth = {
            "kappa": dist.LogNormal(0.0, 1.5).sample(),
            "beta": dist.Normal(0.0, 2.0).sample(),
        }
        votes = NeighborMixture(*members.field(**truth)).sample((NUM_MOTIONS,))
        start = time.process_time()
        draws = METHODS[key["method"]](members.model, votes, args)
        results.add(**key, seconds=time.process_time() - start, **intervals(truth, draws))


def intervals(truth: dict[str, Tensor], draws: dict[str, Tensor]) -> dict[str, dict]:
    """Of log kappa, and of beta: the truth, and mean, standard deviation and 90 % interval."""
    row: dict = {}
    for name, value in truth.items():
        log = Tensor.log if name == "kappa" else Tensor.clone
        value, found = log(value), log(draws[name])
        low, high = found.quantile(torch.tensor([0.05, 0.95])).tolist()
        row[name] = {"truth": value.item(), "mean": found.mean().item(), "low": low}
        row[name] |= {"sd": found.std().item(), "high": high}
    return row


def readme(args, results: Records) -> None:
    """Coverage of the README's program: parameters from its priors, and what its check says."""
    each = {"nodes": args.of_readme, "steps": args.steps, "seed": range(args.num_sets)}
    for key in results.missing(task="readme", **each):
        start = time.process_time()
        truth, guide, check = of_readme.run(key["nodes"], key["seed"], key["steps"])
        row = {"seconds": time.process_time() - start, "converged": check.converged}
        row |= {"fits": check.fits, "mixed": check.mixed, "shift": check.shift.abs().max().item()}
        row |= {"width": check.width.log().abs().max().exp().item()}
        results.add(**key, **row, **intervals(truth, draws_of(guide, None)))


def exact(args, results: Records) -> None:
    """The same data sets without a guide."""
    each = {"nodes": args.of_readme, "method": ["nested"], "seed": range(args.num_sets)}
    for key in results.missing(task="exact", **each):
        truth, names, _ = of_readme.labelled(key["nodes"], key["seed"])
        start = time.process_time()
        found = nested_posterior(names["model"], names["y"])
        draws = found.sample(1000)
        row = {"seconds": time.process_time() - start}
        row |= {"misfit": found.misfit, "apart": found.apart}
        results.add(**key, **row, **intervals(truth, draws))


def large(args, results: Records) -> None:
    """The README's program on large graphs, without a guide."""
    each = {"nodes": args.of_readme, "sweeps": args.sweeps, "method": ["nested"]}
    for key in results.missing(task="large", **each, seed=range(args.repeats)):
        truth, names, _ = of_readme.labelled(key["nodes"], key["seed"])
        gc.collect()
        fit = partial(nested_posterior, names["model"], names["y"], num_sweeps=key["sweeps"])
        (found, seconds), peak, _ = peak_memory(timed, fit, clock=time.process_time)
        row: dict = {"seconds": seconds, "peak": peak, "edges": names["hood"].num_edges}
        row |= {"misfit": found.misfit, "apart": found.apart}
        for name, *values in zip(found.names, *map(Tensor.tolist, found[1:5]), strict=True):
            row[name] = dict(zip(("mean", "sd", "mean_error", "sd_error"), values, strict=True))
            row[name]["truth"] = truth[name].log().item() if name == "kappa" else truth[name].item()
        results.add(**key, **row)


def kernel(args, results: Records) -> None:
    """The same data sets by the kernel of MCMC, and the rank of the truth among a few draws."""
    each = {"nodes": args.of_readme, "method": ["FieldGibbs"], "seed": range(args.num_sets)}
    for key in results.missing(task="kernel", **each):
        truth, names, _ = of_readme.labelled(key["nodes"], key["seed"])
        pyro.set_rng_seed(key["seed"])
        gibbs = FieldGibbs(names["model"])
        chain = MCMC(gibbs, args.num_samples, args.warmup, disable_progbar=True)
        start = time.process_time()
        chain.run(names["y"])
        draws = chain.get_samples()
        row = {"seconds": time.process_time() - start, "draws": args.num_samples}
        row |= intervals(truth, draws)
        for name, value in truth.items():
            row[name]["effective"] = effective_size(draws[name][None]).item()
            row[name]["rank"] = int(rank(value, draws[name], FEW))
        results.add(**key, **row)


def small_world(nodes: int, seed: int) -> Callable:
    """A program of one labelling of three labels, with a feature of each edge."""
    graph = nx.watts_strogatz_graph(nodes, 6, 0.3, seed=seed)
    ends = torch.tensor([*graph.edges]).T
    hood = Neighborhood(torch.cat([ends, ends.flip(0)], 1), nodes)
    pyro.set_rng_seed(seed)
    feature, base = torch.randn(hood.num_edges), torch.full((nodes, 3), 1 / 3)
    y = NeighborMixture(hood, 0.4 * base, feature).sample()

    def model() -> None:
        kappa = pyro.sample("kappa", dist.LogNormal(0.0, 1.0))
        beta = pyro.sample("beta", dist.Normal(0.0, 1.0))
        nmm(hood, kappa * base, beta * feature, y, collapsed=True)

    return model


#: Of about so many nodes, and kinds of graphs of them.
NODES = 1024
GRAPHS: dict[str, Callable] = {
    "ring": lambda: nx.cycle_graph(NODES),
    "grid": lambda: nx.grid_2d_graph(32, 32),
    "binary tree": lambda: nx.balanced_tree(2, 9),
    "star": lambda: nx.star_graph(NODES - 1),
    "six links, regular": lambda: nx.random_regular_graph(6, NODES, seed=0),
    "six links, random": lambda: nx.gnm_random_graph(NODES, 3 * NODES, seed=0),
    "small world": lambda: nx.watts_strogatz_graph(NODES, 6, 0.3, seed=0),
    "hubs": lambda: nx.barabasi_albert_graph(NODES, 3, seed=0),
    "cliques of 16": lambda: nx.connected_caveman_graph(NODES // 16, 16),
    "dense, a tenth of all pairs": lambda: nx.gnp_random_graph(NODES, 0.1, seed=0),
}


def meetings(args, results: Records) -> None:
    """Sweeps until coupled chains of choices meet, on kinds of graphs, with labels of the model."""
    torch.set_default_dtype(torch.double)
    each = {"graph": [*GRAPHS], "labels": ["observed", "latent"], "kappa": [3.0, 1.0, 0.3, 0.1]}
    for key in results.missing(task="meetings", **each):
        ends = torch.tensor([*nx.convert_node_labels_to_integers(GRAPHS[key["graph"]]()).edges]).T
        hood = Neighborhood(torch.cat([ends, ends.flip(0)], 1), int(ends.max()) + 1)
        pyro.set_rng_seed(0)
        alpha = torch.full((hood.num_nodes, 3), key["kappa"] / 3)
        mix = NeighborMixture(hood, alpha, torch.zeros(hood.num_edges))
        y = mix.sample()
        if key["labels"] == "observed":
            q = mix.choices(y)
        else:  # measured with errors of one standard deviation
            means = 2 * torch.eye(3)
            x = dist.Normal(means[y], 1.0).sample()
            evidence = dist.Normal(means, 1.0).log_prob(x[:, None]).sum(-1)
            q = EvidenceConditional(hood, alpha, mix.logits, evidence)
        start = time.process_time()
        found = q.meetings(num_pairs=args.num_pairs, max_sweeps=2000)
        row: dict = {"seconds": time.process_time() - start, "edges": hood.num_edges}
        met = found.times.isfinite()
        row |= {"met": met.sum().item(), "times": (found.times[met] - found.lag).tolist()}
        results.add(**key, **row, certified=found.num_sweeps() if met.all() else None)


#: Of FieldGibbs: with and without joint moves.
PLANS: dict[str, dict] = {"FieldGibbs": {}, "one sweep": {"num_moves": 0}}
#: Stored rows of an annealing with more noise, 8 joint moves of 50 sweeps each a step.
BEFORE = ["FieldGibbs, before", "joint moves, before", "random walk, joint moves, before"]


def sizes(args, results: Records) -> None:
    """Chains from two dispersed starts on graphs of several sizes, of a fixed CPU time each."""
    torch.set_default_dtype(torch.float)
    each = {"nodes": args.sizes, "method": args.plans, "seed": range(args.repeats), "start": [0, 1]}
    for key in results.missing(task="sizes", **each):
        model = small_world(key["nodes"], key["seed"])
        start = ({"kappa": -2.0, "beta": 0.0}, {"kappa": 2.0, "beta": 1.5})[key["start"]]
        params = {name: torch.tensor(value) for name, value in start.items()}
        marks: list[float] = []
        kept: list[tuple] = []

        def hook(kernel, params, stage, number, marks=marks, kept=kept) -> None:
            marks.append(time.process_time())
            kept.append(tuple(params[name].item() for name in RANKED))
            if len(marks) > args.warmup and marks[-1] - marks[args.warmup] > args.limit:
                raise OutOfTime

        pyro.set_rng_seed(100 + key["start"])
        kernel, begin = FieldGibbs(model, **PLANS[key["method"]]), time.process_time()
        with suppress(OutOfTime):
            options: dict[str, Any] = {"initial_params": params, "disable_progbar": True}
            MCMC(kernel, args.most, args.warmup, hook_fn=hook, **options).run()
        draws = torch.tensor(kept[args.warmup :]).double().T
        row: dict = {"seconds": marks[-1] - marks[args.warmup - 1], "draws": draws.shape[1]}
        row |= {"whole": marks[-1] - begin}
        for name, column in zip(RANKED, draws, strict=True):
            row[name] = {"mean": column.mean().item(), "sd": column.std().item()}
            row[name]["effective"] = effective_size(column[None]).item()
            halves = column[: len(column) // 2 * 2].view(2, -1)
            row[name]["halves"] = [[h.mean().item(), h.var().item()] for h in halves]
        results.add(**key, **row)


def sweeps(args, results: Records) -> None:
    """The README's program with other numbers of sweeps."""
    each = {"nodes": args.of_readme, "sweeps": args.sweeps, "seed": range(args.repeats)}
    for key in results.missing(task="sweeps", **each):
        start = time.process_time()
        options = f", estimator=Chains({key['sweeps']})"
        *_, check = of_readme.run(key["nodes"], key["seed"], args.steps[0], options)
        row = {"seconds": time.process_time() - start}
        for k, name in enumerate(RANKED):
            row[name] = {"shift": check.shift[k].item(), "width": check.width[k].item()}
        results.add(**key, **row)


class Weighted:
    """A labelling of four labels whose attention weighs ``number`` features of edges."""

    def __init__(self, nodes: int, number: int) -> None:
        self.hood = of_readme.graph(nodes)
        self.features = torch.randn(number, self.hood.num_edges)

    def model(self, y: Tensor | None = None) -> None:
        betas = pyro.sample("betas", dist.Normal(0.0, 0.5).expand([len(self.features)]).to_event(1))
        alpha = torch.full((self.hood.num_nodes, 4), 0.1)
        nmm(self.hood, alpha, betas @ self.features, y, collapsed=True)


def many(args, results: Records) -> None:
    """Guides of many parameters, with and without their correlations, and the kernel."""
    each = {"parameters": args.parameters, "seed": range(args.repeats)}
    for key in results.missing(task="many", guide=[*GUIDES, "FieldGibbs"], **each):
        pyro.set_rng_seed(key["seed"])
        torch.set_default_dtype(torch.float)
        program = Weighted(args.of_readme[-1], key["parameters"])
        drawn = poutine.trace(program.model).get_trace().nodes
        y, truth = (drawn[name]["value"] for name in ("y", "betas"))
        start, row = time.process_time(), {}
        if key["guide"] == "FieldGibbs":
            mcmc = MCMC(
                FieldGibbs(program.model), args.num_samples, args.warmup, disable_progbar=True
            )
            mcmc.run(y)
            draws = mcmc.get_samples()["betas"]
            row = {"effective": effective_size(draws[None]).min().item()}
        else:
            draws = by_guide(program.model, y, GUIDES[key["guide"]], args.steps[0])
        low, high = draws.quantile(torch.tensor([0.05, 0.95]), 0)
        inside = ((low < truth) & (truth < high)).double().mean().item()
        error = (draws.mean(0) - truth).square().mean().item()
        row |= {"inside": inside, "error": error, "seconds": time.process_time() - start}
        results.add(**key, **row)


def by_guide(model: Callable, y: Tensor, parents: type, steps: int) -> Tensor:
    pyro.clear_param_store()
    guide = AutoNMM(model, parents)
    elbo = Trace_ELBO(4, vectorize_particles=True, max_plate_nesting=0)
    svi = SVI(model, guide, ClippedAdam({"lr": 0.1, "lrd": 0.995}), elbo)
    for _ in range(steps):
        svi.step(y)
    with torch.no_grad():
        return torch.stack([guide.parents(y)["betas"] for _ in range(1000)])


def attended(nodes: int, seed: int) -> tuple[Neighborhood, Tensor, Tensor]:
    """Six sources a node with itself, a feature of each edge, and a labelling of three labels."""
    pyro.set_rng_seed(seed)
    others = torch.tensor([random.sample(range(1, nodes), 5) for _ in range(nodes)])
    row = torch.arange(nodes)[:, None]
    ends = torch.stack([(row + others) % nodes, row.expand(-1, 5)])
    hood = Neighborhood(ends.flatten(1), nodes)
    feature = torch.randn(hood.num_edges)
    return hood, feature, poutine.trace(of_attention).get_trace(hood, feature).nodes["y"]["value"]


def of_attention(hood: Neighborhood, feature: Tensor, y: Tensor | None = None) -> None:
    kappa = pyro.sample("kappa", dist.Gamma(2.0, 2.0))
    beta = pyro.sample("beta", dist.Normal(0.0, 1.0))
    nmm(hood, kappa * torch.full((hood.num_nodes, 3), 1 / 3), beta * feature, y, collapsed=True)


class OutOfTime(Exception):
    """A chain has taken its CPU seconds."""


def chain(
    kernel: Any, given: tuple, seed: int, num_samples: int, warmup: int, limit: float
) -> tuple[dict, float, float]:
    """Draws of a kernel, CPU seconds of the draws, and with the warm-up."""
    pyro.set_rng_seed(100 + seed)
    start = time.process_time()
    marks: list[float] = []
    kept: list[dict] = []

    def hook(kernel, params, stage, number) -> None:
        marks.append(time.process_time())
        if len(marks) > warmup:
            kept.append({name: kernel.transforms[name].inv(params[name]) for name in RANKED})
        if marks[-1] - start > limit:
            raise OutOfTime

    with suppress(OutOfTime):
        MCMC(kernel, num_samples, warmup, disable_progbar=True, hook_fn=hook).run(*given)
    begin = marks[warmup - 1] if len(marks) > warmup else marks[-1]
    draws = {name: np.array([draw[name].item() for draw in kept]) for name in RANKED}
    return draws, marks[-1] - begin, marks[-1] - start


def numpyro(args, results: Records) -> None:
    """Effective draws of FieldGibbs and of NumPyro's samplers: chains of one program."""
    each = {"nodes": args.sizes, "seed": range(args.repeats), "sampler": args.samplers}
    for key in results.missing(task="numpyro", **each):
        hood, feature, y = given = attended(key["nodes"], key["seed"])
        sizes, name = (args.num_samples, args.warmup, args.limit), key["sampler"]
        if name in BESIDE:
            kernels = (FieldGibbs(of_attention, **BESIDE[name]) for _ in range(args.chains))
            chains = [chain(kernel, given, seed, *sizes) for seed, kernel in enumerate(kernels)]
        else:
            from benchmarks.scale import peers

            table = hood.source.view(-1, 6).numpy(), feature.view(-1, 6).numpy(), y.numpy()
            cache: dict = {}
            chains = [peers.chain(name, table, k, *sizes, cache) for k in range(args.chains)]
        results.add(**key, warmup=args.warmup, **of_chains(chains))


def of_chains(chains: Sequence[tuple[dict, float, float]]) -> dict:
    """Effective draws and moments of the parameters."""
    least = min(len(draws["kappa"]) for draws, *_ in chains)
    row: dict = {"chains": len(chains), "samples": least}
    row |= {"seconds": sum(part[1] for part in chains), "whole": sum(part[2] for part in chains)}
    for parent, change in {"kappa": np.log, "beta": np.asarray}.items():
        values = torch.tensor(np.stack([change(draws[parent][:least]) for draws, *_ in chains]))
        effective = effective_size(values).item() if least > 3 else 0.0
        found = {"mean": values.mean().item(), "sd": values.std().item()} if least else {}
        row[parent] = {"effective": effective} | found
        if least > 3:
            row[parent]["r hat"] = split_gelman_rubin(values, 0, 1).item()
    return row


def of_units(
    hood: Neighborhood, feature: Tensor, y: Tensor | None = None, number: Tensor | None = None
) -> Tensor:
    kappa = pyro.sample("kappa", dist.Gamma(2.0, 2.0))
    beta = pyro.sample("beta", dist.Normal(0.0, 1.0))
    alpha = kappa * torch.full((hood.num_nodes, 3), 1 / 3)
    return nmm_counts(hood, alpha, beta * feature, y, total_count=number)


#: Samplers of programs of counts.
OF_UNITS: dict[str, Callable] = {"FieldGibbs": FieldGibbs, "NUTS": NUTS}


def counts(args, results: Records) -> None:
    """Effective draws of programs of counts, with a mean number of units at a node."""
    each = {"nodes": args.sizes, "units": args.units, "sampler": args.of_units}
    each |= {"limit": [args.limit]}
    for key in results.missing(task="counts", **each, seed=range(args.repeats)):
        hood, feature, _ = attended(key["nodes"], key["seed"])
        number = torch.poisson(torch.full((key["nodes"],), float(key["units"])))
        program = pyro.condition(of_units, {"kappa": torch.tensor(1.0), "beta": torch.tensor(1.0)})
        given = hood, feature, program(hood, feature, None, number)
        sizes = args.num_samples, args.warmup, args.limit
        kernels = (OF_UNITS[key["sampler"]](of_units) for _ in range(args.chains))
        chains = [chain(kernel, given, seed, *sizes) for seed, kernel in enumerate(kernels)]
        results.add(**key, whole_units=int(number.sum()), warmup=args.warmup, **of_chains(chains))


def coverage(files: Files) -> str:
    rows = frame(files["inference"], task="club")
    return held(rows.assign(method=ordered(rows["method"], [*METHODS])), RANKED, ["method"])


def coverage_of_readme(files: Files) -> str:
    rows = frame(files["inference"], task="readme")
    if not rows.empty:  # the first rows were of a rule that allowed for the errors
        rows["converged"] = (rows["shift"] <= MOST_SHIFT) & (rows["width"] <= MOST_WIDTH)
    says = {"says converged": average("converged", ".0%"), "such labels": average("fits", ".0%")}
    return held(rows, RANKED, ["nodes", "steps"], says)


def sweeps_of_readme(files: Files) -> str:
    rows = frame(files["inference"], task="sweeps")
    cells: dict[str, Cell] = {"data sets": count}
    for name in RANKED:
        cells[f"{name}: width wanted"] = average(f"{name}.width", ".2f")
    return table(rows, ["nodes", "sweeps"], cells | {"CPU seconds": average("seconds", ".1f")})


def nested_of_readme(files: Files) -> str:
    """The data sets of README's program, and more of them, without a guide."""
    rows = frame(files["inference"], task="exact")
    if rows.empty:
        return markdown([])
    fits = (rows["misfit"] < MOST_MISFIT) & (rows["apart"] < MOST_APART)
    parts = {
        "the first 100": rows[rows["seed"] < 100],
        "all": rows,
        "those that fit": rows[fits],
    }
    every = concat([part.assign(seeds=name) for name, part in parts.items()])
    every = every.assign(seeds=ordered(every["seeds"], [*parts]))
    return held(every, RANKED, ["nodes", "method", "seeds"])


def large_graphs(files: Files) -> str:
    cells: dict[str, Cell] = {"edges": average("edges", ",.0f")}
    for name, shown in (("kappa", "log kappa"), ("beta", "beta")):
        cells[f"{shown}: truth"] = average(f"{name}.truth", ".2f")
        cells[f"{shown}: mean"] = average(f"{name}.mean", ".3f")
        cells[f"{shown}: sd"] = average(f"{name}.sd", ".3f")
        cells[f"{shown}: error of the mean, in sd"] = average(f"{name}.mean_error", ".2f")
    cells |= {"misfit": average("misfit", ".1f"), "apart": average("apart", ".1f")}
    cells |= {"CPU seconds": average("seconds", ".0f"), "peak GB": average("peak", ".1f", 1e-9)}
    return table(frame(files["inference"], task="large"), ["nodes", "method", "sweeps"], cells)


def kernel_of_readme(files: Files) -> str:
    """Coverage, and p-values of a test that ranks of true values are uniform."""

    def p_value(ranks: list[float]) -> float:
        return float(
            chisquare(np.bincount(np.array(ranks, int) * 10 // (FEW + 1), minlength=10))[1]
        )

    says: dict[str, Cell] = {}
    for name, shown in (("kappa", "log kappa"), ("beta", "beta")):
        says[f"{shown}: ranks, p"] = average(f"{name}.rank", ".2f", of=p_value)
        says[f"{shown}: effective draws"] = average(f"{name}.effective", ".0f", of=median)
    return held(frame(files["inference"], task="kernel"), RANKED, ["nodes", "method"], says)


def meeting_times(files: Files) -> str:
    """Sweeps that are certified to a distance of .01, and in brackets the median meeting time."""
    rows = frame(files["inference"], task="meetings")
    if rows.empty:
        return markdown([])
    cells: dict[str, Cell] = {}
    for kappa in sorted(rows["kappa"].unique(), reverse=True):
        own = rows["kappa"] == kappa
        for name in ("certified", "times"):
            rows[f"{name}, {kappa}"] = rows[name].where(own)
        medians = average(f"times, {kappa}", ".0f", of=lambda found: median(found[0]))
        cells[f"kappa {kappa:g}"] = bracketed(average(f"certified, {kappa}", ".0f"), medians)
    names = {"graph": ordered(rows["graph"], [*GRAPHS])}
    return table(rows.assign(**names), ["graph", "labels"], cells)


def by_size(files: Files) -> str:
    """Effective draws of the slower parameter in a CPU minute, and R-hat over two starts."""
    rows = frame(files["inference"], task="sizes")
    if rows.empty:
        return markdown([])
    rows["effective"] = rows[["kappa.effective", "beta.effective"]].min(axis=1)
    for name, seconds in (("rate", "seconds"), ("whole rate", "whole")):
        rows[name] = 60 * rows["effective"] / rows[seconds]
    cells: dict[str, Cell] = {"chains": count, "draws a chain": average("draws", ",.0f")}
    cells |= {"log kappa": average("kappa.mean", ".2f"), "its sd": average("kappa.sd", ".2f")}
    cells |= {"beta": average("beta.mean", ".2f"), "its sd ": average("beta.sd", ".3f")}
    cells |= {"a CPU minute": average("rate", ",.0f")}
    cells |= {"with warm-up": average("whole rate", ",.0f")}
    for name, shown in (("kappa", "log kappa"), ("beta", "beta")):
        cells[f"R-hat, {shown}"] = average(f"{name}.halves", ".3f", of=_r_hat)
    names = {
        "nodes": ordered(rows["nodes"], None),
        "method": ordered(rows["method"], [*PLANS, *BEFORE]),
    }
    return table(rows.assign(**names), ["nodes", "method"], cells)


def _r_hat(chains: Sequence[list]) -> float:
    """Of means and variances of halves of chains, so long that a half has no bias."""
    means, variances = np.array([half for halves in chains for half in halves]).T
    return float(((variances.mean() + means.var(ddof=1)) / variances.mean()) ** 0.5)


def many_parameters(files: Files) -> str:
    cells: dict[str, Cell] = {"data sets": count, "in the interval": average("inside", ".0%")}
    cells |= {"rmse": average("error", ".3f", of=lambda v: mean(v) ** 0.5)}
    cells |= {"effective draws": average("effective", ".0f")}
    cells |= {"CPU seconds": average("seconds", ".1f")}
    return table(frame(files["inference"], task="many"), ["parameters", "guide"], cells)


def coverage_of_one_labelling(files: Files) -> str:
    """Of an earlier program of README, with kappa alone: stored rows."""
    return held(frame(files["inference"], task="one labelling"), ["kappa"], ["method"])


def held(rows: DataFrame, parameters: Sequence[str], down: list[str], says: Any = None) -> str:
    """How often 90 % intervals hold the truth, and errors of the means."""
    if rows.empty:
        return markdown([])
    cells: dict[str, Cell] = {"data sets": count}
    for name in parameters:
        shown = {"kappa": "log kappa"}.get(name, name)
        truth = rows[f"{name}.truth"]
        inside = (rows[f"{name}.low"] < truth) & (truth < rows[f"{name}.high"])
        rows[f"{name} inside"] = inside.astype(float)
        rows[f"{name} error"] = (rows[f"{name}.mean"] - truth) ** 2
        cells[f"{shown}: in the interval"] = average(f"{name} inside", ".0%")
        cells[f"{shown}: rmse"] = average(f"{name} error", ".2f", of=lambda v: mean(v) ** 0.5)
    cells |= says or {}
    return table(rows, down, cells | {"CPU seconds": average("seconds", ".1f")})


def beside_numpyro(files: Files) -> str:
    """Effective draws a CPU second, the smaller of two parameters, and means beside REFERENCE."""
    rows = frame(files["inference"], task="numpyro")
    if rows.empty:
        return markdown([])
    for name in RANKED:
        rows["error"] = rows[f"{name}.sd"] ** 2 / rows[f"{name}.effective"]
        own = rows[rows["sampler"] == REFERENCE].set_index(["nodes", "seed"])
        own = rows[["nodes", "seed"]].join(own, on=["nodes", "seed"])
        gap = rows[f"{name}.mean"] - own[f"{name}.mean"]
        off = gap**2 / (rows["error"] + own["error"])
        rows[f"{name} off"] = off.where(rows["sampler"] != REFERENCE)
    rows["effective"] = rows[["kappa.effective", "beta.effective"]].min(axis=1)
    rows["rate"], rows["with all"] = (rows["effective"] / rows[k] for k in ("seconds", "whole"))
    cells: dict[str, Cell] = {"data sets": count, "draws a chain": average("samples", ",.0f")}
    cells |= {"log kappa": average("kappa.mean", ".2f"), "its sd": average("kappa.sd", ".2f")}
    cells |= {"beta": average("beta.mean", ".2f"), "its sd ": average("beta.sd", ".2f")}
    cells |= {"effective draws": average("effective", ".0f")}
    cells |= {"a CPU second": average("rate", ".1f")}
    cells |= {"with compilation and warm-up": average("with all", ".2f")}
    for name, shown in (("kappa", "log kappa"), ("beta", "beta")):
        cells[f"{shown}: standard errors off"] = average(
            f"{name} off", ".1f", of=lambda v: mean(v) ** 0.5
        )
    names = {
        "nodes": ordered(rows["nodes"], None),
        "sampler": ordered(rows["sampler"], [*SAMPLERS, *BEFORE]),
    }
    return table(rows.assign(**names), ["nodes", "sampler"], cells)


def of_counts(files: Files) -> str:
    """Effective draws a CPU minute, the smaller of two parameters."""
    rows = frame(files["inference"], task="counts")
    if rows.empty:
        return markdown([])
    rows["effective"] = rows[["kappa.effective", "beta.effective"]].min(axis=1)
    rows["rate"] = 60 * rows["effective"] / rows["seconds"]
    rows["each"] = rows["seconds"] / rows["chains"] / rows["samples"].where(rows["samples"] > 0)
    rows["R-hat"] = rows[["kappa.r hat", "beta.r hat"]].max(axis=1)
    cells: dict[str, Cell] = {"all units": average("whole_units", ",.0f")}
    cells |= {
        "draws a chain": average("samples", ",.0f"),
        "CPU seconds a draw": average("each", ".3f"),
    }
    cells |= {
        "effective draws": average("effective", ".0f"),
        "a CPU minute": average("rate", ".1f"),
    }
    cells |= {"R-hat": average("R-hat", ".2f")}
    cells |= {"log kappa (0)": average("kappa.mean", ".2f"), "its sd": average("kappa.sd", ".2f")}
    cells |= {"beta (1)": average("beta.mean", ".2f"), "its sd ": average("beta.sd", ".2f")}
    return table(rows, ["nodes", "units", "sampler", "limit"], cells)


TABLES = (
    coverage, coverage_of_readme, nested_of_readme, large_graphs, kernel_of_readme, meeting_times,
    by_size,
    sweeps_of_readme, many_parameters, coverage_of_one_labelling,
    beside_numpyro, of_counts,
)  # fmt: skip
OPTIONS = {
    "methods": ([*METHODS], "of the club"),
    "num_sets": (100, "data sets, of club and readme"),
    "of_readme": ([34, 2000], "nodes, of readme and sweeps; many has the last"),
    "num_pairs": (20, "of chains, of meetings"),
    "steps": ([600], "of readme; the others have the first"),
    "num_samples": (250, "draws after warm-up"), "warmup": (100, "steps of warm-up"),
    "sizes": ([100, 400, 1600], "nodes, of numpyro and sizes"), "plans": ([*PLANS], "of sizes"),
    "most": (10_000, "draws of a chain, of sizes"),
    "sweeps": [1, 5, 10, 20], "parameters": ([25, 50, 100], "of many"),
    "repeats": (3, "data sets of each line, of numpyro, sweeps and many"), "results": Path,
    "units": ([10, 1000], "mean number at a node, of counts"),
    "of_units": ([*OF_UNITS], "samplers, of counts"),
    "samplers": (SAMPLERS, "of numpyro"), "chains": (2, "of each data set, of numpyro and counts"),
    "limit": (600.0, "CPU seconds of a chain, of numpyro and counts"),
}  # fmt: skip
TASKS = [club, readme, exact, large, kernel, meetings, sizes, sweeps, many, numpyro, counts]
main = command(__doc__, TASKS, **OPTIONS)

if __name__ == "__main__":
    torch.set_default_dtype(torch.double)
    main()
