# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
Link prediction with DGLFRM, its original guide and the NMM's: the paper's table 5 and figure 5.

    python benchmarks/links.py \\
        reproduce search compare memberships katz cost --data-root F

Tasks: ``reproduce`` (the original guide on the authors' splits of Cora, with their settings),
``search`` (the model's and the network's settings by the original guide's average precision on
validation links, then the NMM's estimator and start by its bound), ``compare`` (both guides, same
settings, paired random splits, others than those of the search), ``memberships`` (links predicted
with other nodes' memberships), ``katz`` (links predicted by counting walks, on the same splits) and
``cost`` (seconds and memory of a step). F holds ``nips12/nips12.mat``, ``yeast/yeast.mat``,
``linkpred_splits/cora/split_0.npz`` and what PyG's Planetoid needs. Each fit appends one line to
``--results``, and what is there already is not run again, so a run may be interrupted.
``benchmarks/report.py`` makes the tables and the figure.
"""

from __future__ import annotations

import itertools
import time
from argparse import ArgumentParser
from functools import partial
from pathlib import Path
from statistics import mean

import common
import pyro
import torch
from common import RESULTS, Records, arguments, start
from pyro import poutine
from pyro.infer import TraceMeanField_ELBO
from references import katz_index, walks
from sklearn.metrics import average_precision_score, roc_auc_score
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.datasets import KarateClub

from pyro_nmm import NeighborChoice, Neighborhood
from pyro_nmm.datasets.links import LinkSplit, link_graph, link_split, published_split
from pyro_nmm.guides import DGLFRMGuide, fit_links
from pyro_nmm.guides.shared_forward import evaluation
from pyro_nmm.models import DGLFRM
from pyro_nmm.sparse import identity

DATASETS = ["nips12", "yeast", "cora", "citeseer", "pubmed"]
GUIDES = ["original", "nmm"]
#: The authors' settings (nikhil-dce/SBM-meet-GNN, run_expr.sh); Yeast's as those of NIPS12.
CITATIONS = {"hidden": 32, "decoder": [32, 16], "num_communities": 50, "concentration": 10.0}
NETWORKS = {"hidden": 128, "decoder": [64, 32], "num_communities": 100, "concentration": 40.0}
#: Of the NMM: estimators, and attention that starts uniform or mostly at the node itself.
CHOICES = ({"estimator": "local"}, {"estimator": "linear"}, {"estimator": "local", "gamma": 3.0})


def candidates(dataset: str) -> list[dict]:
    """The authors' settings, with less dropout, and with twice the width."""
    first = NETWORKS if dataset in ("nips12", "yeast") else CITATIONS
    first = first | {"dropout": 0.5}
    large = {name: 2 * first[name] for name in ("hidden", "num_communities")}
    large["decoder"] = [2 * width for width in first["decoder"]]
    changes = [{}, {"dropout": 0.25}, {"dropout": 0.0}, large, large | {"dropout": 0.25}]
    return [first | change for change in changes]


def chosen(rows: list[dict], dataset: str, guide: str) -> dict:
    """
    The best settings by their mean over the splits of the search: the original guide's by average
    precision, the NMM's by its bound. PubMed has Cora's.
    """

    def quality(trial: list[dict]) -> float:
        return mean(row["val"]["AP"] if guide == "original" else -row["loss"] for row in trial)

    dataset = "cora" if dataset == "pubmed" else dataset
    return common.chosen(rows, quality, dataset=dataset, guide=guide)


def load(args, dataset: str) -> Data:
    if args.smoke:
        graph = KarateClub()[0]
        data = Data(x=identity(34), edge_index=graph.edge_index, num_nodes=34, has_features=False)
    else:
        data = link_graph(dataset, args.data_root)
    return data.to(args.device)


def build(data: Data, split: LinkSplit, guide: str, settings: dict, seed: int) -> DGLFRMGuide:
    """Both guides start from the same weights."""
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    target = DGLFRM(
        data.num_nodes, settings["num_communities"],
        data.num_features if data.has_features else 0,
        hidden=tuple(settings["decoder"]), concentration=settings["concentration"],
        name=f"{guide} model",
    )  # fmt: skip
    hood = None if guide == "original" else Neighborhood(split.train, data.num_nodes)
    names = {"estimator", "gamma", "own_attention", "width"} & settings.keys()
    return DGLFRMGuide(
        target, data.num_features, hood, hidden=settings["hidden"], dropout=settings["dropout"],
        name=f"{guide} guide", **{name: settings[name] for name in names},
    ).to(data.edge_index.device)  # fmt: skip


def scores(pair: DGLFRMGuide, data: Data, split: LinkSplit, part: str, num_samples: int) -> dict:
    """In percent."""
    tested, count = held_out(split, part)
    return precision(pair.link_logits(tested, split.train, data.x, num_samples).cpu(), count)


def held_out(split: LinkSplit, part: str) -> tuple[Tensor, int]:
    """Pairs ``(2, P)`` of ``"val"`` or ``"test"``, links first, and how many links."""
    true, false = getattr(split, part), getattr(split, part + "_false")
    return torch.cat([true, false], 1), true.shape[1]


def precision(ranks: Tensor, count: int) -> dict:
    """In percent; the first ``count`` of the ranked pairs are links."""
    labels = torch.arange(len(ranks)) < count
    scores = average_precision_score(labels, ranks), roc_auc_score(labels, ranks)
    return {name: 100 * float(score) for name, score in zip(("AP", "AUC"), scores, strict=True)}


def loss(pair: DGLFRMGuide, data: Data, split: LinkSplit, num_draws: int = 20) -> float:
    """The negative bound in nats a pair of nodes, without the network's dropout."""
    inputs = pair.model, pair.guide, split.train, data.x, split.held_out
    with evaluation(pair):
        draws = [TraceMeanField_ELBO().loss(*inputs) for _ in range(num_draws)]
    return mean(draws) / data.num_nodes**2


def fit(args, data: Data, split: LinkSplit, guide: str, settings: dict, seed: int):
    """The fitted pair, with the row that is kept of it."""
    pair = build(data, split, guide, settings, seed)
    began = time.perf_counter()
    curve = fit_links(pair, split, data.x, num_steps=args.num_steps)
    seconds = (time.perf_counter() - began) / len(curve)
    means = [mean(curve[i : i + 10]) for i in range(0, len(curve), 10)]
    row = {"settings": settings, "loss in training": mean(means[-5:])}
    return pair, row | {"loss": loss(pair, data, split), "seconds": seconds, "curve": means}


def split_of(args, data: Data, seed: int) -> LinkSplit:
    return link_split(data.edge_index, data.num_nodes, seed).to(args.device)


def reproduce(args, results: Records, dataset: str) -> None:
    """The authors' settings on their splits of Cora, three seeds each."""
    if dataset != "cora" and not args.smoke:
        return
    data = load(args, dataset)
    for key in results.missing(task="reproduce", dataset=dataset, split=(0, 1), seed=range(3)):
        if args.smoke:
            split = split_of(args, data, key["split"])
        else:
            path = args.data_root / "linkpred_splits" / dataset / f"split_{key['split']}.npz"
            split = published_split(path, data.num_nodes).to(args.device)
        pair, row = fit(args, data, split, "original", candidates(dataset)[0], key["seed"])
        results.add(**key, **row, test=scores(pair, data, split, "test", 15))


def search(args, results: Records, dataset: str) -> None:
    if dataset == "pubmed":  # A fit takes a quarter of an hour.
        return
    data = load(args, dataset)
    for guide in GUIDES:
        trials = candidates(dataset)[: args.num_trials]
        if guide == "nmm":
            shared = chosen(results.rows, dataset, "original")
            trials = [shared | choice for choice in CHOICES]
        each = {"trial": range(len(trials)), "seed": range(args.num_searched)}
        for key in results.missing(task="search", dataset=dataset, guide=guide, **each):
            split = split_of(args, data, key["seed"])
            pair, row = fit(args, data, split, guide, trials[key["trial"]], key["seed"])
            del row["curve"]
            results.add(**key, **row, val=scores(pair, data, split, "val", args.num_samples))


def compared(args, dataset: str) -> range:
    """Seeds of splits on which no settings were chosen; PubMed's were on Cora."""
    if dataset == "pubmed":
        return range(min(args.num_splits, 5))
    return range(args.num_searched, args.num_searched + args.num_splits)


def compare(args, results: Records, dataset: str) -> None:
    data = load(args, dataset)
    for seed, guide in itertools.product(compared(args, dataset), GUIDES):
        settings = chosen(results.rows, dataset, guide)
        key = {"task": "compare", "dataset": dataset, "guide": guide, "seed": seed}
        if not results.has(**key, settings=settings):
            results.add(**key, **measure(args, data, guide, settings, seed))


def measure(args, data: Data, guide: str, settings: dict, seed: int) -> dict:
    """The row of a fit, with its scores."""
    split = split_of(args, data, seed)
    pair, row = fit(args, data, split, guide, settings, seed)
    parts = ("val", "test")
    return row | {part: scores(pair, data, split, part, args.num_samples) for part in parts}


@torch.no_grad()
def memberships(args, results: Records, dataset: str) -> None:
    """
    What the memberships say of the links: average precision of the original guide, fitted, with
    every node's own memberships, with those of a random neighbour or itself, and of any node.
    """
    data = load(args, dataset)
    for key in results.missing(task="memberships", dataset=dataset, seed=range(args.num_searched)):
        split = split_of(args, data, key["seed"])
        settings = chosen(results.rows, dataset, "original")
        with torch.enable_grad():
            pair, _ = fit(args, data, split, "original", settings, key["seed"])
        pair.eval()
        hood = Neighborhood(split.train, data.num_nodes)
        neighbors = NeighborChoice(hood, torch.zeros(hood.num_edges, device=hood.device))
        everyone = torch.arange(data.num_nodes, device=hood.device)
        donors = {"own": lambda own=everyone: own, "a neighbour's": neighbors.sample}
        donors["anyone's"] = lambda own=everyone: own[torch.randperm(len(own))]
        (tested, count), found = held_out(split, "test"), {}
        for name, draw in donors.items():
            logits = torch.zeros(tested.shape[1])
            for _ in range(args.num_samples):
                sites = poutine.trace(pair.guide).get_trace(split.train, data.x).nodes
                members = (sites["s"]["value"][draw()] > 0) * sites["r"]["value"]
                logits += pair.target.link_logits(members, tested).cpu()
            found[name] = precision(logits, count)["AP"]
        results.add(**key, AP=found)


def katz(args, results: Records, dataset: str) -> None:
    """A reference without any model: Katz's index, its discount chosen on validation links."""
    data = load(args, dataset)
    for key in results.missing(task="katz", dataset=dataset, seed=compared(args, dataset)):
        split, counted = split_of(args, data, key["seed"]), {}
        for part in ("val", "test"):
            tested, count = held_out(split, part)
            counted[part] = walks(split.train, data.num_nodes, tested).cpu(), count

        def score(part: str, discount: float, counted=counted) -> dict:
            return precision(katz_index(counted[part][0], discount), counted[part][1])

        best = max((0.1, 0.03, 0.01, 0.003, 0.001), key=lambda d: score("val", d)["AP"])
        sizes = [split.train.shape[1] // 2, counted["val"][1], counted["test"][1]]
        results.add(**key, discount=best, sizes=sizes, test=score("test", best))


def cost(args, results: Records, dataset: str) -> None:
    """Seconds of a step, the guides in turn, and the process's peak memory under each."""
    if results.has(task="cost", dataset=dataset):
        return
    data = load(args, dataset)
    split = split_of(args, data, 0)
    settings = chosen(results.rows, dataset, "nmm")
    # The NMM's steps differ: every other one, at random, compares neighbours.
    block = 2 if args.smoke else 10

    def run(pair: DGLFRMGuide) -> float:
        began = time.perf_counter()
        fit_links(pair, split, data.x, num_steps=block)
        return (time.perf_counter() - began) / block

    def maker(guide: str):
        return lambda: partial(run, build(data, split, guide, settings, 0))

    row = common.cost({guide: maker(guide) for guide in GUIDES}, 3 if args.smoke else 8)
    results.add(task="cost", dataset=dataset, **row, settings=settings)


TASKS = {task.__name__: task for task in (reproduce, search, compare, memberships, katz, cost)}


def main(args) -> Records:
    start(args.num_threads)
    if args.smoke:
        args.datasets, args.num_trials, args.num_searched = ["nips12"], 2, 1
        args.num_splits, args.num_steps = 3, 3
    return common.run(args, TASKS, args.datasets)


def parser() -> ArgumentParser:
    return arguments(
        __doc__, TASKS, "seconds, on the karate club", {"datasets": DATASETS}, datasets=DATASETS,
        num_trials=(5, "candidates of the search"), num_searched=(2, "splits of the search"),
        num_splits=(10, "compared; PubMed at most 5"), num_samples=(100, "memberships at the test"),
        num_steps=500, num_threads=1, results=RESULTS / "links.jsonl", data_root=Path, device="cpu",
    )  # fmt: skip


if __name__ == "__main__":
    main(parser().parse_args())
