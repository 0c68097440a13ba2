# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
Node classification: the paper's tables 2 and 3, its accuracy over training sizes, and more.

    python benchmarks/nodes.py search accuracy --datasets cora --backbones gcn

Tasks: ``search`` (random settings, kept for the others, chosen by validation accuracy),
``accuracy`` (public split, 10 seeds), ``pairs`` (pair log-likelihood, random splits), ``sizes``
(accuracy against the share of training nodes) and ``deviations`` (from the paper's recipe, one
change at a time). Each fit appends one line to ``--results``, and what is there already is not run
again, so a run may be interrupted; all of it takes a day on two cores. Tables and figures are made
from that file by ``benchmarks/report.py``. ``search --searched NMM`` draws settings for an NMM of
its own, and ``accuracy --settings-of NMM`` gives them to it and to its backbone.
"""

from __future__ import annotations

import itertools
import random
import time
from argparse import ArgumentParser
from pathlib import Path
from statistics import mean

import common
from common import RESULTS, Records, arguments, start
from nodes_fits import BACKBONES, DEFAULT, evaluate, fit, load, random_settings, variants

from pyro_nmm import NeighborMixture
from pyro_nmm.datasets.nodes import inner_edges, random_split
from pyro_nmm.models import temperature_scaling

#: "backbone" and "NMM" as in the paper; "+ consistency" lets unlabelled nodes teach. The two in
#: the middle are ablations, and take the settings of the one on the right.
SEARCHED = ["backbone", "NMM", "NMM + consistency"]
SIBLING = {"NMM": "backbone", "backbone + consistency": "NMM + consistency"}
METHODS = ["backbone", "NMM", "backbone + consistency", "NMM + consistency"]
#: Besides the backbone's own learning rate, weight decay and dropout, chosen by validation.
OURS = {"link": "exp", "floor": 0.1, "gamma": 2.0}
PAPER = {"floor": 1.0, "gamma": 0.0, "weight_decay": 0.005, "dropout": 0.5, "lr": 0.01}
SHORT = {"num_epochs": 200}
#: What deviates: settings, and options of the fit. "none" is the row of the other tables.
CHANGES: dict[str, tuple[dict, dict]] = {
    "none": ({}, {}),
    "link softplus + 1": ({"link": "softplus", "floor": 1.0}, {}),
    "link square + 1": ({"link": "square", "floor": 1.0}, {}),
    "link exp + 1": ({"floor": 1.0}, {}),
    "gamma 0": ({"gamma": 0.0}, {}),
    "200 epochs": ({}, SHORT),
    "weight decay .005": ({"weight_decay": 0.005}, {}),
    "estimator one_step_credit": ({}, {"estimator": "one_step_credit"}),
    "estimator no_score": ({}, {"estimator": "no_score"}),
    "paper's, softplus + 1": (PAPER | {"link": "softplus"}, SHORT),
    "paper's, square + 1": (PAPER | {"link": "square"}, SHORT),
    "paper's, softplus + 1, lr .05": (PAPER | {"link": "softplus", "lr": 0.05}, SHORT),
    "paper's, square + 1, lr .05": (PAPER | {"link": "square", "lr": 0.05}, SHORT),
}


class Results(Records):
    FIELDS = (
        "task", "dataset", "backbone", "method", "settings of", "change", "ratio", "trial", "seed",
    )  # fmt: skip

    def line(self, row: dict) -> str:
        keys = [str(row[f]) for f in self.FIELDS if f in row]
        scores = f"accuracy {row['test']['accuracy']:.4f}  nll {row['test']['nll']:.4f}"
        more = [f"{n} {row[n]:.4f}" for n in ("joint", "conditional") if n in row]
        return " ".join([*keys, scores, *more])


def chosen(rows: list[dict], **key) -> dict:
    """The settings of the best mean validation accuracy, then likelihood, in a search."""

    def quality(trial: list[dict]) -> tuple[float, float]:
        return mean(r["val"]["accuracy"] for r in trial), -mean(r["val"]["nll"] for r in trial)

    return DEFAULT | common.chosen(rows, quality, num_splits=2, **key)


def search(args, results: Results, **place) -> None:
    data, hood = load(args, place["dataset"])
    for method in args.searched:
        rng = random.Random(0)
        trials = [random_settings(method, place["dataset"], rng) for _ in range(args.num_trials)]
        each = {"trial": range(args.num_trials), "seed": (100, 101)}
        for key in results.missing(task="search", **place, method=method, **each):
            settings = trials[key["trial"]]
            model, _ = fit(method, place["backbone"], data, hood, settings, key["seed"], args)
            model = model if "NMM" in method else model.softmax(-1)
            results.add(**key, settings=settings, **evaluate(model, data))


def accuracy(args, results: Results, **place) -> None:
    data, hood = load(args, place["dataset"])
    # "settings of" is absent from a row with the method's own search, or that of its sibling.
    given = {"settings of": args.settings_of}
    each = {"seed": range(args.num_seeds), "method": args.methods}
    for key in results.missing(task="accuracy", **place, **each, **given):
        method, seed = key["method"], key["seed"]
        searched = args.settings_of or SIBLING.get(method, method)
        settings = chosen(results.rows, **place, method=searched)
        began = time.perf_counter()
        fitted, curve = fit(method, place["backbone"], data, hood, settings, seed, args)
        seconds = (time.perf_counter() - began) / len(curve)
        for name, model, fit_seconds in reversed(list(variants(method, fitted, hood, data))):
            more = evaluate(model, data, joint=True) | {"fit seconds": fit_seconds}
            if name == method:
                more |= {"settings": settings, "epochs": len(curve), "epoch seconds": seconds}
                if seed == 0:
                    more["curve"] = [row[0] for row in curve]
            results.add(**key | {"method": name}, **more)


def pairs(args, results: Results, **place) -> None:
    """Paired random splits for pair log-likelihoods."""
    splits(args, results, place, "pairs", (0.2, 0.4, 0.6), val=0.1, criterion="likelihood")


def sizes(args, results: Results, **place) -> None:
    """Paired random splits for accuracy."""
    splits(args, results, place, "sizes", (0.1, 0.2, 0.3, 0.4, 0.5), val=0.2, criterion="accuracy")


def splits(args, results, place: dict, task: str, ratios: tuple, val: float, criterion: str):
    data, hood = load(args, place["dataset"])
    calibrated = {}
    # Splits 0 to 4 served to choose the priors of StackedNMM and the default settings.
    seeds, ratios = range(10, 10 + args.num_splits), ratios[:1] if args.smoke else ratios
    for key in results.missing(task=task, **place, seed=seeds, ratio=ratios, method=args.methods):
        method, seed, ratio = key["method"], key["seed"], key["ratio"]
        part = random_split(data, ratio, val, 0.3, seed)
        ends = inner_edges(part.edge_index, part.test_mask) if task == "pairs" else None
        known = place["backbone"], part, hood, DEFAULT, seed, args
        fitted = None
        if ends is not None and calibrated.get("of") != (seed, ratio):
            scores, _ = fit("backbone", *known, criterion=criterion)
            temperature = temperature_scaling(scores, part.y, part.val_mask)
            calibrated = {"of": (seed, ratio), "probs": (scores / temperature).softmax(-1)}
            fitted = scores if method == "backbone" else None
        if fitted is None:
            fitted, _ = fit(method, *known, criterion=criterion)
        for name, model, fit_seconds in reversed(list(variants(method, fitted, hood, part))):
            more = evaluate(model, part, ends, temperature=calibrated.get("probs"))
            results.add(**key | {"method": name}, **more, **{"fit seconds": fit_seconds})


def deviations(args, results: Results, **place) -> None:
    """The public split, with one thing of the recipe changed, then with the paper's whole one."""
    data, hood = load(args, place["dataset"])
    ours = chosen(results.rows, **place, method="backbone") | OURS
    each = {"seed": range(args.num_seeds), "change": list(CHANGES)}
    for key in results.missing(task="deviations", **place, method="NMM", **each):
        settings, options = CHANGES[key["change"]]
        settings, most = ours | settings, min(options.get("num_epochs", 400), args.num_epochs)
        more = options | {"num_epochs": most}
        mix, curve = fit("NMM", place["backbone"], data, hood, settings, key["seed"], args, **more)
        scores = evaluate(mix, data, joint=True) | {"sequential": sequential_accuracy(mix, data)}
        results.add(**key, **scores, settings=settings | more, epochs=len(curve))


def sequential_accuracy(mixture: NeighborMixture, data) -> float:
    """Of the paper's rule: one test node after another, each prediction a known label."""
    test = data.test_mask.nonzero().flatten()
    posterior = mixture.condition(data.y, data.train_mask, num_samples=16)
    found = posterior.predict(test, method="sequential")
    return (found == data.y[test]).double().mean().item()


TASKS = {task.__name__: task for task in (search, accuracy, pairs, sizes, deviations)}


def main(args) -> Results:
    start(args.num_threads)
    if args.smoke:
        args.datasets, args.backbones, args.num_epochs = ["digits"], ["gcn"], 3
        args.num_trials = args.num_seeds = args.num_splits = 1
    results = Results(args.results)
    for task, dataset, kind in itertools.product(args.tasks, args.datasets, args.backbones):
        TASKS[task](args, results, dataset=dataset, backbone=kind)
    return results


def parser() -> ArgumentParser:
    choices = {"backbones": BACKBONES, "methods": METHODS, "searched": SEARCHED}
    return arguments(
        __doc__, TASKS, "a minute on the digits", choices | {"settings_of": SEARCHED},
        datasets=["cora", "citeseer", "pubmed"], backbones=["gcn", "gat", "appnp"],
        methods=METHODS, searched=["backbone", "NMM + consistency"],
        settings_of=(str, "of accuracy: whose search"), num_epochs=400, num_trials=12,
        num_seeds=10, num_splits=5, num_threads=1, results=RESULTS / "nodes.jsonl",
        data_root=Path, device="cpu",
    )  # fmt: skip


if __name__ == "__main__":
    main(parser().parse_args())
