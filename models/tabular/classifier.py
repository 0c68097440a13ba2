# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""A scikit-learn classifier that shares labels between neighbouring rows of a table."""

from collections.abc import Mapping
from numbers import Integral
from typing import Any

import numpy as np
import torch
from scipy.sparse import issparse
from sklearn.base import BaseEstimator, ClassifierMixin, MetaEstimatorMixin, clone
from sklearn.metrics import accuracy_score
from sklearn.model_selection import StratifiedKFold
from sklearn.neighbors import KNeighborsTransformer
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils import _safe_indexing, check_array, check_random_state, column_or_1d, get_tags
from sklearn.utils.multiclass import type_of_target
from sklearn.utils.validation import _num_samples, check_is_fitted, validate_data
from torch import Tensor
from torch.nn import functional as F
from torch_geometric.utils import from_scipy_sparse_matrix, homophily, subgraph, to_undirected

from pyro_nmm import AveragedPosterior, Neighborhood
from pyro_nmm.datasets import seeded
from pyro_nmm.edges import edges_of
from pyro_nmm.fitting import minimise, with_gradients
from pyro_nmm.labels import as_array, check_names, check_same_order, is_missing
from pyro_nmm.models.stacked import StackedNMM

#: Folds of the labelled rows, and the least probability of a label: a zero has no logarithm.
FOLDS, LEAST = 5, 1e-3
#: Neighbours of rows that need a preparation.
EXAMPLE = "make_pipeline(preparation, KNeighborsTransformer(n_neighbors=10))"
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
    r"""Any scikit-learn classifier with a :class:`~pyro_nmm.models.StackedNMM` on top, on a graph
    of nearest neighbours of the rows. It learns from a few labelled rows and any number of
    unlabelled ones, and its probabilities are calibrated without held-out labels.

    The classifier is fitted once to all labels and once without each of five folds of them, or of
    fewer if no class has five labels. The parameters of the NMM are fitted to labels that the
    classifier has not seen (:meth:`~pyro_nmm.models.StackedNMM.fit` with ``folds``). The
    probabilities of unlabelled rows, before the NMM, are the mean of the whole fit's and the folds'
    mean, at one temperature.

    >>> from sklearn.datasets import load_iris
    >>> from sklearn.linear_model import LogisticRegression
    >>> rows, species = load_iris(return_X_y=True)
    >>> y = np.where(np.arange(150) % 5 == 0, species, -1)  # a label in five is known
    >>> model = NeighborMixtureClassifier(LogisticRegression(), random_state=0).fit(rows, y)
    >>> bool((model.transduction_ == species).mean() > 0.85)
    True
    >>> model.predict_proba(rows[:2]).shape  # of new rows
    (2, 3)

    :param estimator: a classifier with ``predict_proba``.
    :param neighbors: a transformer like ``KNeighborsTransformer``, or a pipeline that ends in one:
        for another number or distance, columns of several kinds, or approximate neighbours of a
        million rows. Default: the ten nearest of scaled rows.
    :param random_state: of folds and fit: an integer, a ``RandomState``, or None for new draws.
    :ivar classes_: ``(C,)`` labels in order.
    :ivar transduction_: ``(n,)`` the label of every row of the fit.
    :ivar label_distributions_: ``(n, C)`` probabilities of every row of the fit.
    :ivar StackedNMM stacked_: the fitted NMM.
    :ivar Neighborhood hood_: the graph of the rows.
    :ivar estimator_: the classifier, fitted to all labels.
    """

    _fit_options: Mapping[str, Any] = {}  #: of :meth:`StackedNMM.fit`

    def __init__(self, estimator: Any, *, neighbors: Any = None, random_state: Any = None) -> None:
        self.estimator = estimator
        self.neighbors = neighbors
        self.random_state = random_state

    @with_gradients
    def fit(self, X: Any, y: Any, graph: Any = None) -> "NeighborMixtureClassifier":
        """Fit the classifier and the NMM on top of it.

        :param X: ``(n, features)`` rows, an array, a sparse matrix or a data frame. With
            ``neighbors`` or ``graph`` also what the pipelines read, such as a list of texts.
        :param y: ``(n,)`` labels of one type; -1, NaN, None or masked for rows without a label.
            Each class needs two labelled rows.
        :param graph: in the place of nearest neighbours, edges between rows: ``(2, E)`` pairs
            (source, target), or a sparse ``(n, n)`` matrix, each of whose stored entries is an edge
            in both directions, zeros too; or PyG's ``Data``. New rows can then not be predicted.
        :raises ValueError: for rows, labels or options that do not fit.

        Cost: six fits of the classifier, nearest neighbours, and time linear in the edges. After an
        error, or an interrupt, the classifier is as it was.
        """
        before = dict(self.__dict__)
        try:
            self._fit(X, y, graph)
        except BaseException:
            self.__dict__.clear()
            self.__dict__.update(before)
            raise
        return self

    def _fit(self, X: Any, y: Any, graph: Any) -> None:
        X = self._checked(X, True, graph is not None or self.neighbors is not None)
        size = _num_samples(X)
        labels, known = self._encoded(y, X)
        self._neighbors = None
        if graph is None:
            self._neighbors, graph = _nearest(self.neighbors, X)
        edges, nodes = edges_of(graph)
        if nodes not in (None, size):
            raise ValueError(f"graph must have {size} nodes, one for each row of X, got {nodes}")
        self.hood_ = Neighborhood(edges, size)
        rows, folds, parts = known.nonzero()[:, 0].numpy(), torch.full((size,), -1), []
        number = min(FOLDS, int(labels[rows].bincount().max()))
        splits = StratifiedKFold(number, shuffle=True, random_state=self.random_state)
        for fold, (rest, out) in enumerate(splits.split(rows, labels[rows])):
            folds[rows[out]] = fold
            parts.append(self._trained(X, labels, rows[rest]))
        self.estimator_, self._parts = self._trained(X, labels, rows), parts
        scores = torch.stack([self._log_probs(part, X) for part in parts]).float()
        self._temperature = _temperature(scores[folds[rows], rows], labels[rows])
        seed = self.random_state
        if not isinstance(seed, Integral):
            seed = check_random_state(seed).randint(2**31)
        with seeded(seed):
            self.stacked_ = StackedNMM(len(self.classes_), prior=TABLES)
            options = {"progress": iter, **self._fit_options}  # silent, as scikit-learn's fits
            self.stacked_.fit(self.hood_, scores, labels, folds=folds, **options)
            pooled = self._pooled(self._log_probs(self.estimator_, X).float(), scores)
            self._fitted = pooled, labels, known
            posterior = self.stacked_.posterior(self.hood_, *self._fitted, num_draws=0)
        self.label_distributions_ = posterior.marginals().numpy()
        self.transduction_ = self.classes_[self.label_distributions_.argmax(1)]

    def predict_proba(self, X: Any) -> np.ndarray:
        """Label probabilities ``(m, C)`` of new rows, each a node that takes its label from itself
        or one of its nearest fitted rows. Rows of :meth:`fit` are in ``label_distributions_``.

        Cost: six predictions of the classifier, and a pass over the graph of :meth:`fit`.

        :raises ValueError: after a fit with ``graph``, and for rows with other columns.
        :raises sklearn.exceptions.NotFittedError: before :meth:`fit`.
        """
        check_is_fitted(self, "stacked_")
        if self._neighbors is None:
            raise ValueError(
                "predict_proba cannot place new rows in the graph that fit was given: give fit all "
                "rows, with label -1 where it is unknown, and read label_distributions_"
            )
        X = self._checked(X, False, self.neighbors is not None)
        size, new, hood = self.hood_.num_nodes, _num_samples(X), self.hood_
        row, near = from_scipy_sparse_matrix(self._neighbors.transform(X))[0].long()
        edges = torch.stack([hood.source, hood.target])
        edges = torch.cat([edges, torch.stack([near, row + size])], 1)
        parts = torch.stack([self._log_probs(part, X) for part in self._parts])
        # In double precision, rows have the same probabilities in any order.
        scores = self._pooled(self._log_probs(self.estimator_, X), parts)
        more = scores, torch.zeros(new).long(), torch.zeros(new).bool()
        given = (torch.cat(pair) for pair in zip(self._fitted, more, strict=True))
        wider = Neighborhood(edges, size + new)
        return self.stacked_.posterior(wider, *given, num_draws=0).marginals()[size:].numpy()

    @property
    def posterior_(self) -> AveragedPosterior:
        """The joint distribution of the rows' labels. It is made anew, from a few passes."""
        check_is_fitted(self, "stacked_")
        return self.stacked_.posterior(self.hood_, *self._fitted)

    def predict(self, X: Any) -> np.ndarray:
        """The most probable label of each new row."""
        best = self.predict_proba(X).argmax(1)  # first: it says if there was no fit
        return self.classes_[best]

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """Accuracy on rows with a label; ``y`` as for :meth:`fit`.

        :raises ValueError: if no row has a label, and as :meth:`predict_proba`.
        """
        X = self._checked(X, False, self.neighbors is not None)
        y, known = self._labels(y, X)
        if not known.any():
            raise ValueError("y must hold a label: all are -1, NaN or None")
        weight = None if sample_weight is None else np.asarray(sample_weight)[known]
        return accuracy_score(y[known].tolist(), self.predict(X)[known], sample_weight=weight)

    def summary(self) -> str:
        """Agreement of labelled neighbours, held-out NLL by candidate, and the NMM's share.

        :raises sklearn.exceptions.NotFittedError: before :meth:`fit`.
        """
        check_is_fitted(self, "stacked_")
        _, labels, known = self._fitted
        edges = torch.stack([self.hood_.source, self.hood_.target])
        edges = to_undirected(subgraph(known, edges[:, edges[0] != edges[1]])[0])
        line = "no two neighbours have labels: it is unknown how often neighbours agree"
        if edges.numel():
            chance = labels[known].bincount().div(known.sum()).square().sum().item()
            agree = f"{homophily(edges, labels):.0%} of {edges.shape[1] // 2}"
            line = f"neighbours agree in {agree} pairs with labels ({chance:.0%} by chance)"
        sizes = f"{len(known)} rows, {int(known.sum())} labels of {len(self.classes_)} classes"
        return f"{sizes}\n{line}\n{self.stacked_.summary()}"

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = get_tags(self.estimator).input_tags.sparse
        return tags

    def _checked(self, X: Any, reset: bool, raw: bool) -> Any:
        """Data frames and ``raw`` rows for a pipeline as they are, else an array or matrix."""
        if isinstance(X, np.ma.MaskedArray) and np.ma.is_masked(X):
            raise ValueError("X has masked entries, which have no value: pass X.filled(np.nan)")
        try:
            if not hasattr(X, "iloc"):
                X = check_array(X, accept_sparse="csr", dtype=None, ensure_all_finite=False)
        except ValueError as error:
            if not raw:
                cure = f"Rows of another kind, such as texts, need neighbors={EXAMPLE}."
                raise ValueError(f"{error}\n{cure}") from error
        validate_data(self, X, reset=reset, skip_check_array=True)
        return X

    def _labels(self, y: Any, X: Any) -> tuple[np.ndarray, np.ndarray]:
        """Labels ``(n,)`` in the order of the rows, and a mask of the labelled ones."""
        if y is None:
            raise ValueError("fit requires y to be passed, but the target y is None")
        check_same_order("y", y, "X", X)
        y, size = column_or_1d(as_array("y", y), warn=True), _num_samples(X)
        if y.shape != (size,):
            raise ValueError(f"y must have shape ({size},), one label per row of X, got {y.shape}")
        known = np.array([not is_missing(value) for value in y.tolist()], dtype=bool)
        if y.dtype.kind in "OUST":
            check_names("y", y[known].tolist())
        return y, known

    def _encoded(self, y: Any, X: Any) -> tuple[Tensor, Tensor]:
        """Indices of classes, and a mask of the labelled rows; sets ``classes_``."""
        y, known = self._labels(y, X)
        values = np.asarray(y[known].tolist() if y.dtype == object else y[known])
        if known.any() and type_of_target(values) not in ("binary", "multiclass"):
            raise ValueError(f"y must hold classes, got {type_of_target(values)} values: bin them")
        if y.dtype.kind == "f" and np.isnan(y).any():  # whole numbers are floats beside NaN
            values = values.astype(int)
        self.classes_, index, count = np.unique(values, return_inverse=True, return_counts=True)
        if len(self.classes_) < 2 or count.min() < 2:
            rare = count.argsort(kind="stable")[:8]
            counts = dict(zip(self.classes_[rare].tolist(), count[rare].tolist(), strict=True))
            some = f"{counts}{' ...' * (len(count) > 8)}"
            raise ValueError(
                f"y must have at least two classes and two labelled rows of each, got {some} of "
                f"n_samples={len(y)} (-1, NaN and None mean unlabelled): label another row of a "
                f"class with one label, or mark its row as unlabelled"
            )
        labels = torch.zeros(len(y), dtype=torch.long)
        labels[torch.from_numpy(known)] = torch.from_numpy(index)
        return labels, torch.from_numpy(known)

    def _trained(self, X: Any, labels: Tensor, rows: np.ndarray) -> Any:
        fitted = clone(self.estimator).fit(_safe_indexing(X, rows), self.classes_[labels[rows]])
        if not hasattr(fitted, "predict_proba"):  # a stack or a search knows it after its fit
            must = f"estimator must have predict_proba, got {type(fitted).__name__}"
            raise ValueError(f"{must}: wrap it in CalibratedClassifierCV")
        return fitted

    def _log_probs(self, estimator: Any, X: Any) -> Tensor:
        """``(n, C)`` logarithms of a classifier's clipped probabilities."""
        probs = np.zeros((_num_samples(X), len(self.classes_)))
        columns = np.searchsorted(self.classes_, estimator.classes_)
        probs[:, columns] = estimator.predict_proba(X)
        wrong = ~np.isfinite(probs).all(-1)
        if wrong.any():
            got = f"{int(wrong.sum())} of {len(probs)} rows probabilities that are not finite"
            cure = "scale its inputs, or take another classifier"
            raise ValueError(f"estimator gives {got}, first row {int(wrong.argmax())}: {cure}")
        return torch.from_numpy(probs).clamp(min=LEAST).log()

    def _pooled(self, whole: Tensor, parts: Tensor) -> Tensor:
        """Scores ``(n, C)``: half of the whole fit, and half of the mean of the folds."""
        probs = [(scores / self._temperature).softmax(-1) for scores in (whole, parts)]
        return ((probs[0] + probs[1].mean(0)) / 2).log() * self.stacked_.pool.temperature


def _temperature(held_out: Tensor, y: Tensor) -> Tensor:
    """The most probable temperature, under a standard normal prior of its logarithm."""
    log_scale = torch.zeros((), requires_grad=True)

    def loss() -> Tensor:
        fit = F.cross_entropy(held_out * log_scale.exp(), y, reduction="sum")
        return fit + log_scale.square() / 2

    minimise(loss, [log_scale], 100)
    return (-log_scale).exp().detach()


def _nearest(neighbors: Any, X: Any) -> tuple[Any, Any]:
    """A fitted transformer, the user's or exact neighbours of scaled rows, and its sparse matrix of
    neighbours.
    """
    if neighbors is not None:
        finder = clone(neighbors)
    else:  # pandas has the accessor if all columns are sparse
        scaler = StandardScaler(with_mean=not issparse(X) and not hasattr(X, "sparse"))
        number = min(10, _num_samples(X) - 1)
        finder = make_pipeline(scaler, KNeighborsTransformer(n_neighbors=number))
    last = finder[-1] if isinstance(finder, Pipeline) else finder
    if hasattr(last, "set_output"):  # no data frame holds a sparse matrix
        last.set_output(transform="default")
    try:
        graph = finder.fit_transform(X)
    except ValueError as error:
        if neighbors is not None:
            raise
        raise ValueError(
            f"the default neighbours need numeric rows without missing values: else pass "
            f"neighbors={EXAMPLE}. The error was: {error}"
        ) from error
    if not hasattr(graph, "tocoo"):
        raise ValueError(
            f"neighbors must turn rows into a sparse matrix of their neighbours, got "
            f"{type(graph).__name__}: end it in a KNeighborsTransformer, as in {EXAMPLE}"
        )
    return finder, graph
