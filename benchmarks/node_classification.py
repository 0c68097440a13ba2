# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
Node classification: the paper's tables 2 and 3, its accuracy over training sizes, and more.

    python benchmarks/node_classification.py search accuracy --datasets cora --backbones gcn

Tasks: ``search`` (random settings, kept for the others, chosen by validation accuracy),
``accuracy`` (public split, 10 seeds), ``pairs`` (pair log-likelihood, random splits), ``sizes``
(accuracy against the share of training nodes) and ``deviations`` (from the paper's recipe, one
change at a time, see ``deviations.py``). Each fit appends one line to ``--results``, and what is
there already is not run again, so a run may be interrupted. Tables and figures are made from that
file by ``benchmarks/report.py``. ``search --searched NMM`` draws settings for an NMM of its own,
and ``accuracy --settings-of NMM`` gives them to it and to its backbone.
"""

from __future__ import annotations

import argparse
import itertools
import random
import time
from functools import partial
from pathlib import Path

import pyro
import torch
from deviations import deviations
from node_fits import (
    BACKBONES,
    DEFAULT,
    DEFAULT_AGREEMENT,
    DEFAULT_NMM,
    fit,
    load,
    random_settings,
)
from node_scores import evaluate, variants
from records import Records

from pyro_nmm.datasets.nodes import inner_edges, random_split
from pyro_nmm.metrics import temperature_scaling

TASKS = ("search", "accuracy", "pairs", "sizes", "deviations")
RESULTS = Path(__file__).parent / "results" / "node_classification.jsonl"
#: "backbone" and "NMM" as in the paper; "+ agreement" lets unlabelled nodes teach. The two in
#: the middle are ablations, and take the settings of the one on the right.
SEARCHED = ("backbone", "NMM", "NMM + agreement")
SIBLING = {"NMM": "backbone", "backbone + agreement": "NMM + agreement"}
METHODS = ("backbone", "NMM", "backbone + agreement", "NMM + agreement")


class Results(Records):
    """A key tells what has been run."""

    FIELDS = ("task", "dataset", "backbone", "method", "settings of", "change", "ratio", "trial",
              "seed")  # fmt: skip

    def line(self, row: dict) -> str:
        keys = [str(row[f]) for f in self.FIELDS if f in row]
        scores = f"accuracy {row['test']['accuracy']:.4f}  nll {row['test']['nll']:.4f}"
        more = [f"{n} {row[n]:.4f}" for n in ("joint", "conditional") if n in row]
        return " ".join([*keys, scores, *more])

    def chosen(self, dataset: str, backbone: str, method: str) -> dict:
        """The settings of the best mean validation accuracy, then likelihood, in a search."""
        key = {"task": "search", "dataset": dataset, "backbone": backbone, "method": method}
        trials: dict[int, list[dict]] = {}
        for row in self.rows:
            if all(row[k] == v for k, v in key.items()):
                trials.setdefault(row["trial"], []).append(row)
        if not trials or any(len(trial) < 2 for trial in trials.values()):
            raise ValueError(f"search {dataset} {backbone} {method} has not been run to its end")

        def quality(trial: list[dict]) -> tuple[float, float]:
            size = len(trial)
            accuracy = sum(r["val"]["accuracy"] for r in trial) / size
            return accuracy, -sum(r["val"]["nll"] for r in trial) / size

        default = DEFAULT | DEFAULT_NMM | DEFAULT_AGREEMENT
        return default | max(trials.values(), key=quality)[0]["settings"]


def search(args, results: Results, dataset: str, kind: str) -> None:
    data, hood = load(args, dataset)
    for method in args.searched:
        rng = random.Random(0)
        trials = [random_settings(method, dataset, rng) for _ in range(args.num_trials)]
        for trial, seed in itertools.product(range(args.num_trials), (100, 101)):
            key = {"task": "search", "dataset": dataset, "backbone": kind, "method": method,
                   "trial": trial, "seed": seed}  # fmt: skip
            if not results.has(**key):
                model, _ = fit(method, kind, data, hood, trials[trial], seed, args)
                model = model if "NMM" in method else model.softmax(-1)
                results.add(**key, settings=trials[trial], **evaluate(model, data))


def accuracy(args, results: Results, dataset: str, kind: str) -> None:
    data, hood = load(args, dataset)
    for seed, method in itertools.product(range(args.num_seeds), args.methods):
        key = {"task": "accuracy", "dataset": dataset, "backbone": kind, "seed": seed}
        # Absent from a row: the method's own search, or that of its sibling.
        if results.has(**key, method=method, **{"settings of": args.settings_of}):
            continue
        if args.settings_of:
            key["settings of"] = args.settings_of
        searched = args.settings_of or SIBLING.get(method, method)
        settings = results.chosen(dataset, kind, searched)
        start = time.perf_counter()
        fitted, curve = fit(method, kind, data, hood, settings, seed, args)
        seconds = (time.perf_counter() - start) / len(curve)
        for name, model, fit_seconds in reversed(list(variants(method, fitted, hood, data))):
            more = evaluate(model, data, joint=True) | {"fit seconds": fit_seconds}
            if name == method:
                more |= {"settings": settings, "epochs": len(curve), "epoch seconds": seconds}
                if seed == 0:
                    more["curve"] = [row[0] for row in curve]
            results.add(**key, method=name, **more)


def splits(args, results: Results, dataset: str, kind: str, task: str) -> None:
    """Paired random splits: ``pairs`` for pair log-likelihoods, ``sizes`` for accuracy."""
    data, hood = load(args, dataset)
    val, ratios = (0.1, (0.2, 0.4, 0.6)) if task == "pairs" else (0.2, (0.1, 0.2, 0.3, 0.4, 0.5))
    ratios = ratios[:1] if args.smoke else ratios
    criterion = "likelihood" if task == "pairs" else "accuracy"
    settings, calibrated = DEFAULT | DEFAULT_NMM | DEFAULT_AGREEMENT, {}
    # Splits 0 to 4 served to choose the priors of StackedNMM and the defaults above.
    for seed, ratio, method in itertools.product(
        range(10, 10 + args.num_splits), ratios, args.methods
    ):
        key = {"task": task, "dataset": dataset, "backbone": kind, "ratio": ratio, "seed": seed}
        if results.has(**key, method=method):
            continue
        part = random_split(data, ratio, val, 0.3, seed)
        pairs = inner_edges(part.edge_index, part.test_mask) if task == "pairs" else None
        run = partial(fit, kind=kind, data=part, hood=hood, settings=settings, seed=seed, args=args,
                      criterion=criterion)  # fmt: skip
        fitted = None
        if pairs is not None and calibrated.get("of") != (seed, ratio):
            scores, _ = run("backbone")
            temperature = temperature_scaling(scores, part.y, part.val_mask)
            calibrated = {"of": (seed, ratio), "probs": (scores / temperature).softmax(-1)}
            fitted = scores if method == "backbone" else None
        fitted = run(method)[0] if fitted is None else fitted
        for name, model, fit_seconds in reversed(list(variants(method, fitted, hood, part))):
            more = evaluate(model, part, pairs, temperature=calibrated.get("probs"))
            results.add(**key, method=name, **more, **{"fit seconds": fit_seconds})


def main(args) -> Results:
    torch.set_num_threads(args.num_threads)
    pyro.enable_validation(False)
    if args.smoke:
        args.datasets, args.backbones, args.num_epochs = ["digits"], ["gcn"], 3
        args.num_trials = args.num_seeds = args.num_splits = 1
    results = Results(args.results)
    for task, dataset, kind in itertools.product(args.tasks, args.datasets, args.backbones):
        if task in ("pairs", "sizes"):
            splits(args, results, dataset, kind, task)
        else:
            run = {"search": search, "accuracy": accuracy, "deviations": deviations}[task]
            run(args, results, dataset, kind)
    return results


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tasks", nargs="+", choices=TASKS)
    parser.add_argument("--datasets", nargs="+", default=["cora", "citeseer", "pubmed"])
    parser.add_argument(
        "--backbones", nargs="+", default=["gcn", "gat", "appnp"], choices=BACKBONES
    )
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--searched", nargs="+", choices=SEARCHED,
                        default=["backbone", "NMM + agreement"])  # fmt: skip
    parser.add_argument("--settings-of", choices=SEARCHED, help="of accuracy: whose search")
    parser.add_argument("--num-epochs", type=int, default=400)
    parser.add_argument("--num-trials", type=int, default=12)
    parser.add_argument("--num-seeds", type=int, default=10)
    parser.add_argument("--num-splits", type=int, default=5)
    parser.add_argument("--num-threads", type=int, default=1)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--smoke", action="store_true", help="a minute on the digits")
    return parser


if __name__ == "__main__":
    main(parser().parse_args())
