# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
Link prediction with DGLFRM, its original guide and the NMM's: the paper's table 5 and figure 5.

    python benchmarks/link_prediction.py \\
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

import argparse
import itertools
import statistics
import time
from functools import partial
from pathlib import Path

import pyro
import torch
from katz import katz_index, walks
from pyro import poutine
from pyro.infer import TraceMeanField_ELBO
from records import Records
from sklearn.metrics import average_precision_score, roc_auc_score
from speed import PeakMemory
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.datasets import KarateClub

from pyro_nmm import NeighborChoice, Neighborhood
from pyro_nmm.datasets.links import LinkSplit, link_graph, link_split, published_split
from pyro_nmm.guides import DGLFRMGuide, fit_links
from pyro_nmm.guides.shared_forward import evaluation
from pyro_nmm.models import DGLFRM
from pyro_nmm.sparse import identity

RESULTS = Path(__file__).parent / "results" / "link_prediction.jsonl"
DATASETS = ("nips12", "yeast", "cora", "citeseer", "pubmed")
GUIDES = ("original", "nmm")
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


class Results(Records):
    """Lines of a file, one for each fit."""

    def chosen(self, dataset: str, guide: str) -> dict:
        """The best settings, by their mean over the splits of the search; PubMed has Cora's."""
        dataset = "cora" if dataset == "pubmed" else dataset
        trials: dict[int, list[dict]] = {}
        for row in self.rows:
            if {"task": "search", "dataset": dataset, "guide": guide}.items() <= row.items():
                trials.setdefault(row["trial"], []).append(row)
        if not trials:
            raise ValueError(f"search has not been run for {dataset} and {guide}")

        def quality(trial: list[dict]) -> float:
            if guide == "original":
                return statistics.mean(row["val"]["AP"] for row in trial)
            return -statistics.mean(row["loss"] for row in trial)

        return max(trials.values(), key=quality)[0]["settings"]


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
    return {"AP": 100 * float(average_precision_score(labels, ranks)),
            "AUC": 100 * float(roc_auc_score(labels, ranks))}  # fmt: skip


def loss(pair: DGLFRMGuide, data: Data, split: LinkSplit, num_draws: int = 20) -> float:
    """The negative bound in nats a pair of nodes, without the network's dropout."""
    inputs = pair.model, pair.guide, split.train, data.x, split.held_out
    with evaluation(pair):
        draws = [TraceMeanField_ELBO().loss(*inputs) for _ in range(num_draws)]
    return statistics.mean(draws) / data.num_nodes**2


def fit(args, data: Data, split: LinkSplit, guide: str, settings: dict, seed: int):
    """The fitted pair, with the row that is kept of it."""
    pair = build(data, split, guide, settings, seed)
    start = time.perf_counter()
    curve = fit_links(pair, split, data.x, num_steps=args.num_steps)
    seconds = (time.perf_counter() - start) / len(curve)
    means = [statistics.mean(curve[i : i + 10]) for i in range(0, len(curve), 10)]
    row = {"settings": settings, "loss in training": statistics.mean(means[-5:]),
           "loss": loss(pair, data, split), "seconds": seconds, "curve": means}  # fmt: skip
    return pair, row


def reproduce(args, results: Results, dataset: str) -> None:
    """The authors' settings on their splits of Cora, three seeds each."""
    if dataset != "cora" and not args.smoke:
        return
    data = load(args, dataset)
    for number, seed in itertools.product((0, 1), range(3)):
        key = {"task": "reproduce", "dataset": dataset, "split": number, "seed": seed}
        if results.has(**key):
            continue
        if args.smoke:
            split = link_split(data.edge_index, data.num_nodes, number).to(args.device)
        else:
            path = args.data_root / "linkpred_splits" / dataset / f"split_{number}.npz"
            split = published_split(path, data.num_nodes).to(args.device)
        pair, row = fit(args, data, split, "original", candidates(dataset)[0], seed)
        results.add(**key, **row, test=scores(pair, data, split, "test", 15))


def search(args, results: Results, dataset: str) -> None:
    if dataset == "pubmed":  # A fit takes a quarter of an hour.
        return
    data = load(args, dataset)
    for guide in GUIDES:
        if guide == "original":
            trials = candidates(dataset)[: args.num_trials]
        else:
            shared = results.chosen(dataset, "original")
            trials = [shared | choice for choice in CHOICES]
        for trial, seed in itertools.product(range(len(trials)), range(args.num_searched)):
            key = {"task": "search", "dataset": dataset, "guide": guide, "trial": trial}
            if not results.has(**key, seed=seed):
                split = link_split(data.edge_index, data.num_nodes, seed).to(args.device)
                pair, row = fit(args, data, split, guide, trials[trial], seed)
                val = scores(pair, data, split, "val", args.num_samples)
                del row["curve"]
                results.add(**key, seed=seed, **row, val=val)


def compared(args, dataset: str) -> range:
    """Seeds of splits on which no settings were chosen; PubMed's were on Cora."""
    if dataset == "pubmed":
        return range(min(args.num_splits, 5))
    return range(args.num_searched, args.num_searched + args.num_splits)


def compare(args, results: Results, dataset: str) -> None:
    data = load(args, dataset)
    for seed, guide in itertools.product(compared(args, dataset), GUIDES):
        key = {"task": "compare", "dataset": dataset, "guide": guide, "seed": seed}
        settings = results.chosen(dataset, guide)
        if results.has(**key, settings=settings):
            continue
        split = link_split(data.edge_index, data.num_nodes, seed).to(args.device)
        pair, row = fit(args, data, split, guide, settings, seed)
        row |= {part: scores(pair, data, split, part, args.num_samples) for part in ("val", "test")}
        results.add(**key, **row)


@torch.no_grad()
def memberships(args, results: Results, dataset: str) -> None:
    """
    What the memberships say of the links: average precision of the original guide, fitted, with
    every node's own memberships, with those of a random neighbour or itself, and of any node.
    """
    data = load(args, dataset)
    for seed in range(args.num_searched):
        key = {"task": "memberships", "dataset": dataset, "seed": seed}
        if results.has(**key):
            continue
        split = link_split(data.edge_index, data.num_nodes, seed).to(args.device)
        with torch.enable_grad():
            pair, _ = fit(args, data, split, "original", results.chosen(dataset, "original"), seed)
        pair.eval()
        hood = Neighborhood(split.train, data.num_nodes)
        neighbors = NeighborChoice(hood, torch.zeros(hood.num_edges, device=hood.device))
        everyone = torch.arange(data.num_nodes, device=hood.device)
        donors = {"own": lambda own=everyone: own, "a neighbour's": neighbors.sample,
                  "anyone's": lambda own=everyone: own[torch.randperm(len(own))]}  # fmt: skip
        (tested, count), found = held_out(split, "test"), {}
        for name, draw in donors.items():
            logits = torch.zeros(tested.shape[1])
            for _ in range(args.num_samples):
                sites = poutine.trace(pair.guide).get_trace(split.train, data.x).nodes
                members = (sites["s"]["value"][draw()] > 0) * sites["r"]["value"]
                logits += pair.target.link_logits(members, tested).cpu()
            found[name] = precision(logits, count)["AP"]
        results.add(**key, AP=found)


def katz(args, results: Results, dataset: str) -> None:
    """A reference without any model: Katz's index, its discount chosen on validation links."""
    data = load(args, dataset)
    for seed in compared(args, dataset):
        key = {"task": "katz", "dataset": dataset, "seed": seed}
        if results.has(**key):
            continue
        split = link_split(data.edge_index, data.num_nodes, seed).to(args.device)
        counted = {}
        for part in ("val", "test"):
            tested, count = held_out(split, part)
            counted[part] = walks(split.train, data.num_nodes, tested).cpu(), count

        def score(part: str, discount: float, counted=counted) -> dict:
            return precision(katz_index(counted[part][0], discount), counted[part][1])

        best = max((0.1, 0.03, 0.01, 0.003, 0.001), key=lambda d: score("val", d)["AP"])
        sizes = [split.train.shape[1] // 2, counted["val"][1], counted["test"][1]]
        results.add(**key, discount=best, sizes=sizes, test=score("test", best))


def cost(args, results: Results, dataset: str) -> None:
    """Seconds of a step, the guides in turn, and the process's peak memory under each."""
    if results.has(task="cost", dataset=dataset):
        return
    data = load(args, dataset)
    split = link_split(data.edge_index, data.num_nodes, 0).to(args.device)
    settings = results.chosen(dataset, "nmm")
    # The NMM's steps differ: every other one, at random, compares neighbours.
    block = 2 if args.smoke else 10
    steps, memory, seconds = {}, {}, {guide: [] for guide in GUIDES}
    for guide in GUIDES:
        pair = build(data, split, guide, settings, 0)
        steps[guide] = partial(fit_links, pair, split, data.x, num_steps=block)
        steps[guide]()
        watcher = PeakMemory()
        steps[guide]()
        watcher.done.set()
        memory[guide] = watcher.peak / 2**20
    for _ in range(3 if args.smoke else 8):
        for guide, run in steps.items():
            start = time.perf_counter()
            run()
            seconds[guide].append((time.perf_counter() - start) / block)
    ratio = statistics.median(b / a for a, b in zip(*seconds.values(), strict=True))
    medians = {guide: statistics.median(times) for guide, times in seconds.items()}
    results.add(task="cost", dataset=dataset, ratio=ratio, MiB=memory, seconds=medians,
                settings=settings)  # fmt: skip


TASKS = {"reproduce": reproduce, "search": search, "compare": compare,
         "memberships": memberships, "katz": katz, "cost": cost}  # fmt: skip


def main(args) -> Results:
    torch.set_num_threads(args.num_threads)
    pyro.enable_validation(False)
    if args.smoke:
        args.datasets, args.num_trials, args.num_searched = ["nips12"], 2, 1
        args.num_splits, args.num_steps = 3, 3
    results = Results(args.results)
    for task, dataset in itertools.product(args.tasks, args.datasets):
        TASKS[task](args, results, dataset)
    return results


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tasks", nargs="+", choices=TASKS)
    parser.add_argument("--datasets", nargs="+", default=list(DATASETS), choices=DATASETS)
    parser.add_argument("--num-trials", type=int, default=5, help="candidates of the search")
    parser.add_argument("--num-searched", type=int, default=2, help="splits of the search")
    parser.add_argument("--num-splits", type=int, default=10, help="compared; PubMed at most 5")
    parser.add_argument("--num-samples", type=int, default=100, help="memberships at the test")
    parser.add_argument("--num-steps", type=int, default=500)
    parser.add_argument("--num-threads", type=int, default=1)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--smoke", action="store_true", help="seconds, on the karate club")
    return parser


if __name__ == "__main__":
    main(parser().parse_args())
