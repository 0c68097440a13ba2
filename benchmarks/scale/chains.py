# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Chains against the bound: parameters that generated labels, and seconds a step."""

import time
from functools import partial
from statistics import median

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from pandas import DataFrame
from pyro import poutine
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from pyro.optim import ClippedAdam
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.utils import barabasi_albert_graph

from benchmarks.shared import tables
from benchmarks.shared.backbones import gcn
from benchmarks.shared.records import RESULTS, Files, Records, command
from benchmarks.shared.tables import Cell, average, count, frame, ordered, spread
from benchmarks.shared.timing import in_turn, peak_memory, timed
from benchmarks.shared.training import train_nmm
from pyro_nmm import Neighborhood, NeighborMixture, OrderedConditional
from pyro_nmm.guides import Chains, ordered_guide
from pyro_nmm.models import NMMNetwork, nmm

NUM_NODES, NUM_LINKS = 20_000, 50_000  # of one labelling; a link has two directions
KAPPA, BETA = 0.4, 1.0
LOG_KAPPA = -0.92  # of a grid
NUM_FITTED, CONCENTRATION = 8000, 0.2  # nodes of two GCNs, the median of their concentrations
#: Ways to draw the choices; the number is of sweeps a step.
METHODS = ["reward_to_go", "one_step_credit", "chains 1", "chains 5"]


def estimator(name: str) -> str | Chains:
    return Chains(int(name.split()[1])) if name.startswith("chains") else name


class Field:
    """A random graph with a feature of its edges, which attention weighs by beta."""

    def __init__(self, num_nodes: int, num_links: int, num_labels: int) -> None:
        ends = torch.randint(num_nodes, (2, num_links))
        self.hood = Neighborhood(torch.cat([ends, ends.flip(0)], 1), num_nodes)
        self.feature = torch.randn(self.hood.num_edges)
        self.share = torch.full((num_nodes, num_labels), 1 / num_labels)

    def of(self, kappa: Tensor, beta: Tensor) -> tuple[Neighborhood, Tensor, Tensor]:
        return self.hood, kappa[..., None, None] * self.share, beta[..., None] * self.feature

    def model(self, y: Tensor) -> None:
        kappa = pyro.sample("kappa", dist.LogNormal(0.0, 1.5))
        nmm(*self.of(kappa, pyro.sample("beta", dist.Normal(0.0, 2.0))), y, collapsed=True)


def labelled(key: dict) -> tuple[Field, Tensor]:
    """A field and one labelling by the true kappa and beta."""
    pyro.set_rng_seed(key["seed"])
    field = Field(key["nodes"], key["nodes"] * NUM_LINKS // NUM_NODES, key["labels"])
    return field, NeighborMixture(*field.of(torch.tensor(KAPPA), torch.tensor(BETA))).sample()


def parents(args, results: Records) -> None:
    """Approximate posteriors of kappa and beta, given one labelling."""
    each = {"seed": range(args.num_seeds), "labels": args.labels, "steps": args.steps}
    for key in results.missing(task="parents", **each, method=args.methods, nodes=args.nodes):
        field, y = labelled(key)
        pyro.clear_param_store()
        auto = AutoNormal(poutine.block(field.model, expose=["kappa", "beta"]))
        way = estimator(key["method"])

        def guide(y: Tensor, field=field, auto=auto, way=way) -> None:
            found = auto(y)
            values = field.of(found["kappa"], found["beta"])
            ordered_guide(*values, y, collapsed=True, estimator=way)

        elbo = Trace_ELBO(4, vectorize_particles=True, max_plate_nesting=0)
        decay = 0.1 ** (1 / key["steps"])
        svi = SVI(field.model, guide, ClippedAdam({"lr": 0.1, "lrd": decay}), elbo)
        svi.step(y)  # pays for what is loaded once
        start = time.process_time()
        for _ in range(key["steps"] - 1):
            svi.step(y)
        row = {"ms": 1e3 * (time.process_time() - start) / (key["steps"] - 1)}
        with torch.no_grad():
            draws = [auto(y) for _ in range(500)]
        for name, change in {"kappa": torch.log, "beta": lambda value: value}.items():
            values = change(torch.stack([draw[name] for draw in draws]).flatten())
            row |= {name: values.mean().item(), f"{name} sd": values.std().item()}
        results.add(**key, **row)


def scores(args, results: Records) -> None:
    """
    Derivatives of log p(y) by log kappa and beta: means over Gibbs chains (Fisher's identity). Of
    the concentrations between two points only, their integral is less noisy than two whole paths.
    """
    each = {"seed": range(args.num_seeds), "labels": args.labels, "beta": args.betas}
    last, states = None, torch.empty(0)
    for key in results.missing(
        task="scores", nodes=args.nodes, **each, **{"log kappa": args.log_kappas}
    ):
        field, y = labelled(key)
        pyro.set_rng_seed(1000 + key["seed"])
        start = time.process_time()
        values = torch.tensor([key["log kappa"], key["beta"]], requires_grad=True)
        q = OrderedConditional(*field.of(values[0].detach().exp(), values[1].detach()), y)
        if (key["seed"], key["labels"]) != last:
            states, last = q.sample((args.chains,)), (key["seed"], key["labels"])
        found, states = [], q.sweep(states, args.sweeps)
        for _ in range(args.draws):
            states = q.sweep(states, 5)
            of_chains = []
            for c in states:
                model = partial(nmm, *field.of(values[0].exp(), values[1]), y, collapsed=True)
                density = poutine.trace(poutine.condition(model, {"c": c})).get_trace()
                of_chains.append(torch.autograd.grad(density.log_prob_sum(), values)[0])
            found.append(torch.stack(of_chains))
        means = torch.stack(found).mean(0)
        error = means.std(0) / len(means) ** 0.5
        row = dict(
            zip(("score of log kappa", "score of beta"), means.mean(0).tolist(), strict=True)
        )
        row |= {"errors": error.tolist(), "seconds": time.process_time() - start}
        results.add(**key, chains=args.chains, draws=args.draws, **row)


def networks(args, results: Records) -> None:
    """Labels of an NMM of two GCNs, which another NMM of two GCNs is fitted to."""
    for key in results.missing(task="networks", seed=range(args.num_seeds), method=args.methods):
        pyro.set_rng_seed(key["seed"])
        edges, size = barabasi_albert_graph(NUM_FITTED, 3), NUM_FITTED
        x, hood = 3 * torch.randn(size, 3), Neighborhood(edges, size)

        def network(**options) -> NMMNetwork:
            kinds = gcn(3, 3, dropout=0.0), gcn(3, 8, attention=True, dropout=0.0)
            return NMMNetwork(*kinds, num_classes=3, floor=0.01, **options)

        truth = network()
        with torch.no_grad():
            mixture = NeighborMixture(hood, *truth(hood, x, edges))
            alpha = CONCENTRATION * mixture.alpha / mixture.alpha.sum(-1).median()
            mixture = NeighborMixture(hood, alpha, mixture.logits)
            data = Data(x=x, edge_index=edges, y=mixture.sample(), num_nodes=size)
        part = torch.rand(size)
        data.train_mask, data.val_mask = part < 0.8, part >= 0.8
        options = {"estimator": estimator(key["method"]), "criterion": "likelihood"}
        options |= {"weight_decay": 0.0, "patience": args.num_epochs, "lr": 0.05}
        start = time.process_time()
        found, curve = train_nmm(network(), data, hood, num_epochs=args.num_epochs, **options)
        row = {"seconds": time.process_time() - start, "epochs": len(curve)}
        results.add(**key, **row, **compared(mixture, found, data.y))


@torch.no_grad()
def compared(truth: NeighborMixture, found: NeighborMixture, y: Tensor) -> dict:
    """Concentrations and attention of a fit beside those that generated the labels."""
    sums = {name: mix.alpha.sum(-1).log() for name, mix in (("truth", truth), ("fit", found))}
    rows = [mix.hood.softmax(mix.logits) for mix in (truth, found)]
    distance = (rows[0] - rows[1]).abs().sum() / truth.hood.num_nodes / 2
    uniform = (rows[0] - truth.hood.softmax(torch.zeros_like(truth.logits))).abs()
    row = {f"log A, {name}": value.median().item() for name, value in sums.items()}
    row["correlation of attention"] = torch.corrcoef(torch.stack(rows))[0, 1].item()
    row |= {"distance": distance.item(), "distance of uniform": uniform.sum().item()}
    row["distance of uniform"] /= 2 * truth.hood.num_nodes
    for name, mix in (("truth", truth), ("fit", found)):
        row[f"log p, {name}"] = mix.path_likelihood(y)[0].item() / len(y)
    return row


def steps(args, results: Records) -> None:
    """A step of the guide by chains and by the bound in turn: seconds, and their ratio."""
    for key in results.missing(task="steps", nodes=args.sizes, labels=2):
        pyro.set_rng_seed(0)
        field = Field(key["nodes"], key["nodes"] * NUM_LINKS // NUM_NODES, 2)
        values = torch.tensor([KAPPA, BETA], requires_grad=True)
        arguments = (*field.of(*values.detach()), None)
        y = NeighborMixture(*arguments[:3]).sample()
        elbo = Trace_ELBO(args.particles, vectorize_particles=True, max_plate_nesting=0)

        def step(way: str | Chains, field=field, values=values, y=y, elbo=elbo) -> float:
            model = partial(nmm, *field.of(*values), y, collapsed=True)
            guide = partial(ordered_guide, *field.of(*values), y, collapsed=True, estimator=way)
            elbo.differentiable_loss(model, guide).backward()
            return 0.0

        ways = {name: estimator(name) for name in ("reward_to_go", "chains 1")}
        runs = {name: partial(step, way) for name, way in ways.items()}
        memory = {name: peak_memory(run)[1] / 2**20 for name, run in runs.items()}
        found = in_turn(
            {name: lambda run=run: timed(run, clock=time.process_time)[1]
             for name, run in runs.items()}, args.repeats,
        )  # fmt: skip
        ratio = median(b / a for a, b in zip(*found.values(), strict=True))
        seconds = {name: median(turns) for name, turns in found.items()}
        results.add(**key, particles=args.particles, ratio=ratio, seconds=seconds, MiB=memory)


def named(files: Files, task: str) -> DataFrame:
    rows = frame(files["chains"], task=task)
    return rows if rows.empty else rows.assign(**{"choices by": ordered(rows["method"], METHODS)})


def chains_parents(files: Files) -> str:
    rows = named(files, "parents")
    cells = {
        "data sets": count,
        "log kappa": spread("kappa", 2),
        "its sd": average("kappa sd", ".2f"),
    }
    cells |= {"beta": spread("beta", 2), "its sd ": average("beta sd", ".2f")}
    cells |= {"CPU ms a step": average("ms", ".0f", of=median)}
    return tables.table(rows, ["labels", "steps", "choices by"], cells)


def chains_scores(files: Files) -> str:
    """The scores, and their integral from the truth over log kappa: differences of log p(y)."""
    rows = frame(files["chains"], task="scores").sort_values(["seed", "beta", "log kappa"])
    by, score = rows.groupby(["seed", "beta"]), "score of log kappa"
    steps = rows["log kappa"] - by["log kappa"].shift()
    area = ((rows[score] + by[score].shift()) / 2 * steps).fillna(0)
    rows["log p"] = area.groupby([rows["seed"], rows["beta"]]).cumsum()
    truth = rows[rows["log kappa"] == LOG_KAPPA].set_index(["seed", "beta"])["log p"]
    own = rows[["seed", "beta"]].join(truth, on=["seed", "beta"])["log p"]
    rows["gap"] = rows["log p"] - own
    rows["labelling"] = rows["seed"]
    rows["kappa error"], rows["beta error"] = rows["errors"].str[0], rows["errors"].str[1]

    def with_error(name: str, error: str) -> Cell:
        return lambda part, _: f"{part[name].mean():.1f} ± {part[error].mean():.1f}"

    cells = {"score of log kappa": with_error(score, "kappa error")}
    cells |= {"score of beta": with_error("score of beta", "beta error")}
    cells |= {"log p(y) less log p(y) at log kappa -0.92": average("gap", ".1f")}
    cells |= {"CPU seconds": average("seconds", ".0f")}
    return tables.table(rows, ["labelling", "beta", "log kappa"], cells)


def chains_modes(files: Files) -> str:
    """Where both scores vanish, and the deviations that their slopes say, by a linear fit."""
    rows, lines = frame(files["chains"], task="scores"), []
    if rows.empty:
        return tables.markdown([])
    near = rows[rows["log kappa"].between(-1.4, -0.9)]
    for (seed,), part in tables.groups(near, ["seed"]):
        points = np.column_stack([part[["log kappa", "beta"]], np.ones(len(part))])
        scores = part[["score of log kappa", "score of beta"]]
        slopes = np.linalg.lstsq(points, scores.to_numpy())[0]
        mode = np.linalg.solve(slopes[:2].T, -slopes[2])
        covariance = np.linalg.inv(-(slopes[:2] + slopes[:2].T) / 2)
        deviation, found = covariance.diagonal() ** 0.5, {"labelling": f"{seed}"}
        for name, place, sd in zip(("log kappa", "beta"), mode, deviation, strict=True):
            found |= {f"{name}, mode": f"{place:.2f}", f"{name}, sd": f"{sd:.2f}"}
        correlation = covariance[0, 1] / deviation.prod()
        lines.append(found | {"correlation": f"{correlation:.2f}"})
    return tables.markdown(lines)


def chains_networks(files: Files) -> str:
    rows = named(files, "networks")
    cells = {"data sets": count, "log A, truth": spread("log A, truth", 2)}
    cells |= {"log A, fit": spread("log A, fit", 2)}
    cells |= {"correlation of attention": spread("correlation of attention", 2)}
    cells |= {"distance of attention": spread("distance", 3)}
    cells |= {"of uniform attention": spread("distance of uniform", 3)}
    cells |= {f"log p(y) a node, {name}": spread(f"log p, {name}", 4) for name in ("truth", "fit")}
    return tables.table(rows, ["choices by"], cells)


def chains_steps(files: Files) -> str:
    rows = sorted((r for r in files["chains"] if r["task"] == "steps"), key=lambda r: r["nodes"])
    sizes = [{"nodes": f"{row['nodes']:,}", "particles": f"{row['particles']}"} for row in rows]
    lines = [size | tables.costs(row, {}) for size, row in zip(sizes, rows, strict=True)]
    return tables.markdown(lines, 2)


TABLES = chains_parents, chains_scores, chains_modes, chains_networks, chains_steps
OPTIONS = {"labels": [2, 7], "steps": [120], "methods": METHODS, "nodes": NUM_NODES}
OPTIONS |= {"num_seeds": 1, "num_epochs": 250, "sizes": [20_000], "particles": 4, "repeats": 9}
OPTIONS |= {"results": RESULTS / "chains.jsonl"}
OPTIONS |= {"betas": [BETA], "log_kappas": [-1.6, -1.37, -1.15, LOG_KAPPA, -0.7]}
OPTIONS |= {"chains": 8, "sweeps": 100, "draws": 50}
main = command(__doc__, (parents, scores, networks, steps), **OPTIONS)

if __name__ == "__main__":
    main()
