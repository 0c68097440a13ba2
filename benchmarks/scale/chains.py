# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Chains against the bound: parameters that generated labels, and seconds a step."""

import time
from functools import partial
from statistics import median

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
from benchmarks.shared.records import RESULTS, Files, Records, command
from benchmarks.shared.tables import average, count, frame, ordered, spread
from benchmarks.shared.timing import in_turn, peak_memory, timed
from pyro_nmm import Neighborhood, NeighborMixture
from pyro_nmm.guides import Chains, fit_nmm, ordered_guide
from pyro_nmm.models import NMMNetwork, nmm
from pyro_nmm.models.backbones import gcn

NUM_NODES, NUM_LINKS = 20_000, 50_000  # of one labelling; a link has two directions
KAPPA, BETA = 0.4, 1.0
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


def parents(args, results: Records) -> None:
    """Approximate posteriors of kappa and beta, given one labelling."""
    each = {"seed": range(args.num_seeds), "labels": args.labels, "steps": args.steps}
    for key in results.missing(task="parents", **each, method=args.methods, nodes=args.nodes):
        pyro.set_rng_seed(key["seed"])
        field = Field(key["nodes"], key["nodes"] * NUM_LINKS // NUM_NODES, key["labels"])
        y = NeighborMixture(*field.of(torch.tensor(KAPPA), torch.tensor(BETA))).sample()
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


def networks(args, results: Records) -> None:
    """Labels of an NMM of two GCNs, which another NMM of two GCNs is fitted to."""
    for key in results.missing(task="networks", seed=range(args.num_seeds), method=args.methods):
        pyro.set_rng_seed(key["seed"])
        edges, size = barabasi_albert_graph(2000, 4), 2000
        x, hood = torch.randn(size, 8), Neighborhood(edges, size)

        def network(**options) -> NMMNetwork:
            kinds = gcn(8, 3, dropout=0.0), gcn(8, 8, attention=True, dropout=0.0)
            return NMMNetwork(*kinds, num_classes=3, floor=0.01, **options)

        truth = network()
        with torch.no_grad():
            truth.attention.network.convs[0].lin.weight.mul_(3)
            mixture = NeighborMixture(hood, *truth(hood, x, edges))
            concentration = 0.5 * mixture.alpha / mixture.alpha.sum(-1).median()
            mixture = NeighborMixture(hood, concentration, 2 * mixture.logits)
            data = Data(x=x, edge_index=edges, y=mixture.sample(), num_nodes=size)
        part = torch.rand(size)
        data.train_mask, data.val_mask = part < 0.8, part >= 0.8
        options = {"estimator": estimator(key["method"]), "criterion": "likelihood"}
        start = time.process_time()
        found, curve = fit_nmm(network(), data, hood, num_epochs=args.num_epochs, **options)
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
    return rows if rows.empty else rows.assign(way=ordered(rows["method"], METHODS))


def chains_parents(files: Files) -> str:
    rows = named(files, "parents")
    cells = {
        "data sets": count,
        "log kappa": spread("kappa", 2),
        "its sd": average("kappa sd", ".2f"),
    }
    cells |= {"beta": spread("beta", 2), "its sd ": average("beta sd", ".2f")}
    cells |= {"CPU ms a step": average("ms", ".0f", of=median)}
    return tables.table(rows, ["labels", "steps", "way"], cells)


def chains_networks(files: Files) -> str:
    rows = named(files, "networks")
    cells = {"data sets": count, "log A, truth": spread("log A, truth", 2)}
    cells |= {"log A, fit": spread("log A, fit", 2)}
    cells |= {"correlation of attention": spread("correlation of attention", 2)}
    cells |= {"distance of attention": spread("distance", 3)}
    cells |= {"of uniform attention": spread("distance of uniform", 3)}
    cells |= {f"log p(y) a node, {name}": spread(f"log p, {name}", 4) for name in ("truth", "fit")}
    return tables.table(rows, ["way"], cells)


def chains_steps(files: Files) -> str:
    rows = sorted((r for r in files["chains"] if r["task"] == "steps"), key=lambda r: r["nodes"])
    lines = [{"nodes": f"{row['nodes']:,}"} | tables.costs(row, {}) for row in rows]
    return tables.markdown(lines)


TABLES = chains_parents, chains_networks, chains_steps
OPTIONS = {"labels": [2, 7], "steps": [120], "methods": METHODS, "nodes": NUM_NODES}
OPTIONS |= {"num_seeds": 1, "num_epochs": 300, "sizes": [20_000], "particles": 4, "repeats": 9}
OPTIONS |= {"results": RESULTS / "chains.jsonl"}
main = command(__doc__, (parents, networks, steps), **OPTIONS)

if __name__ == "__main__":
    main()
