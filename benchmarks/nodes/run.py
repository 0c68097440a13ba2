# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
Node classification on Cora, CiteSeer and PubMed.

    python -m benchmarks.nodes.run search accuracy --datasets cora --backbones gcn

Tasks: ``search`` (random settings; validation accuracy chooses), ``accuracy`` (public split, ten
seeds), ``pairs`` (log-likelihood of pairs of neighbours, random splits), ``sizes`` (shares of
training nodes), ``deviations`` (the paper's recipe, one change at a time), ``communities`` (as
sources of ``StackedNMM``) and ``predicted`` (labels one by one, in turn and jointly).
``accuracy --settings-of NMM`` takes the settings of ``search --searched NMM`` for all methods.
"""

from __future__ import annotations

from pathlib import Path

import pyro

from benchmarks.nodes import fits
from benchmarks.nodes.fits import DEFAULT, calibrated, chosen, evaluate, fit, load, variants
from benchmarks.nodes.predictions import predictions
from benchmarks.shared.louvain import louvain
from benchmarks.shared.records import RESULTS, Records, run
from benchmarks.shared.timing import timed
from pyro_nmm import sources
from pyro_nmm.datasets.nodes import inner_edges, random_split
from pyro_nmm.models import StackedNMM

#: The paper's backbone and NMM; "+ consistency" also learns from unlabelled nodes.
METHODS = ["backbone", "NMM", "backbone + consistency", "NMM + consistency"]
SEARCHED = ["backbone", "NMM", "NMM + consistency"]
#: Methods that take the settings of another method's search.
SIBLING = {"NMM": "backbone", "backbone + consistency": "NMM + consistency"}
#: Our recipe, beside the backbone's own settings.
OURS = {"link": "exp", "floor": 0.1, "gamma": 2.0, "num_epochs": 400}
PAPER = {"floor": 1.0, "gamma": 0.0, "weight_decay": 0.005, "dropout": 0.5, "lr": 0.01}
PAPER |= {"num_epochs": 200}
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


def missing(results: Records, args, task: str, **key):
    """Keys that have no row, each with its graph and neighbourhoods."""
    places = {"dataset": args.datasets, "backbone": args.backbones}
    for found in results.missing(task=task, **places, **key):
        yield found, *load(found["dataset"], args.data_root)


def searched(results: Records, key: dict, method: str = "backbone") -> dict:
    """Settings of a method's search on the same graph and backbone."""
    place = {name: key[name] for name in ("dataset", "backbone")}
    return chosen(results.rows, **place, method=method)


def search(args, results: Records) -> None:
    each = {"trial": range(args.num_trials), "seed": (100, 101)}
    for key, data, hood in missing(results, args, "search", method=args.searched, **each):
        settings = fits.random_settings(key["method"], key["dataset"], key["trial"])
        fitted, _ = fit(key, data, hood, settings, num_epochs=args.num_epochs)
        model = fitted if "NMM" in key["method"] else fitted.softmax(-1)
        results.add(**key, settings=settings, **evaluate(model, data))


def accuracy(args, results: Records) -> None:
    """The public split, with the settings that the searches chose."""
    each = {"method": args.methods, "settings of": args.settings_of}
    seeds = range(args.num_seeds)
    for key, data, hood in missing(results, args, "accuracy", seed=seeds, **each):
        method = key["method"]
        settings = searched(results, key, args.settings_of or SIBLING.get(method, method))
        found, seconds = timed(fit, key, data, hood, settings, num_epochs=args.num_epochs)
        fitted, curve = found
        for name, model, fit_seconds in variants(method, fitted, hood, data):
            more = evaluate(model, data, joint=True) | {"fit seconds": fit_seconds}
            if name == method:
                more |= {"settings": settings, "epochs": len(curve)}
                more["epoch seconds"] = seconds / len(curve)
                if key["seed"] == 0:
                    more["curve"] = [row[0] for row in curve]
            results.add(**key | {"method": name}, **more)


def pairs(args, results: Records) -> None:
    """Random splits whose validation nodes stop training by their likelihood."""
    splits(args, results, "pairs", 0.1, "likelihood")


def sizes(args, results: Records) -> None:
    """Random splits whose validation nodes stop training by their accuracy."""
    splits(args, results, "sizes", 0.2, "accuracy")


def splits(args, results: Records, task: str, val: float, criterion: str) -> None:
    # Splits 0 to 4 chose the priors of StackedNMM and the default settings.
    each = {"seed": range(10, 10 + args.num_splits), "ratio": args.ratios, "method": args.methods}
    options = {"criterion": criterion, "num_epochs": args.num_epochs}
    last, scores = {}, None
    for key, data, hood in missing(results, args, task, **each):
        part = random_split(data, key["ratio"], val, 0.3, key["seed"])
        near = probs = None
        if task == "pairs":
            near = inner_edges(part.edge_index, part.test_mask)
            if last != (last := key | {"method": "backbone"}):
                scores, _ = fit(last, part, hood, DEFAULT, **options)
            probs = calibrated(scores, part)
        fitted = scores if key == last else fit(key, part, hood, DEFAULT, **options)[0]
        for name, model, fit_seconds in variants(key["method"], fitted, hood, part):
            more = evaluate(model, part, near, temperature=probs)
            results.add(**key | {"method": name}, **more, **{"fit seconds": fit_seconds})


def deviations(args, results: Records) -> None:
    """The public split, with one change of our recipe, then with the paper's whole recipe."""
    each = {"method": "NMM", "seed": range(args.num_seeds), "change": list(CHANGES)}
    for key, data, hood in missing(results, args, "deviations", **each):
        settings = searched(results, key) | OURS | CHANGES[key["change"]]
        settings["num_epochs"] = min(settings["num_epochs"], args.num_epochs)
        mix, curve = fit(key, data, hood, settings)
        row = evaluate(mix, data, joint=True)
        # The paper's rule: test nodes in turn, each prediction observed by the next.
        test = data.test_mask.nonzero().flatten()
        posterior = mix.condition(data.y, data.train_mask, num_samples=16)
        hits = posterior.predict(test, method="sequential") == data.y[test]
        row["sequential"] = hits.double().mean().item()
        results.add(**key, **row, settings=settings, epochs=len(curve))


def communities(args, results: Records) -> None:
    """StackedNMM with Louvain's communities as sources and without, on one classifier."""
    kinds = [f"{kind} {r}" for kind in ("communities", "weighted") for r in args.resolutions]
    methods = [f"backbone, {name}" for name in ("temperature", "stacked", *kinds)]
    last = None
    for ratio, seeds in {None: range(args.num_seeds), 0.2: range(10, 10 + args.num_splits)}.items():
        each = {"ratio": ratio, "seed": seeds, "method": methods}
        for key, data, hood in missing(results, args, "communities", **each):
            options = {"num_epochs": args.num_epochs}
            if ratio:
                data = random_split(data, ratio, 0.1, 0.3, key["seed"])
                options["criterion"] = "likelihood"
            if last != (last := key | {"method": "backbone"}):
                settings = DEFAULT if ratio else searched(results, key)
                scores, _ = fit(last, data, hood, settings, **options)
                tempered = calibrated(scores, data)
            model, more = tempered, {}
            kind, *resolution = key["method"].split(", ")[1].split()
            if resolution:
                groups = louvain(
                    data, float(resolution[0]), tempered if kind == "weighted" else None
                )
                hood = sources.communities(data.edge_index, data.num_nodes, groups)
            if kind != "temperature":
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
    """Labels that mixtures predict on the public split by each rule."""
    methods = ["NMM", "backbone, stacked", "backbone, pooled"]
    each = {"seed": range(args.num_seeds), "method": methods}
    last = None
    for key, data, hood in missing(results, args, "predicted", **each):
        first, _, kind = key["method"].partition(", ")
        if last != (last := key | {"method": first}):
            fitted, _ = fit(last, data, hood, searched(results, key), num_epochs=args.num_epochs)
        mix, known = fitted, (data.y, data.train_mask)
        if kind:
            pool = kind == "pooled"
            stacked = StackedNMM(fitted.shape[1] if pool else None, pool=pool)
            stacked.fit(hood, fitted, *known, data.val_mask)
            mix = stacked.mixture(hood, fitted, *(known if pool else ()))
        results.add(**key, rules=predictions(mix, data, key["seed"]))


def main(argv: list[str] | None = None) -> Records:
    options = {"datasets": ["cora", "citeseer", "pubmed"], "backbones": ["gcn", "gat", "appnp"]}
    options |= {"methods": METHODS, "searched": ["backbone", "NMM + consistency"]}
    options |= {"settings_of": (str, "whose search `accuracy` takes"), "ratios": [0.2, 0.4, 0.6]}
    options |= {"num_epochs": 400, "num_trials": 12, "num_seeds": 10, "num_splits": 5}
    options |= {"resolutions": [1.0, 4.0, 8.0], "data_root": Path}
    choices = {"backbones": fits.BACKBONES, "methods": METHODS}
    choices |= {"searched": SEARCHED, "settings_of": SEARCHED}
    tasks = search, accuracy, pairs, sizes, deviations, communities, predicted
    return run(argv, __doc__, tasks, choices=choices, results=RESULTS / "nodes.jsonl", **options)


if __name__ == "__main__":
    main()
