# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Chains against the bound: parameters that generated labels."""

import time
from contextlib import nullcontext
from statistics import median
from unittest import mock

import pyro
import pyro.distributions as dist
import torch
from pandas import DataFrame
from pyro import poutine
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from pyro.optim import ClippedAdam
from torch import Tensor

from benchmarks.shared import tables
from benchmarks.shared.records import RESULTS, Files, Records, command
from benchmarks.shared.tables import average, count, frame, ordered, spread
from pyro_nmm import NeighborChoice, Neighborhood, NeighborMixture, compiled
from pyro_nmm.guides import Chains, ordered_guide
from pyro_nmm.models import nmm

NUM_NODES, NUM_LINKS = 20_000, 50_000  # of one labelling; a link has two directions
KAPPA, BETA = 0.4, 1.0
#: Ways to draw the choices; the number is of sweeps a step. The second has stored rows alone.
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


def labelled(key: dict, kappa: float = KAPPA) -> tuple[Field, Tensor]:
    """A field and one labelling by the true kappa and beta."""
    pyro.set_rng_seed(key["seed"])
    field = Field(key["nodes"], key["nodes"] * NUM_LINKS // NUM_NODES, key["labels"])
    return field, NeighborMixture(*field.of(torch.tensor(kappa), torch.tensor(BETA))).sample()


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


def variance(args, results: Records) -> None:
    """Of the gradient of log p(y) by beta, at the true parameters: with the choices of chains, and
    less their control variate. Latent labels have normal observations of standard deviation 1."""
    each = {"kappa": args.kappas, "nodes": args.sizes, "latent": [False, True]}
    each |= {"code": ["loops", "two blocks"]}
    for key in results.missing(task="variance", seed=range(args.num_seeds), **each):
        if key["code"] == "two blocks":  # of devices, here on the processor
            runs = mock.patch.object(compiled, "DEVICES", set())
        else:
            runs = nullcontext()
        with runs:
            field, y = labelled(key | {"labels": 3}, key["kappa"])
            beta = torch.tensor(BETA, requires_grad=True)
            mix = NeighborMixture(*field.of(torch.tensor(key["kappa"]), beta))
            seen = dist.Normal(torch.arange(3.0), 1.0).log_prob(y[:, None] + torch.randn(len(y), 1))
            q = mix.latents(seen) if key["latent"] else mix.choices(y)
            value, found = q.sweep(q.sample(), 50), []
            for _ in range(args.num_gradients):
                value, chosen = q.swept_with_shares(value, 1, 0)
                choices = value[0] if key["latent"] else value
                parts = NeighborChoice(q.hood, mix.logits).log_prob(choices), q.control(*chosen)
                found.append([torch.autograd.grad(part, beta, retain_graph=True) for part in parts])
        plain, control = torch.tensor(found).flatten(1).double().T
        row = {"choices": plain.var().item(), "probabilities": (plain - control).var().item()}
        results.add(**key, **row, steps=args.num_gradients)


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


def chains_variance(files: Files) -> str:
    rows = frame(files["chains"], task="variance")
    if rows.empty:
        return tables.markdown([])
    rows["labels"] = rows["latent"].map({False: "observed", True: "latent"})
    rows["ratio"] = rows["choices"] / rows["probabilities"]
    cells = {"graphs": count, "steps": average("steps", ".0f")}
    cells |= {"of choices": average("choices", ",.1f")}
    cells |= {"of probabilities": average("probabilities", ",.2f")}
    cells |= {"ratio": average("ratio", ".1f", of=median)}
    return tables.table(rows, ["kappa", "nodes", "labels", "code"], cells)


TABLES = chains_parents, chains_variance
OPTIONS = {
    "labels": [2, 7],
    "steps": [120],
    "methods": [METHODS[0], *METHODS[2:]],
    "nodes": NUM_NODES,
}
OPTIONS |= {"nodes": NUM_NODES, "num_seeds": 1, "results": RESULTS / "chains.jsonl"}
OPTIONS |= {"sizes": ([34, 1600, 20_000], "nodes, of variance")}
OPTIONS |= {"kappas": ([0.4, 4.0], "concentrations, of variance")}
OPTIONS |= {"num_gradients": (1000, "of each line of variance")}
main = command(__doc__, (parents, variance), **OPTIONS)

if __name__ == "__main__":
    main()
