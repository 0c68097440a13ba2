# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""A scikit-learn classifier that shares labels between neighbouring rows of a table."""

from __future__ import annotations

from numbers import Integral
from typing import Any

import numpy as np
import torch
from scipy.sparse import issparse
from sklearn.base import BaseEstimator, ClassifierMixin, MetaEstimatorMixin, clone
from sklearn.model_selection import StratifiedKFold
from sklearn.neighbors import NearestNeighbors
from sklearn.preprocessing import StandardScaler
from sklearn.utils import _safe_indexing, check_random_state
from sklearn.utils.multiclass import type_of_target
from sklearn.utils.validation import (
    _num_samples,
    check_array,
    check_is_fitted,
    column_or_1d,
    validate_data,
)
from torch import Tensor
from torch_geometric.utils import from_scipy_sparse_matrix, to_undirected

from pyro_nmm import Neighborhood
from pyro_nmm.models.stacked import StackedNMM
from pyro_nmm.validation import check_integers

#: Priors of the parameters on neighbour graphs of tables, chosen on 74 tables that are not reported
#: (``benchmarks/tabular/README.md`` lists them).
TABLES = {
    "pool.log_scale": (0.0, 0.75),
    "pool.neighbors": (0.2, 0.75),
    "pool.labels": (0.35, 0.5),
    "pool.agreement": (0.2, 0.6),
    "log_floor": (-5.0, 1.0),
    "gamma": (1.2, 0.9),
    "similarity": (2.4, 1.0),
}


class NeighborMixtureClassifier(ClassifierMixin, MetaEstimatorMixin, BaseEstimator):
    r"""
    Any scikit-learn classifier with a :class:`~pyro_nmm.models.StackedNMM` on top, on a graph of
    nearest neighbours of the rows. It learns from a few labelled rows and any number of unlabelled
    ones, and its probabilities are calibrated without held-out labels.

    The classifier is fitted once to all labels and once without each of ``cv`` folds of them. The
    parameters of the NMM are fitted to labels that the classifier has not seen, as is the share of
    the NMM beside temperature scaling (:meth:`~pyro_nmm.models.StackedNMM.fit` with ``folds``). The
    scores of unlabelled rows are the mean of the whole fit's scores and the folds' mean.

    >>> from sklearn.datasets import load_iris
    >>> from sklearn.linear_model import LogisticRegression
    >>> rows, species = load_iris(return_X_y=True)
    >>> y = np.where(np.arange(150) % 5 == 0, species, -1)  # a label in five is known
    >>> model = NeighborMixtureClassifier(LogisticRegression(), random_state=0).fit(rows, y)
    >>> bool((model.transduction_ == species).mean() > 0.85)
    True
    >>> model.predict_proba(rows[:2]).shape  # of new rows
    (2, 3)

    Attributes after :meth:`fit`: ``classes_``; ``transduction_`` and ``label_distributions_``, the
    label and the ``(n, C)`` probabilities of every row; ``posterior_``, the joint
    :class:`~pyro_nmm.Posterior` of the rows, with ``sample``, ``pairwise`` and ``counts``, whose
    labels are indices of ``classes_``; ``stacked_``, ``hood_`` and ``estimator_``.

    :param estimator: a classifier with ``predict_proba``.
    :param int n_neighbors: neighbours of each row in the graph.
    :param int cv: folds of the labelled rows. Each class needs at least two labelled rows.
    :param str metric: distance of the neighbours, any of scikit-learn's ``NearestNeighbors``.
    :param transformer: makes the numeric rows whose distances count. Default: ``StandardScaler``
        for Euclidean distance, the rows themselves for other metrics.
    :param float clip: least probability of a label under the classifier, because a forest's zero
        has no logarithm.
    :param random_state: of folds and fit: an integer, a ``RandomState``, or None for new draws.
    """

    def __init__(
        self, estimator: Any, *, n_neighbors: int = 10, cv: int = 5, metric: str = "euclidean",
        transformer: Any = None, clip: float = 1e-3, random_state: Any = None,
    ) -> None:  # fmt: skip
        self.estimator = estimator
        self.n_neighbors = n_neighbors
        self.cv = cv
        self.metric = metric
        self.transformer = transformer
        self.clip = clip
        self.random_state = random_state

    def fit(self, X: Any, y: Any, graph: Any = None) -> NeighborMixtureClassifier:
        """
        Fit the classifier and the NMM on top of it.

        :param X: ``(n, features)`` rows, an array, a sparse matrix or a data frame.
        :param y: ``(n,)`` labels of any type; -1, NaN or None for rows without a label.
        :param graph: ``(2, E)`` pairs of rows (source, target) or a sparse ``(n, n)`` matrix, in
            the place of nearest neighbours. New rows can then not be predicted.
        :raises ValueError: for rows, labels or options that do not fit.

        Cost: ``cv + 1`` fits of the classifier, nearest neighbours, and time linear in the edges.
        """
        check_integers(2, cv=self.cv)
        check_integers(1, n_neighbors=self.n_neighbors)
        if not 0 < self.clip < 1:
            raise ValueError(f"clip must lie between 0 and 1, got {self.clip}")
        X = self._checked(X, reset=True)
        size = _num_samples(X)
        labels, known = self._encoded(y, size)
        self.hood_ = Neighborhood(self._edges(X, graph, size), size)
        rows, folds, parts = known.nonzero()[:, 0].numpy(), -torch.ones(size).long(), []
        splits = StratifiedKFold(self.cv, shuffle=True, random_state=self.random_state)
        for fold, (rest, out) in enumerate(splits.split(rows, labels[rows])):
            folds[rows[out]] = fold
            parts.append(self._trained(X, labels, rows[rest]))
        self.estimator_, self._parts = self._trained(X, labels, rows), parts
        whole, *scores = (self._log_probs(each, X) for each in (self.estimator_, *parts))
        seed = self.random_state
        if not isinstance(seed, Integral):
            seed = check_random_state(seed).randint(2**31)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.stacked_ = StackedNMM(len(self.classes_), prior=TABLES)
            self.stacked_.fit(self.hood_, torch.stack(scores), labels, folds=folds)
            self._fitted = self._pooled(whole, *scores), labels, known
            self.posterior_ = self.stacked_.posterior(self.hood_, *self._fitted)
        self.label_distributions_ = self.posterior_.marginals().numpy()
        self.transduction_ = self.classes_[self.label_distributions_.argmax(1)]
        return self

    def predict_proba(self, X: Any) -> np.ndarray:
        """
        Label probabilities ``(m, C)`` of new rows, each a node that takes its label from itself or
        one of its nearest fitted rows. Rows of :meth:`fit` are in ``label_distributions_``.

        Cost: ``cv + 1`` predictions of the classifier, and a pass over the graph of :meth:`fit`.
        """
        check_is_fitted(self, "stacked_")
        if self._nearest is None:
            raise ValueError(
                "predict_proba cannot place new rows in the graph that fit was given: give fit all "
                "rows, with label -1 where it is unknown, and read label_distributions_"
            )
        X = self._checked(X, reset=False)
        near = torch.from_numpy(self._nearest.kneighbors(self._places(X), return_distance=False))
        size, new, hood = self.hood_.num_nodes, len(near), self.hood_
        target = torch.arange(size, size + new).repeat_interleave(near.shape[1])
        edges = torch.stack([hood.source, hood.target])
        edges = torch.cat([edges, torch.stack([near.reshape(-1), target])], 1)
        scores = self._pooled(*(self._log_probs(e, X) for e in (self.estimator_, *self._parts)))
        fitted, labels, known = self._fitted
        found = self.stacked_.posterior(
            Neighborhood(edges, size + new), torch.cat([fitted, scores]),
            torch.cat([labels, labels.new_zeros(new)]), torch.cat([known, known.new_zeros(new)]),
        )  # fmt: skip
        return found.marginals()[size:].numpy()

    def predict(self, X: Any) -> np.ndarray:
        """The most probable label of each new row."""
        best = self.predict_proba(X).argmax(1)
        return self.classes_[best]

    def _checked(self, X: Any, reset: bool) -> Any:
        """Data frames and sparse matrices as they are, anything else as an array of rows."""
        if not hasattr(X, "iloc") and not issparse(X):
            X = check_array(X, dtype=None, ensure_all_finite=False)
        validate_data(self, X, reset=reset, skip_check_array=True)
        return X

    def _encoded(self, y: Any, size: int) -> tuple[Tensor, Tensor]:
        """Indices of classes, and a mask of the labelled rows; sets ``classes_``."""
        if y is None:
            raise ValueError("fit requires y to be passed, but the target y is None")
        y = column_or_1d(y, warn=True)
        if y.shape != (size,):
            raise ValueError(f"y must have shape ({size},), one label per row of X, got {y.shape}")
        known = np.array([not (v is None or v != v or v == -1) for v in y.tolist()])
        given = np.asarray(y[known].tolist() if y.dtype == object else y[known])
        if known.any() and type_of_target(given) not in ("binary", "multiclass"):
            raise ValueError(f"y must hold classes, got {type_of_target(given)} values: bin them")
        self.classes_, index, count = np.unique(given, return_inverse=True, return_counts=True)
        if len(self.classes_) < 2 or count.min() < 2:
            found = dict(zip(self.classes_.tolist(), count.tolist(), strict=True))
            raise ValueError(
                f"y must have at least two classes and two labelled rows of each, got {found} of "
                f"n_samples={size}"
            )
        labels = torch.zeros(size, dtype=torch.long)
        labels[torch.from_numpy(known)] = torch.from_numpy(index)
        return labels, torch.from_numpy(known)

    def _edges(self, X: Any, graph: Any, size: int) -> Tensor:
        """Pairs of neighbouring rows, both ways round."""
        self._nearest = None
        if graph is None:
            self._scaler = self.transformer
            if self.transformer is None and self.metric == "euclidean":
                self._scaler = StandardScaler()
            if self._scaler is not None:
                self._scaler = clone(self._scaler).fit(X)
            places, number = self._places(X), min(self.n_neighbors, size - 1)
            self._nearest = NearestNeighbors(n_neighbors=number, metric=self.metric).fit(places)
            graph = self._nearest.kneighbors_graph()
        elif not hasattr(graph, "tocoo"):
            return torch.as_tensor(graph)
        return to_undirected(from_scipy_sparse_matrix(graph)[0].long())

    def _places(self, X: Any) -> Any:
        return X if self._scaler is None else self._scaler.transform(X)

    def _trained(self, X: Any, labels: Tensor, rows: np.ndarray) -> Any:
        return clone(self.estimator).fit(_safe_indexing(X, rows), self.classes_[labels[rows]])

    def _log_probs(self, estimator: Any, X: Any) -> Tensor:
        """``(n, C)`` logarithms of a classifier's clipped probabilities."""
        probs = np.full((_num_samples(X), len(self.classes_)), self.clip)
        columns = np.searchsorted(self.classes_, estimator.classes_)
        probs[:, columns] = estimator.predict_proba(X)
        return torch.from_numpy(probs).clamp(min=self.clip).log().float()

    def _pooled(self, whole: Tensor, *parts: Tensor) -> Tensor:
        """Scores whose tempered probabilities are half the whole fit's and half the folds' mean."""
        temperature = self.stacked_.pool.temperature
        folds = torch.stack([(each / temperature).softmax(1) for each in parts]).mean(0)
        return ((whole / temperature).softmax(1) + folds).div(2).log() * temperature
