# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
Node classification: the paper's tables 2 and 3, its accuracy over training sizes, and more.

    python benchmarks/nodes.py search accuracy --datasets cora --backbones gcn

Tasks: ``search`` (random settings, kept for the others, chosen by validation accuracy),
``accuracy`` (public split, 10 seeds), ``pairs`` (pair log-likelihood, random splits), ``sizes``
(accuracy against the share of training nodes), ``deviations`` (from the paper's recipe, one
change at a time), ``communities`` (as sources of StackedNMM, public and random splits) and
``predicted`` (labels one by one, in turn and jointly). All of it takes a day on two cores.
``search --searched NMM`` draws settings for an NMM of its own, and ``accuracy --settings-of NMM``
gives them to it and to its backbone.
"""

from __future__ import annotations

from pathlib import Path
from statistics import mean

import pyro

from benchmarks.nodes.fits import (
    BACKBONES,
    DEFAULT,
    calibrated,
    evaluate,
    fit,
    load,
    random_settings,
    variants,
)
from benchmarks.nodes.predictions import predictions
from benchmarks.shared import common
from benchmarks.shared.common import RESULTS, Records, run
from benchmarks.shared.louvain import louvain
from benchmarks.shared.timing import timed
from pyro_nmm import sources
from pyro_nmm.datasets.nodes import inner_edges, random_split
from pyro_nmm.models import StackedNMM

#: "backbone" and "NMM" as in the paper; "+ consistency" lets unlabelled nodes teach. The two in
#: the middle are ablations, and take the settings of the one on the right.
SEARCHED = ["backbone", "NMM", "NMM + consistency"]
SIBLING = {"NMM": "backbone", "backbone + consistency": "NMM + consistency"}
METHODS = ["backbone", "NMM", "backbone + consistency", "NMM + consistency"]
#: Besides the backbone's own learning rate, weight decay and dropout, chosen by validation.
OURS = {"link": "exp", "floor": 0.1, "gamma": 2.0, "num_epochs": 400}
PAPER = {"floor": 1.0, "gamma": 0.0, "weight_decay": 0.005, "dropout": 0.5, "lr": 0.01}
PAPER |= {"num_epochs": 200}
#: What deviates. "none" is the row of the other tables.
CHANGES: dict[str, dict] = {
    "none": {},
    "link softplus + 1": {"link": "softplus", "floor": 1.0},
    "link square + 1": {"link": "square", "floor": 1.0},
    "link exp + 1": {"floor": 1.0},
    "gamma 0": {"gamma": 0.0},
    "200 epochs": {"num_epochs": 200},
    "weight decay .005": {"weight_decay": 0.005},
    "estimator one_step_credit": {"estimator": "one_step_credit"},
    "estimator no_score": {"estimator": "no_score"},
    "paper's, softplus + 1": PAPER | {"link": "softplus"},
    "paper's, square + 1": PAPER | {"link": "square"},
    "paper's, softplus + 1, lr .05": PAPER | {"link": "softplus", "lr": 0.05},
    "paper's, square + 1, lr .05": PAPER | {"link": "square", "lr": 0.05},
}


def chosen(rows: list[dict], **key) -> dict:
    """The settings of the best mean validation accuracy, then likelihood, in a search."""

    def quality(trial: list[dict]) -> tuple[float, float]:
        return mean(r["val"]["accuracy"] for r in trial), -mean(r["val"]["nll"] for r in trial)

    return DEFAULT | common.chosen(rows, quality, num_splits=2, **key)


def missing(results: Records, args, task: str, **key):
    """Keys that have no row, each with its graph."""
    places = {"dataset": args.datasets, "backbone": args.backbones}
    for found in results.missing(task=task, **places, **key):
        yield found, *load(found["dataset"], args.data_root, args.device)


def search(args, results: Records) -> None:
    each = {"trial": range(args.num_trials), "seed": (100, 101)}
    for key, data, hood in missing(results, args, "search", method=args.searched, **each):
        settings = random_settings(key["method"], key["dataset"], key["trial"])
        fitted, _ = fit(key, data, hood, settings, num_epochs=args.num_epochs)
        model = fitted if "NMM" in key["method"] else fitted.softmax(-1)
        results.add(**key, settings=settings, **evaluate(model, data))


def accuracy(args, results: Records) -> None:
    # "settings of" is absent from a row with the method's own search, or that of its sibling.
    each = {"method": args.methods, "settings of": args.settings_of}
    seeds = range(args.num_seeds)
    for key, data, hood in missing(results, args, "accuracy", seed=seeds, **each):
        searched = args.settings_of or SIBLING.get(key["method"], key["method"])
        place = {"dataset": key["dataset"], "backbone": key["backbone"]}
        settings = chosen(results.rows, **place, method=searched)
        found, seconds = timed(fit, key, data, hood, settings, num_epochs=args.num_epochs)
        fitted, curve = found
        for name, model, fit_seconds in variants(key["method"], fitted, hood, data):
            more = evaluate(model, data, joint=True) | {"fit seconds": fit_seconds}
            if name == key["method"]:
                more |= {"settings": settings, "epochs": len(curve)}
                more["epoch seconds"] = seconds / len(curve)
                if key["seed"] == 0:
                    more["curve"] = [row[0] for row in curve]
            results.add(**key | {"method": name}, **more)


def pairs(args, results: Records) -> None:
    """Paired random splits for pair log-likelihoods."""
    splits(args, results, "pairs", (0.2, 0.4, 0.6), val=0.1, criterion="likelihood")


def sizes(args, results: Records) -> None:
    """Paired random splits for accuracy."""
    splits(args, results, "sizes", (0.1, 0.2, 0.3, 0.4, 0.5), val=0.2, criterion="accuracy")


def splits(args, results, task: str, ratios: tuple, val: float, criterion: str) -> None:
    # Splits 0 to 4 served to choose the priors of StackedNMM and the default settings.
    each = {"seed": range(10, 10 + args.num_splits), "ratio": ratios[:1] if args.smoke else ratios}
    options = {"criterion": criterion, "num_epochs": args.num_epochs}
    last, scores = {}, None
    for key, data, hood in missing(results, args, task, **each, method=args.methods):
        part = random_split(data, key["ratio"], val, 0.3, key["seed"])
        known = part, hood, DEFAULT
        pairs = known_probs = None
        if task == "pairs":
            pairs = inner_edges(part.edge_index, part.test_mask)
            if last != (base := key | {"method": "backbone"}):
                last, (scores, _) = base, fit(base, *known, **options)
            known_probs = calibrated(scores, part)
        fitted = scores if key == last else fit(key, *known, **options)[0]
        for name, model, fit_seconds in variants(key["method"], fitted, hood, part):
            more = evaluate(model, part, pairs, temperature=known_probs)
            results.add(**key | {"method": name}, **more, **{"fit seconds": fit_seconds})


def deviations(args, results: Records) -> None:
    """The public split, with one thing of the recipe changed, then with the paper's whole one."""
    each = {"method": "NMM", "seed": range(args.num_seeds), "change": list(CHANGES)}
    for key, data, hood in missing(results, args, "deviations", **each):
        place = {"dataset": key["dataset"], "backbone": key["backbone"]}
        settings = chosen(results.rows, **place, method="backbone") | OURS | CHANGES[key["change"]]
        settings["num_epochs"] = min(settings["num_epochs"], args.num_epochs)
        mix, curve = fit(key, data, hood, settings)
        row = evaluate(mix, data, joint=True)
        # The paper's rule: one test node after another, each prediction a known label.
        test = data.test_mask.nonzero().flatten()
        posterior = mix.condition(data.y, data.train_mask, num_samples=16)
        hits = posterior.predict(test, method="sequential") == data.y[test]
        row["sequential"] = hits.double().mean().item()
        results.add(**key, **row, settings=settings, epochs=len(curve))


def communities(args, results: Records) -> None:
    """StackedNMM with Louvain's communities and without, on one trained classifier."""
    kinds = [f"{kind} {r}" for kind in ("communities", "weighted") for r in args.resolutions]
    methods = [f"backbone, {name}" for name in ("temperature", "stacked", *kinds)]
    last = None
    for ratio, seeds in {None: range(args.num_seeds), 0.2: range(10, 10 + args.num_splits)}.items():
        each = {"ratio": ratio, "seed": seeds, "method": methods}
        for key, data, hood in missing(results, args, "communities", **each):
            settings, options = DEFAULT, {"criterion": "likelihood"}
            if ratio is None:
                place = {"dataset": key["dataset"], "backbone": key["backbone"]}
                settings, options = chosen(results.rows, **place, method="backbone"), {}
            else:
                data = random_split(data, ratio, 0.1, 0.3, key["seed"])
            if last != (last := key | {"method": "backbone"}):
                scores, _ = fit(last, data, hood, settings, num_epochs=args.num_epochs, **options)
                tempered = calibrated(scores, data)
            model, more = tempered, {}
            kind, *resolution = key["method"].split(", ")[1].split()
            if kind != "temperature":
                for text in resolution:
                    weights = tempered if kind == "weighted" else None
                    groups = louvain(data, float(text), weights)
                    hood = sources.communities(data.edge_index, data.num_nodes, groups)
                pyro.set_rng_seed(key["seed"])
                stacked = StackedNMM(pool=False, communities=hood.bipartite)
                stacked.fit(hood, scores, data.y, data.train_mask, data.val_mask)
                model = stacked.mixture(hood, scores)
                seen = model.log_likelihood(data.y, data.val_mask, data.train_mask, 64)
                more["val joint"] = seen.item() / int(data.val_mask.sum())
                more["numbers"] = {name: p.item() for name, p in stacked.named_parameters()}
            near = inner_edges(data.edge_index, data.test_mask)
            results.add(**key, **evaluate(model, data, near, True, tempered), **more)


def predicted(args, results: Records) -> None:
    """What mixtures of the public split predict by each rule, and how probable that is to them."""
    each = {
        "seed": range(args.num_seeds),
        "method": ["NMM", "backbone, stacked", "backbone, pooled"],
    }
    last = None
    for key, data, hood in missing(results, args, "predicted", **each):
        first = key | {"method": key["method"].split(",")[0]}
        if last != (last := first):
            place = {"dataset": key["dataset"], "backbone": key["backbone"]}
            settings = chosen(results.rows, **place, method="backbone")
            fitted, _ = fit(first, data, hood, settings, num_epochs=args.num_epochs)
        known = data.y, data.train_mask
        mix = fitted
        if key["method"] != "NMM":
            pool = "pooled" in key["method"]
            stacked = StackedNMM(fitted.shape[1] if pool else None, pool=pool)
            stacked.fit(hood, fitted, *known, data.val_mask)
            mix = stacked.mixture(hood, fitted, *(known if pool else ()))
        results.add(**key, rules=predictions(mix, data, key["seed"]))


def main(argv: list[str] | None = None) -> Records:
    smoke = {"datasets": ["digits"], "backbones": ["gcn"], "num_epochs": 3}
    smoke |= dict.fromkeys(("num_trials", "num_seeds", "num_splits"), 1)
    smoke["resolutions"] = [1.0]
    choices = {"backbones": BACKBONES, "methods": METHODS}
    return run(
        argv, __doc__, (search, accuracy, pairs, sizes, deviations, communities, predicted),
        smoke=smoke,
        choices=choices | {"searched": SEARCHED, "settings_of": SEARCHED},
        datasets=["cora", "citeseer", "pubmed"], backbones=["gcn", "gat", "appnp"],
        methods=METHODS, searched=["backbone", "NMM + consistency"],
        settings_of=(str, "of accuracy: whose search"), num_epochs=400, num_trials=12,
        num_seeds=10, num_splits=5, resolutions=[1.0, 4.0, 8.0], data_root=Path, device="cpu",
        results=RESULTS / "nodes.jsonl",
    )  # fmt: skip


if __name__ == "__main__":
    main()
