# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""An NMM on top of scikit-learn's classifiers, beside rivals. README.md explains the tasks."""

import warnings
from functools import partial
from pathlib import Path

import numpy as np
import pyro
import torch
from sklearn.base import clone
from sklearn.datasets import make_blobs
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsTransformer
from torch import Tensor
from torch.nn import functional as F
from torch.optim import Adam
from torch_geometric.data import Data

from benchmarks.nodes import node_scores
from benchmarks.on_top import network, shuffled, trained
from benchmarks.shared.fits import descend
from benchmarks.shared.records import RESULTS, Records, command
from benchmarks.shared.timing import in_a_process, peak_memory, timed
from benchmarks.tabular.data import FOLDS, KINDS, NEIGHBORS, Table, embeddings, keel, scores_of
from benchmarks.tabular.rivals import ALONE, GRAPHS, METHODS
from pyro_nmm import Neighborhood
from pyro_nmm.datasets import planetoid
from pyro_nmm.models import StackedNMM, temperature_scaling
from pyro_nmm.models.tabular import NeighborMixtureClassifier

#: Rows with labels, columns and classes of a table of any size.
LABELLED, COLUMNS, CLASSES = 200, 8, 10
RETRAINED = 200  # epochs of networks that a fold is hidden from


def judge(table: Table, method: str) -> dict:
    """Scores on the judged rows, and seconds, in which fits that methods share count once."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of solvers that stop early
        probs, seconds = timed((METHODS | GRAPHS)[method], table)
    scores = scores_of(torch.as_tensor(probs)[table.judged], table.labels[table.judged])
    return scores | {"seconds": round(seconds, 5)}


def agreement(table: Table) -> float:
    """How far neighbours agree, from chance (0) to always (1), by all labels."""
    source, target = table.labels[table.edges.numpy()]
    chance = np.square(np.bincount(table.labels) / len(table.labels)).sum()
    return round(float(((source == target).mean() - chance) / (1 - chance)), 4)


def tables(args, results: Records) -> None:
    for seed in args.seeds:
        for name, fields in keel(seed):
            for kind in args.classifiers:
                names = [m for m in args.methods if m not in ALONE or kind == "forest"]
                table = Table(*fields, partial(KINDS[kind], seed))
                place = {"task": "tables", "table": name, "seed": seed, "classifier": kind}
                for key in results.missing(**place, method=names):
                    row = judge(table, key["method"])
                    results.add(**key, **row, agreement=agreement(table))


def images(args, results: Records) -> None:
    keys = {"task": "images", "number": [5, 10, 25, 60], "seed": args.seeds}
    for key in results.missing(**keys, method=args.methods):
        table = embeddings(args.data_root, key["number"], key["seed"])
        results.add(**key, **judge(table, key["method"]))


def new_rows(args, results: Records) -> None:
    for seed in args.seeds:
        for name, (rows, labels, labelled, judged) in keel(seed):
            place = {"task": "new_rows", "table": name, "seed": seed}
            for key in results.missing(**place, classifier=list(KINDS)):
                model = NeighborMixtureClassifier(KINDS[key["classifier"]](seed), random_state=0)
                y, new = np.full(len(labels), -1), judged[1::2]
                inside = np.r_[labelled, judged[::2]]
                y[labelled] = labels[labelled]
                joined = model.fit(rows, y).label_distributions_[new]
                predicted = model.fit(rows[inside], y[inside]).predict_proba(rows[new])
                for way, probs in (("fitted", joined), ("new", predicted)):
                    results.add(**key, rows=way, **scores_of(torch.from_numpy(probs), labels[new]))


def size(args, results: Records) -> None:
    keys = {"number": args.sizes, "neighbors": ["exact", "approximate"], "threads": args.threads}
    for key in results.missing(task="size", **keys):
        results.add(**key, **in_a_process(args.threads, one_size, key["number"], key["neighbors"]))


def one_size(number: int, neighbors: str) -> dict:
    clouds = {"centers": CLASSES, "cluster_std": 4.0, "random_state": 0}
    rows, labels = make_blobs(number + 10_000, COLUMNS, **clouds)
    rows, new = rows[:number], rows[number:]
    y = np.where(np.arange(number) < LABELLED, labels[:number], -1)
    finder = KNeighborsTransformer(n_neighbors=NEIGHBORS)
    if neighbors == "approximate":
        from pynndescent import PyNNDescentTransformer

        finder = PyNNDescentTransformer(n_neighbors=NEIGHBORS, random_state=0)
        clone(finder).fit_transform(rows[:1000])  # compiles
    probe = LogisticRegression(max_iter=1000)
    model = NeighborMixtureClassifier(probe, neighbors=finder, random_state=0)
    clone(model).fit(rows[:2000], y[:2000])  # pays for what is loaded or compiled once

    def alone() -> np.ndarray:
        return clone(probe).fit(rows[y >= 0], y[y >= 0]).predict_proba(rows)

    seconds = {"neighbours": timed(clone(finder).fit_transform, rows)[1]}
    seconds["classifier"] = (FOLDS + 1) * timed(alone)[1]
    (_, seconds["fit"]), _, rise = peak_memory(timed, model.fit, rows, y)
    seconds |= {f"{n} new": timed(model.predict_proba, new[:n])[1] for n in (1, len(new))}
    hit = float((model.transduction_ == labels[:number])[LABELLED:].mean())
    seconds = {name: round(value, 3) for name, value in seconds.items()}
    return {"seconds": seconds, "MiB": round(rise / 2**20), "accuracy": round(hit, 4)}


def retrained(kind: str, data: Data, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """
    Logits ``(K, N, C)`` of networks that have not seen a fold of the observed labels, logits
    ``(N, C)`` of a network that has seen all, each after 200 epochs, and the folds ``(N,)``.
    """
    known, folds = data.train_mask | data.val_mask, torch.full_like(data.y, -1)
    order = shuffled(known, torch.Generator().manual_seed(seed))
    folds[order] = torch.arange(len(order)) % FOLDS

    def logits(nodes: Tensor) -> Tensor:
        pyro.set_rng_seed(seed)
        module = network(kind, data.num_features, int(data.y.max()) + 1)
        optimizer = Adam(module.parameters(), lr=0.01, weight_decay=5e-4)
        inputs, y = (data.x, data.edge_index), data.y[nodes]
        loss = lambda: F.cross_entropy(module(*inputs)[nodes], y)  # noqa: E731
        return descend(module, optimizer, loss, RETRAINED)(*inputs).detach()

    parts = [logits(known & (folds != fold)) for fold in range(FOLDS)]
    return torch.stack(parts), logits(known), folds


def scaled(scores: Tensor, held_out: Tensor, y: Tensor) -> Tensor:
    temperature = temperature_scaling(held_out, y, torch.ones_like(y, dtype=torch.bool))
    return (scores / temperature).softmax(-1)


def folds(args, results: Records) -> None:
    keys = {"dataset": args.graphs, "backbone": args.backbones, "split": args.splits}
    for key in results.missing(task="folds", **keys, method="StackedNMM, five folds"):
        data = planetoid(key["dataset"], args.data_root and args.data_root / "planetoid")
        hood, known = Neighborhood(data.edge_index, data.num_nodes), data.train_mask | data.val_mask
        y, test, rows = data.y, data.test_mask, known.nonzero()[:, 0]
        logits = trained(key["backbone"], data, key["split"])
        module = StackedNMM(logits.shape[1]).fit(hood, logits, y, data.train_mask, data.val_mask)
        found = {"temperature": scaled(logits, logits[data.val_mask], y[data.val_mask])}
        found["StackedNMM"] = module.posterior(hood, logits, y, known).marginals()
        parts, scores, fold = retrained(key["backbone"], data, key["split"])
        found["temperature, five folds"] = scaled(scores, parts[fold[rows], rows], y[rows])
        module = StackedNMM(scores.shape[1]).fit(hood, parts, y, folds=fold)
        found["StackedNMM, five folds"] = module.posterior(hood, scores, y, known).marginals()
        for name, probs in found.items():
            results.add(**key | {"method": name}, **node_scores(probs[test], y[test]))


TASKS = tables, images, new_rows, size, folds
OPTIONS: dict = {"seeds": [0, 1, 2], "methods": list(METHODS), "classifiers": list(KINDS)}
OPTIONS |= {"sizes": [4_000, 10_000, 100_000, 1_000_000], "splits": [0, 1, 2, 3, 4]}
OPTIONS |= {"graphs": ["cora", "citeseer", "pubmed"], "backbones": ["mlp", "gcn"]}
main = command(__doc__, TASKS, **OPTIONS, data_root=Path, results=RESULTS / "tabular.jsonl")

if __name__ == "__main__":
    main()
