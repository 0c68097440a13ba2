# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Rows, graphs and classifiers that users of scikit-learn have."""

import networkx as nx
import numpy as np
import pandas as pd
import pytest
import sklearn
import torch
from scipy.sparse import csr_matrix
from sklearn.datasets import make_blobs
from sklearn.ensemble import StackingClassifier
from sklearn.feature_extraction import DictVectorizer
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.linear_model import LogisticRegression, SGDClassifier
from sklearn.model_selection import GridSearchCV
from sklearn.neighbors import KNeighborsTransformer
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer

from pyro_nmm import Neighborhood
from pyro_nmm.models.stacked.fit import FitOptions
from pyro_nmm.models.tabular import NeighborMixtureClassifier

ROWS, TRUTH = make_blobs(60, 3, centers=3, random_state=0)
Y = np.where(np.arange(60) % 3 == 0, TRUTH, -1)
EDGES = np.stack([np.arange(60), (np.arange(60) + 1) % 60])


@pytest.fixture(autouse=True)
def few_steps(monkeypatch):
    torch.set_default_dtype(torch.float)
    defaults = FitOptions.__init__.__defaults__
    monkeypatch.setattr(FitOptions.__init__, "__defaults__", (5, *defaults[1:]))


def fitted(rows=ROWS, estimator=None, y=Y, graph=None, **options):
    model = NeighborMixtureClassifier(
        estimator or LogisticRegression(), random_state=0, cv=2, **options
    )
    return model.fit(rows, y, graph=graph)


def test_a_graph_of_another_library():
    both = np.concatenate([EDGES, EDGES[::-1]], 1)
    for graph in (nx.cycle_graph(60), both[::-1]):
        hood = fitted(graph=graph, y=Y).hood_
        assert torch.equal(hood.source, Neighborhood(both, 60).source)


def test_a_graph_of_fewer_nodes():
    with pytest.raises(ValueError, match=r"graph must have 60 nodes, .* got 30"):
        fitted(graph=nx.path_graph(30))


@pytest.mark.parametrize(
    "estimator",
    [
        StackingClassifier([("a", LogisticRegression())], cv=2),
        GridSearchCV(SGDClassifier(random_state=0), {"loss": ["log_loss"]}, cv=2),
    ],
)
def test_probabilities_that_are_known_after_a_fit(estimator):
    assert (fitted(estimator=estimator).transduction_ == TRUTH).mean() > 0.9


class NotANumber(LogisticRegression):
    def predict_proba(self, X):
        return super().predict_proba(X) * np.where(np.arange(len(X)) == 3, np.nan, 1)[:, None]


def test_probabilities_that_are_no_numbers():
    with pytest.raises(ValueError, match=r"estimator gives 1 of 60 rows .* first row 3"):
        fitted(estimator=NotANumber())


@pytest.mark.parametrize("own", [True, False])
def test_transformers_may_return_data_frames(own):
    options = {"neighbors": KNeighborsTransformer(n_neighbors=5)} if own else {}
    expected = fitted(**options).label_distributions_
    with sklearn.config_context(transform_output="pandas"):
        model = fitted(**options)
        assert model.predict_proba(ROWS[:2]).shape == (2, 3)
    np.testing.assert_array_equal(model.label_distributions_, expected)


def test_sparse_columns():
    frame = pd.DataFrame(ROWS * (ROWS > 0))
    sparse = frame.astype(pd.SparseDtype(float, 0.0))
    model = fitted(sparse)
    rows = csr_matrix(frame.to_numpy())
    assert torch.equal(model.hood_.source, fitted(rows).hood_.source)
    assert model.predict_proba(sparse[:2]).shape == (2, 3)


FLAT = FunctionTransformer(lambda images: images.reshape(len(images), -1))
RAW = {
    "texts": ([f"word{label} leaf{i % 3}" for i, label in enumerate(TRUTH)], CountVectorizer()),
    "dicts": ([{"a": a, "b": b} for a, b, _ in ROWS.tolist()], DictVectorizer()),
    "images": (np.repeat(ROWS[:, :, None], 2, 2), FLAT),
}


@pytest.mark.parametrize("kind", RAW)
def test_rows_that_a_pipeline_reads(kind):
    rows, read = RAW[kind]
    estimator = make_pipeline(read, LogisticRegression())
    near = make_pipeline(read, KNeighborsTransformer(n_neighbors=5))
    model = fitted(rows, estimator, neighbors=near)
    assert (model.transduction_ == TRUTH).mean() > 0.9
    assert model.predict_proba(rows[:2]).shape == (2, 3)
    assert fitted(rows, estimator, graph=nx.cycle_graph(60)).transduction_.shape == (60,)
    with pytest.raises(ValueError, match=r"Rows of another kind.* need neighbors=make_pipeline"):
        fitted(rows, estimator)


def test_masked_rows():
    with pytest.raises(ValueError, match=r"X has masked entries.*pass X.filled\(np.nan\)"):
        fitted(np.ma.array(ROWS, mask=ROWS > 3))


def test_summary_without_labelled_neighbours():
    line = fitted(graph=nx.empty_graph(60)).summary().split("\n")[1]
    assert line == "no two neighbours have labels: it is unknown how often neighbours agree"


# scikit-learn 1.6 says so first.
@pytest.mark.filterwarnings("ignore:The number of unique classes")
def test_many_classes_with_one_label():
    with pytest.raises(ValueError, match=r"got \{0: 1, .* 7: 1\} \.\.\. of n_samples=60"):
        fitted(y=np.arange(60))
