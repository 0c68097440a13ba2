# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
Consensus of noisy labels: an NMM of sources that nodes share as the prior of Dawid and Skene's
model, against majority votes, Dawid-Skene, a Potts field and label spreading.

    python benchmarks/annotators.py halves cortex --data-root F   # with F/dlpfc
    python benchmarks/annotators.py graphs simulated --graphs cora citeseer pubmed --data-root F
    python benchmarks/annotators.py model coverage

Tasks: ``cortex`` (ten clusterings of the spots of a section, against layers by hand), ``halves``
(how well consensuses of two halves of the clusterings agree, which chooses the number of labels),
``simulated`` (annotators of stated quality of a graph's nodes; F holds Cora/raw and the like),
``graphs`` (how large these are, and how often neighbours have one label),
``model`` (the labels too are drawn from an NMM) and ``coverage`` (of the intervals of annotators'
accuracies). No method and no choice sees a true label; but the genes of two of the ten clusterings
were chosen, by those who made them, with the help of the layers by hand.
"""

from __future__ import annotations

from pathlib import Path

import pyro
import torch
from sklearn.metrics import adjusted_mutual_info_score
from torch import Tensor
from torch.nn.functional import one_hot
from torch_geometric.utils import to_undirected

from benchmarks.latent.annotators_data import (
    SECTIONS,
    Place,
    graph,
    noisy,
    places,
    section,
    spread_out,
)
from benchmarks.latent.annotators_fits import (
    clustering_scores,
    found_by,
    gcn,
    majority,
    renamed,
    rivals,
    scores,
    timed,
    typed_rivals,
)
from benchmarks.latent.annotators_potts import Found
from benchmarks.shared.common import RESULTS, Records, run
from pyro_nmm import NeighborMixture, sources
from pyro_nmm.models import Annotators, CopyingAnnotators, accuracy, grid_edges

#: Of clusterings that err together.
NUM_TYPES = 16
#: Our fits of clusterings.
OURS = {"NMM, types": NUM_TYPES, "NMM": None}
#: What runs on sections of cortex.
METHODS = (*OURS, "Dawid-Skene", "Potts, mean field, types")
#: Answers that name labels: whether annotators may copy, for our fits and all others.
KINDS = {"": Annotators, ", copies": CopyingAnnotators}
#: The method that runs last.
LAST = "Potts, Gibbs, copies"
#: Simulated annotators: independent, the last copies, and a GCN besides.
CELLS = ("independent", "copies", "copies and a GCN")
#: Their mean accuracies.
LEVELS = (0.9, 0.7, 0.5)
#: How clusterings are halved: two draws, and principal components against UMAP.
HALVINGS = (0, 1, "PCA and UMAP")


def cortex(args, results: Records) -> None:
    for name in args.sections:
        data, key = section(args.data_root / "dlpfc", name), {"section": name}
        if not results.has(task="cortex", method="majority", **key):
            votes = majority(renamed(data.answers), int(data.answers.max()) + 1)
            add_clustering(results, votes, data.truth, method="majority", **key)
            for number, answers in enumerate(data.answers.T):
                only = one_hot(answers.clamp(min=0)).double()
                add_clustering(results, Found(only, {}), data.truth, method=f"{number + 1}", **key)
    for key in results.missing(
        task="cortex", seed=range(args.num_seeds), section=args.sections, labels=args.labels,
        method=args.methods,
    ):  # fmt: skip
        data, size = section(args.data_root / "dlpfc", key["section"]), key["labels"]
        pyro.set_rng_seed(key["seed"])
        key = {k: v for k, v in key.items() if k != "task"}
        if key["method"] in OURS:
            emission = Annotators(size, num_types=OURS[key["method"]], aligned=False)
            options = {"num_starts": args.starts, "num_steps": args.num_steps}
            found, seconds = timed(
                found_by, emission, [(data.hood, data.edge_attr)], data.answers, options
            )
            add_clustering(results, found, data.truth, **key, seconds=seconds)
            continue
        # All at once, as the first of them says that they are there.
        if key["method"] == "Dawid-Skene":
            emission = Annotators(size, aligned=False)
            found = list(rivals(emission, data.answers, data.edge_index, args.starts))
        else:
            found = list(typed_rivals(Annotators(size, num_types=NUM_TYPES), data, args.starts))
        for method, consensus, seconds in found:
            row = key | {"method": method, "seconds": seconds}
            add_clustering(results, consensus, data.truth, **row)


def add_clustering(results: Records, found: Found, truth: Tensor, **key) -> None:
    results.add(task="cortex", **key, **clustering_scores(found.probs, truth), **found.settings)


def halves(args, results: Records) -> None:
    for key in results.missing(
        task="halves", section=args.sections, labels=args.candidates, halving=HALVINGS
    ):
        data, (first, second) = section(args.data_root / "dlpfc", key["section"]), halved(key)
        pyro.set_rng_seed(0)
        labels = []
        for part in (first, second):
            emission = Annotators(key["labels"], num_types=NUM_TYPES)
            answers = data.answers[:, part]
            options = {"num_starts": args.half_starts, "num_steps": args.num_steps}
            field = emission.fit(data.hood, answers, data.edge_attr, **options)
            labels.append(field.predict().numpy())
        results.add(**key, agreement=adjusted_mutual_info_score(*labels))


def halved(key: dict, number: int = 10) -> tuple[Tensor, Tensor]:
    """Annotators in two halves; the clusterings of principal components are the first five."""
    order = torch.arange(number)
    if isinstance(key["halving"], int):
        order = torch.randperm(number, generator=torch.Generator().manual_seed(key["halving"]))
    return order[: number // 2], order[number // 2 :]


def compared(
    args, key: dict, y: Tensor, answers: Tensor, edge_index: Tensor, choices: dict, more: dict
):
    """
    Rows of all methods on the same answers. Where the sources lie is chosen without copies: who may
    copy is fitted at those that predict best what is left out.

    :param dict choices: lists of :class:`Place` by their names.
    :param dict more: consensuses of others by their names.
    """
    size, options = int(y.max()) + 1, {"num_starts": 1, "num_steps": args.num_steps}

    def row(method: str, found: Found, seconds: float = 0.0) -> dict:
        named = key | {"method": method, "seconds": seconds}
        return {**named, **scores(found.probs, y), **found.settings}

    best, last = -torch.inf, ""
    for name, choice in choices.items():
        found, seconds = timed(found_by, Annotators(size), choice, answers, options)
        yield row(f"NMM, {name}", found, seconds)
        if found.settings["left out"] > best:
            best, last = found.settings["left out"], name
    found, seconds = timed(found_by, CopyingAnnotators(size), choices[last], answers, options)
    yield row(f"NMM, copies, {last}", found, seconds)
    yield row("majority", majority(answers, size))
    for name, found in more.items():
        yield row(name, found)
    for suffix, kind in KINDS.items():
        for name, found, seconds in rivals(kind(size), answers, edge_index, num_starts=1):
            yield row(name + suffix, found, seconds)


def simulated(args, results: Records) -> None:
    for key in results.missing(
        task="simulated", seed=range(args.num_seeds), graph=args.graphs, level=args.levels,
        cell=args.cells, method=LAST,
    ):  # fmt: skip
        data = graph(key["graph"], args.data_root)
        pyro.set_rng_seed(key["seed"])
        copying = key["cell"] != "independent"
        answers = noisy(data.y, spread_out(key["level"], 6), copying)
        choices, more = places(key["graph"], args.data_root, args.placements), {}
        if key["cell"] == "copies and a GCN":
            size = int(data.y.max()) + 1
            trained = gcn(data, majority(answers, size), size, args.num_epochs)
            answers = torch.cat([answers, trained.probs.argmax(1, keepdim=True)], 1)
            more = {"GCN": trained}
        for row in list(compared(args, key, data.y, answers, data.edge_index, choices, more)):
            results.add(**row)


def graphs(args, results: Records) -> None:
    """What the graphs of simulated annotators are like."""
    for key in results.missing(task="graphs", graph=args.graphs):
        data = graph(key["graph"], args.data_root)
        edges = to_undirected(data.edge_index, num_nodes=data.num_nodes)
        within = (data.y[edges[0]] == data.y[edges[1]]).double().mean().item()
        middle = edges[0].bincount(minlength=data.num_nodes).median().item()
        sizes = {"nodes": data.num_nodes, "edges": edges.shape[1] // 2}
        labels = int(data.y.max()) + 1
        results.add(**key, **sizes, labels=labels, within=within, degree=middle)


def model(args, results: Records) -> None:
    """
    Labels of an NMM on a grid, whose sources our fit knows; and the posterior at the true numbers,
    for what is left of an error where there are so many nodes.
    """
    hood = sources.grid(args.height, args.height, stride=4)
    edge_index = to_undirected(grid_edges(args.height, args.height))
    alpha, logits = torch.full((hood.num_sources, 5), 0.04), torch.zeros(hood.num_edges)
    truth, accuracies = NeighborMixture(hood, alpha, logits), torch.eye(5)
    for key in results.missing(
        task="model", seed=range(args.num_seeds), graph="grid", level=args.levels,
        cell=CELLS[:2], method=LAST,
    ):  # fmt: skip
        pyro.set_rng_seed(key["seed"])
        y, right = truth.sample(), spread_out(key["level"], 6)[:, None, None]
        copying = key["cell"] == "copies"
        answers = noisy(y, right.flatten(), copying, num_labels=5)
        confusion = right * accuracies + (1 - right) / 4 * (1 - accuracies)
        evidence = Annotators(5).log_prob({"confusion": confusion}, answers)
        posterior = truth.latents(evidence).posterior(num_samples=4, num_sweeps=100)
        # A label that none of 4 x 50 sweeps met is rare, not impossible, as in our own fit.
        probs = (200 * posterior.marginals() + alpha[0] / alpha[0].sum()) / 201
        more = {} if copying else {"true numbers": Found(probs, {})}
        choices = {"true sources": [Place(hood, None)]}
        for row in list(compared(args, key, y, answers, edge_index, choices, more)):
            results.add(**row)


def coverage(args, results: Records) -> None:
    """Intervals of the accuracies of five annotators; labels are those of an NMM on a grid."""
    hood = sources.grid(args.side, args.side, stride=4)
    alpha, logits = torch.full((hood.num_sources, 3), 0.2 / 3), torch.zeros(hood.num_edges)
    for key in results.missing(task="coverage", seed=range(args.simulations)):
        pyro.set_rng_seed(key["seed"])
        y = NeighborMixture(hood, alpha, logits).sample()
        truth = 0.4 + 0.55 * torch.rand(5)
        field = Annotators(3).fit(hood, noisy(y, truth, False, num_labels=3), num_starts=1)
        found = accuracy(field)
        inside = (found.low <= truth) & (truth <= found.high)
        named = {name: value.tolist() for name, value in found._asdict().items()}
        results.add(**key, truth=truth.tolist(), **named, covered=inside.tolist())


def main(argv: list[str] | None = None) -> Records:
    return run(
        argv, __doc__, (cortex, halves, graphs, simulated, model, coverage),
        choices={"sections": SECTIONS, "methods": METHODS, "cells": CELLS},
        smoke={"num_seeds": 1, "starts": 1, "placements": 1, "num_steps": 4,
               "num_epochs": 2, "levels": [0.7], "simulations": 2, "side": 10, "height": 12,
               "labels": [5], "candidates": [5]},
        sections=list(SECTIONS), labels=[5, 6, 7, 4, 8, 3], candidates=[3, 4, 5, 6, 7, 8],
        methods=(list(METHODS), "Dawid-Skene runs all rivals, Potts all that have types"),
        num_seeds=10, starts=(5, "of a fit, of which the best is kept"), half_starts=1,
        graphs=(["digits"], "digits, cora, citeseer or pubmed"), cells=list(CELLS),
        levels=list(LEVELS),
        placements=(2, "draws of sources, whose probabilities are averaged"),
        num_steps=(120, "of our fits"), num_epochs=(100, "of the GCN"),
        simulations=200, side=(20, "of the grid of coverage"), height=(128, "of that of model"),
        data_root=Path, results=RESULTS / "annotators.jsonl",
    )  # fmt: skip


if __name__ == "__main__":
    main()
