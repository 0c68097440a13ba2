# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Node classification, also of heterophilous graphs. README.md explains the tasks."""

from collections.abc import Iterator
from functools import partial
from itertools import groupby, product
from pathlib import Path

import pyro
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.utils import to_torch_csr_tensor

from benchmarks import on_top
from benchmarks.nodes import fits
from benchmarks.nodes.fits import DEFAULT, calibrated, chosen, evaluate, fit, load, stack
from benchmarks.nodes.spn import measure
from benchmarks.shared.graphs import inner_edges
from benchmarks.shared.records import RESULTS, Records, command
from benchmarks.shared.timing import timed
from pyro_nmm import Neighborhood, NeighborMixture
from pyro_nmm.datasets import random_split
from pyro_nmm.guides import Chains
from pyro_nmm.models import Compatibility, compatibility

RELABELLED = ["backbone", "stacked", "stacked, relabelled", "NMM", "NMM, relabelled"]
SETTINGS = DEFAULT | {"num_epochs": 200, "criterion": "likelihood", "patience": 50}
MANY_EDGES = 10**6  # with more a GCN multiplies by a sparse matrix


def fitted(key: dict, data: Data, hood: Neighborhood, scores: Tensor):
    """Marginals or a mixture."""
    pyro.set_rng_seed(key["seed"])
    relabels, classes = "relabelled" in key["method"], scores.shape[1]
    if key["method"] == "backbone":
        return calibrated(scores, data)
    if "stacked" in key["method"]:
        matrix = compatibility(hood, data.y, data.train_mask, classes) if relabels else None
        return stack(hood, scores, data, compatibility=matrix)

    def wrap(network: nn.Module) -> nn.Module:
        """GCNs of a dense graph multiply by a sparse matrix, several times as fast as messages."""
        if data.num_edges > MANY_EDGES:
            adjacency = to_torch_csr_tensor(data.edge_index, size=(data.num_nodes, data.num_nodes))
            network.register_forward_pre_hook(lambda _, given: (*given[:-1], adjacency))
        return Compatibility(network, classes) if relabels else network

    return fit(key, data, hood, SETTINGS, wrap)[0]


def graphs(args, results: Records) -> None:
    for name, split in product(args.datasets, range(args.num_splits)):
        data, hood = on_top.load(name, split, 0, args.data_root)
        each = {"dataset": name, "split": split, "backbone": args.backbones, "method": RELABELLED}
        every, pairs = results.missing(task="graphs", **each), on_top.some_pairs(data, split)
        for kind, keys in groupby(every, lambda key: key["backbone"]):
            first = {"method": "backbone", "backbone": kind, "seed": split}
            scores, _ = fit(first, data, hood, SETTINGS)
            for key in keys:
                model = fitted(first | key, data, hood, scores)
                results.add(**key, **evaluate(model, data, pairs, joint=True))


#: The paper's backbone and NMM; "+ consistency" also learns from unlabelled nodes.
METHODS = ["backbone", "NMM", "backbone + consistency", "NMM + consistency"]
#: Methods whose settings are searched, and methods that take the settings of another one.
SEARCHED = ["backbone", "NMM + consistency"]
SIBLING = {"NMM": "backbone", "backbone + consistency": "NMM + consistency"}
PAPER = DEFAULT | {"floor": 1.0, "gamma": 0.0, "weight_decay": 0.005, "num_epochs": 200}
#: Of our recipe, by choices of the paper and others; then the paper's whole recipe.
CHANGES: dict[str, dict] = {"none": {}}
CHANGES |= {f"link {k} + 1": {"link": k, "floor": 1.0} for k in ("softplus", "square", "exp")}
CHANGES |= {"gamma 0": {"gamma": 0.0}, "200 epochs": {"num_epochs": 200}}
CHANGES |= {"weight decay .005": {"weight_decay": 0.005}}
CHANGES |= {"estimator no_score": {"estimator": "no_score"}}
for _end, _rate in {"": 0.01, ", lr .05": 0.05}.items():
    _paper = PAPER | {"lr": _rate}
    CHANGES |= {f"paper's, {k} + 1{_end}": _paper | {"link": k} for k in ("softplus", "square")}


def cases(args, results: Records, task: str, base: str = "", **each) -> Iterator[tuple]:
    """Fits of ``base``, or of the method before a comma, with the keys of rows that need them."""
    every = results.missing(task=task, dataset=args.datasets, backbone=args.backbones, **each)
    for key, keys in groupby(every, lambda r: r | {"method": base or r["method"].split(",")[0]}):
        data, hood = load(key["dataset"], args.data_root)
        if "trial" in key:
            settings = fits.random_settings(key["method"], key["dataset"], key["trial"])
        elif "ratio" in key:
            val, criterion = (0.2, "accuracy") if task == "sizes" else (0.1, "likelihood")
            data = random_split(data, key["ratio"], val, 0.3, key["seed"])
            settings = DEFAULT | {"criterion": criterion}
        else:
            method = SIBLING.get(key["method"], key["method"])
            place = {name: key[name] for name in ("dataset", "backbone")}
            settings = chosen(results.rows, **place, method=method)
        yield key, keys, data, hood, settings


def add(results: Records, key: dict, fitted, data, hood, **options) -> None:
    """Add rows of StackedNMM and temperature scaling on a fit, then of the fit itself."""
    mixes = isinstance(fitted, NeighborMixture)
    scores = fitted.alpha.log() if mixes else fitted
    stacked, seconds = timed(stack, hood, scores, data)
    models = [(", stacked", stacked, {"fit seconds": seconds})]
    models += [] if mixes else [(", temperature", calibrated(scores, data), {})]
    models += [("", fitted if mixes else scores.softmax(-1), {})]
    # The row of the fit comes last, because an interrupted run repeats a fit without it.
    for ending, model, more in models:
        row = evaluate(model, data, **options) | more
        results.add(**key | {"method": key["method"] + ending}, **row)


def search(args, results: Records) -> None:
    each = {"method": SEARCHED, "trial": range(args.num_trials), "seed": (100, 101)}
    for key, _, data, hood, settings in cases(args, results, "search", **each):
        fitted, _ = fit(key, data, hood, settings)
        model = fitted if "NMM" in key["method"] else fitted.softmax(-1)
        results.add(**key, settings=settings, **evaluate(model, data))


def accuracy(args, results: Records) -> None:
    each = {"seed": range(args.num_seeds), "method": args.methods}
    for key, _, data, hood, settings in cases(args, results, "accuracy", **each):
        add(results, key, fit(key, data, hood, settings)[0], data, hood, joint=True)


def pairs(args, results: Records, task: str = "pairs") -> None:
    # Splits 0 to 4 chose the priors of StackedNMM and the default settings.
    each = {"seed": range(10, 10 + args.num_splits), "ratio": args.ratios, "method": args.methods}
    for first, keys, data, hood, settings in cases(args, results, task, "backbone", **each):
        scores, _ = fit(first, data, hood, settings)
        more = {}
        if task == "pairs":
            more["pairs"] = inner_edges(data.edge_index, data.test_mask)
        for key in keys:
            fitted = scores if key == first else fit(key, data, hood, settings)[0]
            add(results, key, fitted, data, hood, **more)


def sizes(args, results: Records) -> None:
    pairs(args, results, "sizes")


def deviations(args, results: Records) -> None:
    each = {"method": "NMM", "seed": range(args.num_seeds), "change": list(CHANGES)}
    for key, _, data, hood, settings in cases(args, results, "deviations", **each):
        mix, _ = fit(key, data, hood, settings | CHANGES[key["change"]])
        row = evaluate(mix, data, joint=True)
        # The paper's rule: test nodes in turn, each prediction observed by the next.
        test = data.test_mask.nonzero()[:, 0]
        posterior = mix.condition(data.y, data.train_mask, num_samples=16)
        hits = posterior.predict(test, method="sequential") == data.y[test]
        results.add(**key, **row, sequential=hits.double().mean().item())


def published(args, results: Records) -> None:
    """SPN on the splits and networks of benchmarks.on_top."""
    each = {"dataset": args.datasets, "backbone": args.backbones, "split": range(args.num_splits)}
    for key in results.missing(task="published", **each, fold=range(3), method="SPN"):
        data, _ = on_top.load(key["dataset"], key["split"], key["fold"], args.data_root)
        make = partial(on_top.network, key["backbone"], data.num_features)
        pyro.set_rng_seed(10 * key["split"] + key["fold"])
        measure(results, key, make, data, key["split"])


def random(args, results: Records) -> None:
    """SPN on the splits and networks of ``pairs``."""
    each = {"ratio": args.ratios, "seed": range(10, 10 + args.num_splits), "method": "SPN"}
    for key, _, data, _, _ in cases(args, results, "random", **each):
        pyro.set_rng_seed(key["seed"])
        measure(results, key, partial(fits.backbone, key["backbone"], data), data, key["seed"])


END_TO_END = DEFAULT | {"criterion": "likelihood", "num_epochs": 250}
TRAINED = ["backbone", "NMM, bound", "NMM, chains"]


def end_to_end(args, results: Records, task: str = "end_to_end", first: int = 10) -> None:
    """Backbones, and NMMs by the bound and by chains, with the same split and settings."""
    each = {"backbone": args.backbones, "attention": args.attentions, "gamma": args.gammas}
    each |= {"seed": range(first, first + args.num_seeds), "dataset": args.datasets}
    each |= {"ratio": [None, *args.ratios] if first else args.ratios, "method": TRAINED}
    for key in results.missing(task=task, **each):
        data, hood = load(key["dataset"], args.data_root)
        if "ratio" in key:
            data = random_split(data, key["ratio"], 0.2, 0.3, key["seed"])
        settings = END_TO_END | {"attention": key["attention"], "gamma": key["gamma"]}
        if key["method"] == "NMM, chains":
            settings["estimator"] = Chains(1)
        (fitted, curve), seconds = timed(fit, key, data, hood, settings)
        if key["method"] == "backbone":
            add(results, key, fitted, data, hood)
        else:
            more = {"epochs": len(curve), "fit seconds": seconds}
            results.add(**key, **evaluate(fitted, data), **more)


CHOICES = {"backbones": fits.BACKBONES, "methods": METHODS}
CHOICES |= {"attentions": fits.BACKBONES}
OPTIONS = {"datasets": ["cora", "citeseer", "pubmed"], "backbones": ["gcn", "gat", "appnp"]}
OPTIONS |= {"methods": METHODS, "ratios": [0.2, 0.4, 0.6]}
OPTIONS |= {"attentions": (["gcn"], "backbones of the attention in `end_to_end`"), "gammas": [0.0]}
OPTIONS |= {"num_trials": 12, "num_seeds": 10, "num_splits": 5, "data_root": Path}
OPTIONS |= {"results": RESULTS / "nodes.jsonl", "choices": CHOICES}
TASKS = search, accuracy, pairs, sizes, deviations, published, random
main = command(__doc__, (*TASKS, graphs, end_to_end), **OPTIONS)

if __name__ == "__main__":
    main()
