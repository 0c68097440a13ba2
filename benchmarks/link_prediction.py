# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
Link prediction with DGLFRM, its original guide and the NMM's: the paper's table 5 and figure 5.

    python benchmarks/link_prediction.py reproduce search compare cost --data-root FOLDER

Tasks: ``reproduce`` (the original guide on the authors' splits of Cora, with their settings),
``search`` (settings for each guide, by validation), ``compare`` (both guides with these on paired
random splits), ``cost`` (seconds and memory of a step). FOLDER holds ``nips12/nips12.mat``,
``yeast/yeast.mat``, ``linkpred_splits/cora/split_0.npz`` and what PyG's Planetoid needs. Each fit
appends one line to ``--results``, and what is there already is not run again, so a run may be
interrupted. ``benchmarks/report.py`` makes the tables and the figure.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import time
from functools import partial
from pathlib import Path

import pyro
import torch
from graphs import citation_like
from pyro.infer import TraceMeanField_ELBO
from sklearn.metrics import average_precision_score, roc_auc_score
from speed import PeakMemory
from torch_geometric.data import Data

from pyro_nmm import Neighborhood
from pyro_nmm.guides import DGLFRMGuide, fit_links
from pyro_nmm.links import LinkSplit, identity, link_graph, link_split, published_split
from pyro_nmm.models import DGLFRM

RESULTS = Path(__file__).parent / "results" / "link_prediction.jsonl"
DATASETS = ("nips12", "yeast", "cora", "citeseer", "pubmed")
GUIDES = ("original", "nmm")
#: The authors' settings (nikhil-dce/SBM-meet-GNN, run_expr.sh); Yeast's as those of NIPS12.
CITATIONS = {"hidden": 32, "decoder": (32, 16), "num_communities": 50, "concentration": 10.0}
NETWORKS = {"hidden": 128, "decoder": (64, 32), "num_communities": 100, "concentration": 40.0}
DEFAULT = {"dropout": 0.5, "num_steps": 500}
#: Steps at which a search looks at validation.
CHECKPOINTS = (500, 750, 1000)


def settings_of(dataset: str) -> dict:
    return DEFAULT | (NETWORKS if dataset in ("nips12", "yeast") else CITATIONS)


def random_settings(dataset: str, guide: str, rng: random.Random) -> dict:
    large = dataset in ("nips12", "yeast")
    pools = {
        "dropout": [0.0, 0.25, 0.5],
        "hidden": [128, 256] if large else [32, 64],
        "num_communities": [50, 100, 200] if large else [50, 100],
    }
    if guide == "nmm":
        pools |= {"estimator": ["local", "linear"], "gamma": [0.0, 2.0]}
    return {name: rng.choice(pool) for name, pool in pools.items()}


class Results:
    """Lines of a file, one for each fit."""

    def __init__(self, path: Path) -> None:
        self.path = path
        lines = path.read_text().splitlines() if path.exists() else []
        self.rows = [json.loads(line) for line in lines]

    def has(self, **key) -> bool:
        return any(key.items() <= row.items() for row in self.rows)

    def add(self, **row) -> None:
        self.rows.append(row)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print({k: v for k, v in row.items() if k != "curve"}, flush=True)

    def chosen(self, dataset: str, guide: str) -> dict:
        """The settings of the best mean average precision on validation links."""
        key = {"task": "search", "dataset": dataset, "guide": guide}
        trials: dict[tuple, list[dict]] = {}
        for row in self.rows:
            if key.items() <= row.items():
                trials.setdefault((row["trial"], row["num_steps"]), []).append(row)
        if not trials:
            raise ValueError(f"search has not been run for {dataset} and {guide}")
        (_, num_steps), best = max(
            trials.items(), key=lambda item: statistics.mean(r["val"]["AP"] for r in item[1])
        )
        return best[0]["settings"] | {"num_steps": num_steps}


def load(args, dataset: str) -> Data:
    if args.smoke:
        data = Data(edge_index=citation_like(60, 150), num_nodes=60, has_features=False)
        data.x = identity(60)
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
        hidden=settings["decoder"], concentration=settings["concentration"], name=f"{guide} model",
    )  # fmt: skip
    hood = None if guide == "original" else Neighborhood(split.train, data.num_nodes)
    options = {name: settings[name] for name in ("estimator", "gamma") if name in settings}
    return DGLFRMGuide(
        target, data.num_features, hood, hidden=settings["hidden"], dropout=settings["dropout"],
        name=f"{guide} guide", **options,
    ).to(data.edge_index.device)  # fmt: skip


def scores(pair: DGLFRMGuide, data: Data, split: LinkSplit, part: str, num_samples: int) -> dict:
    """In percent."""
    true, false = getattr(split, part), getattr(split, part + "_false")
    logits = pair.link_logits(torch.cat([true, false], 1), split.train, data.x, num_samples).cpu()
    labels = torch.arange(len(logits)) < true.shape[1]
    return {
        "AP": 100 * float(average_precision_score(labels, logits)),
        "AUC": 100 * float(roc_auc_score(labels, logits)),
    }


@torch.no_grad()
def loss(pair: DGLFRMGuide, data: Data, split: LinkSplit, num_draws: int = 20) -> float:
    """The negative bound in nats a pair of nodes, without the network's dropout."""
    pair.eval()
    inputs = pair.model, pair.guide, split.train, data.x, split.held_out
    draws = [TraceMeanField_ELBO().loss(*inputs) for _ in range(num_draws)]
    pair.train()
    return statistics.mean(draws) / data.num_nodes**2


def fit(args, data: Data, split: LinkSplit, guide: str, settings: dict, seed: int, watch=None):
    """The fitted pair, with the row that is kept of it."""
    pair = build(data, split, guide, settings, seed)

    def steps(numbers):
        for step in numbers:
            if watch is not None and step in CHECKPOINTS:
                watch(pair, step)
            yield step

    start = time.perf_counter()
    curve = fit_links(pair, split, data.x, num_steps=settings["num_steps"], progress=steps)
    seconds = (time.perf_counter() - start) / len(curve)
    means = [statistics.mean(curve[i : i + 10]) for i in range(0, len(curve), 10)]
    row = {"settings": settings, "loss in training": statistics.mean(means[-10:]),
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
            split = link_split(data.edge_index, data.num_nodes, number)
        else:
            path = args.data_root / "linkpred_splits" / dataset / f"split_{number}.npz"
            split = published_split(path, data.num_nodes)
        settings = settings_of(dataset) | ({"num_steps": args.num_steps} if args.smoke else {})
        pair, row = fit(args, data, split, "original", settings, seed)
        results.add(**key, **row, test=scores(pair, data, split, "test", 15))


def search(args, results: Results, dataset: str) -> None:
    """The authors' settings and random ones, on the first splits' validation links."""
    data = load(args, dataset)
    for guide in GUIDES:
        rng = random.Random(0)
        trials = [{}] + [random_settings(dataset, guide, rng) for _ in range(args.num_trials - 1)]
        for trial, seed in itertools.product(range(args.num_trials), range(args.num_searched)):
            key = {"task": "search", "dataset": dataset, "guide": guide, "trial": trial,
                   "seed": seed}  # fmt: skip
            if results.has(**key):
                continue
            split = link_split(data.edge_index, data.num_nodes, seed)
            settings = settings_of(dataset) | trials[trial]
            found: list[dict] = []

            def watch(pair, step, split=split, found=found):
                val = scores(pair, data, split, "val", 30)
                found.append({"num_steps": step, "val": val})

            settings["num_steps"] = args.num_steps
            pair, _ = fit(args, data, split, guide, settings, seed, watch)
            watch(pair, settings["num_steps"])
            for checkpoint in found:
                results.add(**key, settings=settings, **checkpoint)


def compare(args, results: Results, dataset: str) -> None:
    data = load(args, dataset)
    number = min(args.num_splits, 5) if dataset == "pubmed" else args.num_splits
    for seed, guide in itertools.product(range(number), GUIDES):
        key = {"task": "compare", "dataset": dataset, "guide": guide, "seed": seed}
        if results.has(**key):
            continue
        split = link_split(data.edge_index, data.num_nodes, seed)
        settings = results.chosen(dataset, guide)
        pair, row = fit(args, data, split, guide, settings, seed)
        row |= {part: scores(pair, data, split, part, args.num_samples) for part in ("val", "test")}
        results.add(**key, **row)


def cost(args, results: Results, dataset: str) -> None:
    """Seconds of a step, the guides in turn, and the process's peak memory under each."""
    if results.has(task="cost", dataset=dataset):
        return
    data = load(args, dataset)
    split = link_split(data.edge_index, data.num_nodes, 0)
    settings = results.chosen(dataset, "nmm")
    steps, memory, seconds = {}, {}, {guide: [] for guide in GUIDES}
    for guide in GUIDES:
        pair = build(data, split, guide, settings, 0)
        steps[guide] = partial(fit_links, pair, split, data.x, num_steps=2)
        steps[guide]()
        watcher = PeakMemory()
        steps[guide]()
        watcher.done.set()
        memory[guide] = watcher.peak / 2**20
    for _ in range(3 if args.smoke else 15):
        for guide, run in steps.items():
            start = time.perf_counter()
            run()
            seconds[guide].append((time.perf_counter() - start) / 2)
    ratio = statistics.median(b / a for a, b in zip(*seconds.values(), strict=True))
    medians = {guide: statistics.median(times) for guide, times in seconds.items()}
    results.add(task="cost", dataset=dataset, ratio=ratio, MiB=memory, seconds=medians,
                settings=settings)  # fmt: skip


TASKS = {"reproduce": reproduce, "search": search, "compare": compare, "cost": cost}


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
    parser.add_argument("--num-trials", type=int, default=8, help="of the search, each guide")
    parser.add_argument("--num-searched", type=int, default=2, help="splits of the search")
    parser.add_argument("--num-splits", type=int, default=10, help="of the comparison")
    parser.add_argument("--num-samples", type=int, default=100, help="memberships at the test")
    parser.add_argument("--num-steps", type=int, default=CHECKPOINTS[-1], help="of the search")
    parser.add_argument("--num-threads", type=int, default=1)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--smoke", action="store_true", help="seconds, on a small random graph")
    return parser


if __name__ == "__main__":
    main(parser().parse_args())
