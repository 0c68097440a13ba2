# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Transformers of rows into a sparse matrix of their nearest neighbours."""

from typing import Any

from scipy.sparse import issparse
from sklearn.base import clone
from sklearn.neighbors import KNeighborsTransformer
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import StandardScaler

#: Neighbours of rows that need a preparation.
EXAMPLE = "make_pipeline(preparation, KNeighborsTransformer(n_neighbors=10))"


def finder_of(neighbors: Any, number: int, metric: str, X: Any) -> Any:
    """A new transformer: the user's, or exact neighbours of rows that are scaled for Euclid."""
    if neighbors is not None:
        finder = clone(neighbors)
    else:
        finder = KNeighborsTransformer(n_neighbors=number, metric=metric)
        if metric == "euclidean":  # pandas has the accessor if all columns are sparse
            scaler = StandardScaler(with_mean=not issparse(X) and not hasattr(X, "sparse"))
            finder = make_pipeline(scaler, finder)
    last = finder[-1] if isinstance(finder, Pipeline) else finder
    if hasattr(last, "set_output"):  # no data frame holds a sparse matrix
        last.set_output(transform="default")
    return finder


def found_by(finder: Any, X: Any, default: bool) -> Any:
    """The sparse matrix of neighbours, or an error that says how to prepare the rows."""
    try:
        graph = finder.fit_transform(X)
    except ValueError as error:
        if not default:
            raise
        raise ValueError(
            f"the default neighbours need numeric rows without missing values and a known "
            f"metric: else pass neighbors={EXAMPLE}. The error was: {error}"
        ) from error
    if not hasattr(graph, "tocoo"):
        raise ValueError(
            f"neighbors must turn rows into a sparse matrix of their neighbours, got "
            f"{type(graph).__name__}: end it in a KNeighborsTransformer, as in {EXAMPLE}"
        )
    return graph
