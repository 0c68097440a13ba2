# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
Link prediction with DGLFRM, its original guide and the NMM's: the paper's table 5 and figure 5.

    python benchmarks/links.py reproduce search compare memberships katz cost --data-root F

Tasks: ``reproduce`` (the original guide on the authors' splits of Cora, with their settings),
``search`` (the model's and the network's settings by the original guide's average precision on
validation links, then the NMM's estimator and start by its bound), ``compare`` (both guides, same
settings, paired random splits, others than those of the search), ``memberships`` (links predicted
with other nodes' memberships), ``katz`` (links predicted by counting walks, on the same splits) and
``cost`` (seconds and memory of a step). F holds ``nips12/nips12.mat``, ``yeast/yeast.mat``,
``linkpred_splits/cora/split_0.npz`` and what PyG's Planetoid needs.
"""

from __future__ import annotations

import itertools
from functools import cache, partial
from pathlib import Path
from statistics import mean

import pyro
import torch
from pyro import poutine
from pyro.infer import TraceMeanField_ELBO
from sklearn.metrics import average_precision_score, roc_auc_score
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.datasets import KarateClub

from benchmarks.shared import common
from benchmarks.shared.common import RESULTS, Records, run
from benchmarks.shared.references import katz_index, walks
from benchmarks.shared.timing import median_cost, timed
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
#: By name and folder.
load = cache(link_graph)


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


def problem(args, dataset: str, seed: int) -> tuple[Data, LinkSplit]:
    """A graph and a random split of its links; the karate club's under ``--smoke``."""
    if args.smoke:
        edge_index = KarateClub()[0].edge_index
        data = Data(x=identity(34), edge_index=edge_index, num_nodes=34, has_features=False)
    else:
        data = load(dataset, args.data_root)
    split = link_split(data.edge_index, data.num_nodes, seed)
    return data.to(args.device), split.to(args.device)


def build(data: Data, split: LinkSplit, guide: str, settings: dict, seed: int) -> DGLFRMGuide:
    """Both guides start from the same weights."""
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    target = DGLFRM(
        data.num_nodes,
        settings["num_communities"],
        data.num_features if data.has_features else 0,
        hidden=tuple(settings["decoder"]),
        concentration=settings["concentration"],
        name=f"{guide} model",
    )
    hood = None if guide == "original" else Neighborhood(split.train, data.num_nodes)
    names = {"hidden", "dropout", "estimator", "gamma", "own_attention", "width"} & settings.keys()
    options = {name: settings[name] for name in names} | {"name": f"{guide} guide"}
    return DGLFRMGuide(target, data.num_features, hood, **options).to(data.edge_index.device)


def loss(pair: DGLFRMGuide, data: Data, split: LinkSplit, num_draws: int = 20) -> float:
    """The negative bound in nats a pair of nodes, without the network's dropout."""
    inputs = pair.model, pair.guide, split.train, data.x, split.held_out
    with evaluation(pair):
        draws = [TraceMeanField_ELBO().loss(*inputs) for _ in range(num_draws)]
    return mean(draws) / data.num_nodes**2


def fit(args, data: Data, split: LinkSplit, guide: str, settings: dict, seed: int):
    """The fitted pair, with the row that is kept of it."""
    pair = build(data, split, guide, settings, seed)
    curve, seconds = timed(fit_links, pair, split, data.x, num_steps=args.num_steps)
    means = [mean(curve[i : i + 10]) for i in range(0, len(curve), 10)]
    row = {"settings": settings, "loss in training": mean(means[-5:])}
    row |= {"loss": loss(pair, data, split), "seconds": seconds / len(curve), "curve": means}
    return pair, row


def held_out(split: LinkSplit, part: str) -> tuple[Tensor, int]:
    """Pairs ``(2, P)`` of ``"val"`` or ``"test"``, links first, and how many links."""
    true, false = getattr(split, part), getattr(split, part + "_false")
    return torch.cat([true, false], 1), true.shape[1]


def precision(ranks: Tensor, count: int) -> dict:
    """In percent; the first ``count`` of the ranked pairs are links."""
    labels, ranks = torch.arange(len(ranks)) < count, ranks.cpu()
    scores = {"AP": average_precision_score, "AUC": roc_auc_score}
    return {name: 100 * float(score(labels, ranks)) for name, score in scores.items()}


def measure(args, data, split, guide, settings, seed, parts=("val", "test"), draws=None) -> dict:
    """The row of a fit, with its scores from some draws of the memberships."""
    pair, row = fit(args, data, split, guide, settings, seed)
    for part in parts:
        tested, count = held_out(split, part)
        ranks = pair.link_logits(tested, split.train, data.x, draws or args.num_samples)
        row[part] = precision(ranks, count)
    return row


def reproduce(args, results: Records) -> None:
    """The authors' settings on their splits of Cora, three seeds each."""
    datasets = [name for name in args.datasets if name == "cora" or args.smoke]
    for key in results.missing(task="reproduce", dataset=datasets, split=(0, 1), seed=range(3)):
        data, split = problem(args, key["dataset"], key["split"])
        if not args.smoke:
            path = args.data_root / f"linkpred_splits/cora/split_{key['split']}.npz"
            split = published_split(path, data.num_nodes).to(args.device)
        known = "original", candidates(key["dataset"])[0], key["seed"]
        results.add(**key, **measure(args, data, split, *known, parts=["test"], draws=15))


def search(args, results: Records) -> None:
    """On PubMed a fit takes a quarter of an hour."""
    datasets = [name for name in args.datasets if name != "pubmed"]
    for dataset, guide in itertools.product(datasets, GUIDES):
        trials = candidates(dataset)[: args.num_trials]
        if guide == "nmm":
            shared = chosen(results.rows, dataset, "original")
            trials = [shared | choice for choice in CHOICES]
        known = {"task": "search", "dataset": dataset, "guide": guide}
        each = {"trial": range(len(trials)), "seed": range(args.num_searched)}
        for key in results.missing(**known, **each):
            known = guide, trials[key["trial"]], key["seed"]
            row = measure(args, *problem(args, dataset, key["seed"]), *known, parts=["val"])
            del row["curve"]
            results.add(**key, **row)


def compared(args, dataset: str) -> range:
    """Seeds of splits on which no settings were chosen; PubMed's were on Cora."""
    if dataset == "pubmed":
        return range(min(args.num_splits, 5))
    return range(args.num_searched, args.num_searched + args.num_splits)


def compare(args, results: Records) -> None:
    for dataset in args.datasets:
        settings = {guide: chosen(results.rows, dataset, guide) for guide in GUIDES}
        for seed, guide in itertools.product(compared(args, dataset), GUIDES):
            key = {"task": "compare", "dataset": dataset, "guide": guide, "seed": seed}
            if not results.has(**key, settings=settings[guide]):
                known = *problem(args, dataset, seed), guide, settings[guide], seed
                results.add(**key, **measure(args, *known))


def memberships(args, results: Records) -> None:
    """
    What the memberships say of the links: average precision of the original guide, fitted, with
    every node's own memberships, with those of a random neighbour or itself, and of any node.
    """
    seeds = range(args.num_searched)
    for key in results.missing(task="memberships", dataset=args.datasets, seed=seeds):
        data, split = problem(args, key["dataset"], key["seed"])
        settings = chosen(results.rows, key["dataset"], "original")
        pair, _ = fit(args, data, split, "original", settings, key["seed"])
        hood = Neighborhood(split.train, data.num_nodes)
        uniform = NeighborChoice(hood, torch.zeros(hood.num_edges, device=hood.device))
        donors = {"own": partial(torch.arange, data.num_nodes), "a neighbour's": uniform.sample}
        donors["anyone's"] = partial(torch.randperm, data.num_nodes)
        (tested, count), found = held_out(split, "test"), {}
        for name, draw in donors.items():
            logits = torch.zeros(tested.shape[1], device=hood.device)
            for _ in range(args.num_samples):
                with evaluation(pair):
                    sites = poutine.trace(pair.guide).get_trace(split.train, data.x).nodes
                    members = (sites["s"]["value"][draw()] > 0) * sites["r"]["value"]
                    logits += pair.target.link_logits(members, tested)
            found[name] = precision(logits, count)["AP"]
        results.add(**key, AP=found)


def katz(args, results: Records) -> None:
    """A reference without any model: Katz's index, its discount chosen on validation links."""
    for dataset in args.datasets:
        for key in results.missing(task="katz", dataset=dataset, seed=compared(args, dataset)):
            data, split = problem(args, dataset, key["seed"])
            counted = []
            for part in ("val", "test"):
                tested, count = held_out(split, part)
                counted.append((walks(split.train, data.num_nodes, tested), count))
            scores = {
                discount: [precision(katz_index(walked, discount), n) for walked, n in counted]
                for discount in (0.1, 0.03, 0.01, 0.003, 0.001)
            }
            best = max(scores, key=lambda discount: scores[discount][0]["AP"])
            sizes = [split.train.shape[1] // 2, *(count for _, count in counted)]
            results.add(**key, discount=best, sizes=sizes, test=scores[best][1])


def stepper(block: int, data: Data, split: LinkSplit, guide: str, settings: dict):
    """A function that returns a step's seconds; the NMM's differ, so that it takes some."""
    pair = build(data, split, guide, settings, 0)
    return lambda: timed(fit_links, pair, split, data.x, num_steps=block)[1] / block


def cost(args, results: Records) -> None:
    """Seconds of a step, the guides in turn, and the process's peak memory under each."""
    # Every other step of the NMM, at random, compares neighbours.
    block, repeats = (2, 3) if args.smoke else (10, 8)
    for key in results.missing(task="cost", dataset=args.datasets):
        known, settings = (
            problem(args, key["dataset"], 0),
            chosen(results.rows, key["dataset"], "nmm"),
        )
        makers = {guide: partial(stepper, block, *known, guide, settings) for guide in GUIDES}
        results.add(**key, **median_cost(makers, repeats), settings=settings)


def main(argv: list[str] | None = None) -> Records:
    return run(
        argv, __doc__, (reproduce, search, compare, memberships, katz, cost),
        smoke={"datasets": ["nips12"], "num_trials": 2, "num_searched": 1, "num_splits": 3,
               "num_steps": 3},
        choices={"datasets": DATASETS}, datasets=DATASETS,
        num_trials=(5, "candidates of the search"), num_searched=(2, "splits of the search"),
        num_splits=(10, "compared; PubMed at most 5"), num_samples=(100, "memberships at the test"),
        num_steps=500, data_root=Path, device="cpu", results=RESULTS / "links.jsonl",
    )  # fmt: skip


if __name__ == "__main__":
    main()
