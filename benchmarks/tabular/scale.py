# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""New rows after a fit, and the cost of a fit and of new rows by the size of the table."""

import numpy as np
import torch
from sklearn.base import clone
from sklearn.datasets import make_blobs
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsTransformer

from benchmarks.shared.records import Records
from benchmarks.shared.timing import in_a_process, peak_memory, timed
from benchmarks.tabular.data import FOLDS, KINDS, NEIGHBORS, keel, scores_of
from pyro_nmm.models.tabular import NeighborMixtureClassifier

#: Rows with labels, columns and classes of a table of any size.
LABELLED, COLUMNS, CLASSES = 200, 8, 10


def new_rows(args, results: Records) -> None:
    """Half of the judged rows of each table: in the fit without labels, or new after a fit."""
    for seed in args.seeds:
        for name, (rows, labels, labelled, judged) in keel(seed):
            key = {"task": "new_rows", "table": name, "seed": seed}
            for each in results.missing(**key, classifier=list(KINDS)):
                model = NeighborMixtureClassifier(KINDS[each["classifier"]](seed), random_state=0)
                y, new, inside = (
                    np.full(len(labels), -1),
                    judged[1::2],
                    np.r_[labelled, judged[::2]],
                )
                y[labelled] = labels[labelled]
                joined = model.fit(rows, y).label_distributions_[new]
                predicted = model.fit(rows[inside], y[inside]).predict_proba(rows[new])
                for way, probs in (("fitted", joined), ("new", predicted)):
                    found = scores_of(torch.from_numpy(probs), labels[new])
                    results.add(**each, rows=way, **found)


def size(args, results: Records) -> None:
    """A fit and its parts, on clouds of rows of any number."""
    each = {"number": args.sizes, "neighbors": ["exact", "approximate"], "threads": args.threads}
    for key in results.missing(task="size", **each):
        results.add(**key, **in_a_process(args.threads, one_size, key["number"], key["neighbors"]))


def one_size(number: int, neighbors: str) -> dict:
    rows, labels = make_blobs(
        number + 10_000, COLUMNS, centers=CLASSES, cluster_std=4.0, random_state=0
    )
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
    found = {"neighbours": timed(clone(finder).fit_transform, rows)[1]}
    found["classifier"] = (FOLDS + 1) * timed(alone, clone(probe), rows, y)[1]
    (_, found["fit"]), _, rise = peak_memory(timed, model.fit, rows, y)
    found |= {f"{n} new": timed(model.predict_proba, new[:n])[1] for n in (1, len(new))}
    hit = float((model.transduction_ == labels[:number])[LABELLED:].mean())
    seconds = {name: round(value, 3) for name, value in found.items()}
    return {"seconds": seconds, "MiB": round(rise / 2**20), "accuracy": round(hit, 4)}


def alone(probe: LogisticRegression, rows: np.ndarray, y: np.ndarray) -> np.ndarray:
    return probe.fit(rows[y >= 0], y[y >= 0]).predict_proba(rows)
