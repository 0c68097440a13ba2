# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Winners of counties from covariates and a map. README.md explains the tasks."""

import importlib.util
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.maps import programs, rivals
from benchmarks.maps.data import KINDS, Problem, counties
from benchmarks.maps.programs import PROGRAMS, by_mcmc, by_svi
from benchmarks.maps.rivals import Found
from benchmarks.nodes import node_scores
from benchmarks.shared.records import RESULTS, Records, command, pick
from benchmarks.shared.timing import timed


class Method(NamedTuple):
    """A fit with fixed settings, and lists of settings of which validation chooses one."""

    fit: Callable[[Problem, dict], Found]
    fixed: dict = {}
    grid: list[dict] = [{}]
    search: str | None = None  #: the method whose search chooses, if not its own
    needs: str | None = None  #: a package outside of the environment


def product(**values: list) -> list[dict]:
    return [dict(zip(values, each, strict=True)) for each in itertools.product(*values.values())]


def names(values: str, *rows: tuple) -> list[dict]:
    return [dict(zip(values.split(), row, strict=True)) for row in rows]


OURS, HIDDEN, MAP = "NMM", "NMM, latent effect", "CAR logistic regression"
PENALTIES = product(C=[0.01, 0.1, 1.0, 10.0])
NETWORKS = names(
    "hidden dropout lr", (16, 0.0, 0.01), (16, 0.5, 0.01), (64, 0.0, 0.01), (64, 0.5, 0.01),
    (64, 0.5, 0.003), (64, 0.5, 0.03),
)  # fmt: skip
BORROWED = {"program": "borrowed", "around": False}
METHODS = {
    OURS: Method(by_mcmc, BORROWED, product(hops=[2, 3])),
    "NMM, SVI": Method(by_svi, BORROWED, product(hops=[2, 3]), search=OURS),
    "NMM, neighbours' covariates": Method(
        by_mcmc, BORROWED | {"around": True}, product(hops=[2, 3]), search=OURS
    ),
    HIDDEN: Method(
        by_mcmc, {"program": "hidden", "around": True}, names("radius spacing", (4, 3), (8, 6))
    ),
    "logistic regression": Method(rivals.regression, {"around": False}, PENALTIES),
    "logistic regression, neighbours' covariates": Method(
        rivals.regression, {"around": True}, PENALTIES
    ),
    "autologistic": Method(
        rivals.autologistic, {"C": 1.0}, product(around=[False, True], mean=[False, True])
    ),
    "GCN": Method(rivals.network, {"labels": False}, NETWORKS),
    "GCN, labels as inputs": Method(rivals.network, {"labels": True}, NETWORKS),
    MAP: Method(rivals.car, {"around": False, "prior": 2.0}, needs="numpyro"),
}


def both(probs: Tensor) -> Tensor:
    """``(N, 2)``: probabilities of both labels."""
    return torch.stack([1 - probs, probs], 1).double()


def interval(draws: Tensor, observed: float) -> dict:
    """Mean, standard deviation and 90 % interval of draws ``(D,)`` of an observed number."""
    low, high = draws.double().quantile(torch.tensor([0.05, 0.95]).double()).tolist()
    found = {"observed": observed, "mean": draws.double().mean().item()}
    return found | {"sd": draws.double().std().item(), "low": low, "high": high}


def joint_scores(problem: Problem, found: Found) -> dict:
    """How far joint draws agree with the winners about equal neighbours and totals of blocks.

    Without joint draws labels are independent given their probabilities.
    """
    draws, y, inner = found.draws, problem.data.y, problem.inner
    if draws is None:
        draws = torch.bernoulli(found.probs.float().expand(rivals.NUM_DRAWS, -1)).long()
    same = [(each[..., inner[0]] == each[..., inner[1]]).double().mean(-1) for each in (draws, y)]
    row: dict = {"agreement": interval(same[0], same[1].item())} if inner.numel() else {}
    inside, widths = [], []
    blocks = [problem.block == number for number in range(int(problem.block.max()) + 1)]
    for block in (block for block in blocks if block.sum() > 1):
        total = interval(draws[:, block].sum(1), y[block].sum().item())
        inside.append(total["low"] <= total["observed"] <= total["high"])
        widths.append((total["high"] - total["low"]) / block.sum().item())
    if inside:
        row["blocks"] = {"number": len(inside), "covered": sum(inside) / len(inside)}
        row["blocks"]["width"] = sum(widths) / len(widths)
    return row | {"has joint draws": found.draws is not None}


def available(name: str) -> bool:
    """Whether the package of a method is installed."""
    package = METHODS[name].needs
    if package is None or importlib.util.find_spec(package):
        return True
    print(f"{name} is skipped, because {package} is not installed: pip install {package}")
    return False


def search(args, results: Records) -> None:
    """Validate each setting on a part of the training counties, held out like the test counties."""
    data = counties(args.data_root)
    for name in args.methods:
        method = METHODS[name]
        if method.search or len(method.grid) == 1 or not available(name):
            continue
        keys = {"split": args.splits, "seed": range(args.seeds), "method": name}
        for key in results.missing(task="search", **keys, settings=method.grid):
            torch.manual_seed(key["seed"])
            problem = Problem.of(data, key["split"], key["seed"], validates=True)
            settings = method.fixed | key["settings"] | {"seed": key["seed"]}
            found, seconds = timed(method.fit, problem, settings | {"samples": programs.FEW})
            scored = node_scores(both(found.probs)[problem.scored], data.y[problem.scored])
            more = {k: v for k, v in found.row.items() if k == "epochs"}
            results.add(**key, **scored, **more, seconds=seconds)


def best(results: Records, key: dict) -> dict:
    """Settings of the lowest validation NLL."""
    method = METHODS[key["method"]]
    if len(method.grid) == 1:
        return method.grid[0]
    wanted = key | {"task": "search", "method": method.search or key["method"]}
    trials = pick(results.rows, **wanted)
    if len(trials) < len(method.grid):
        raise ValueError(f"search of {' '.join(map(str, wanted.values()))} has not been finished")
    row = min(trials, key=lambda trial: trial["nll"])
    return row["settings"] | {k: v for k, v in row.items() if k == "epochs"}


def compare(args, results: Records) -> None:
    """Fit to all training counties and score the held-out ones."""
    data = counties(args.data_root)
    keys = {"split": args.splits, "seed": range(args.seeds), "method": args.methods}
    for key in results.missing(task="compare", **keys):
        if not available(key["method"]):
            continue
        torch.manual_seed(key["seed"])
        method, settings = METHODS[key["method"]], best(results, key)
        problem = Problem.of(data, key["split"], key["seed"])
        settings = method.fixed | settings | {"seed": key["seed"]}
        found, seconds = timed(method.fit, problem, settings)
        row = node_scores(both(found.probs)[problem.scored], data.y[problem.scored])
        row |= joint_scores(problem, found) | {"seconds": seconds, "settings": settings}
        results.add(**key, counties=int(problem.scored.sum()), **row, found=found.row)


#: Unconstrained starts of two chains, below and above what a fit finds.
STARTS = [{"kappa": -4.0, "rho": -1.5, "gamma": -1.0}, {"kappa": 1.0, "rho": 1.5, "gamma": 1.5}]


def chains(args, results: Records) -> None:
    """R-hat and effective draws of two chains from dispersed starts, on the first spatial split."""
    data = counties(args.data_root)
    for key in results.missing(task="chains", split="spatial", seed=0, method=[OURS, HIDDEN]):
        method = METHODS[key["method"]]
        settings = method.fixed | best(results, key) | {"seed": 0}
        program = PROGRAMS[settings["program"]](Problem.of(data, "spatial", 0), settings)
        torch.manual_seed(0)
        draws, total = [], 0.0
        for start in STARTS:
            beta = {"beta": start["kappa"] / 4 * torch.ones(program.x.shape[1])}
            first = {k: torch.tensor(v) for k, v in start.items() if k in program.sites} | beta
            found, seconds = timed(programs.chain, program, args.draws, first)
            draws, total = [*draws, found], total + seconds
        sizes = programs.r_hats(program, draws)
        whole = {name: torch.cat([each[name] for each in draws]) for name in program.sites}
        settings |= {"draws": args.draws, "warm-up": programs.WARMUP}
        results.add(**key, settings=settings, seconds=total, chains=sizes, found=program.row(whole))


OPTIONS: dict = {"data_root": Path, "methods": list(METHODS), "splits": list(KINDS), "seeds": 10}
OPTIONS |= {"draws": 1000, "choices": {"methods": list(METHODS), "splits": list(KINDS)}}
OPTIONS["results"] = RESULTS / "maps.jsonl"
main = command(__doc__, (search, compare, chains), **OPTIONS)

if __name__ == "__main__":
    main()
