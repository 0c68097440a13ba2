# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The scikit-learn classifier on a graph of nearest rows."""

import importlib
import pickle
import sys
from unittest import SkipTest

import networkx as nx
import numpy as np
import pandas as pd
import pytest
import torch
from scipy.sparse import csr_matrix
from sklearn.base import clone
from sklearn.datasets import load_iris, make_blobs
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold, cross_val_score
from sklearn.neighbors import KNeighborsTransformer, kneighbors_graph
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, StandardScaler
from sklearn.svm import LinearSVC
from sklearn.utils.estimator_checks import estimator_checks_generator
from stacking import FEW, QuickClassifier

from pyro_nmm import Neighborhood
from pyro_nmm.models import StackedNMM, tabular
from pyro_nmm.models.tabular.classifier import TABLES

#: Checks of scikit-learn that it does not pass, and why.
EXPECTED = {"check_classifiers_classes": "-1 is a row without a label"}
#: Checks that it passes in more than a few seconds.
LONG = {"check_classifiers_train", "check_estimators_dtypes", "check_fit_score_takes_y"}
#: 300 rows of four columns, a label in four is known.
ROWS, LABELS = make_blobs(300, 4, centers=3, cluster_std=4.0, random_state=0)
Y = np.where(np.arange(300) % 4 == 0, LABELS, -1)
#: 60 rows in clusters that are far apart.
FEW_ROWS, TRUTH = make_blobs(60, 3, centers=3, random_state=0)
FEW_Y = np.where(np.arange(60) % 3 == 0, TRUTH, -1)
#: 150 rows of three species.
IRIS, SPECIES = load_iris(return_X_y=True)
KNOWN = np.arange(150) % 5 == 0
NAMES = np.array(["ash", "oak", "yew"], dtype=object)[SPECIES]


@pytest.fixture(autouse=True)
def single_precision():
    torch.set_default_dtype(torch.float)


def fit(rows=ROWS, y=Y, graph=None, **options):
    options = {"estimator": LogisticRegression(), "random_state": 0} | options
    return QuickClassifier(**options).fit(rows, y, graph)


def fit_few(rows=FEW_ROWS, **options):
    return fit(rows, options.pop("y", FEW_Y), **options)


def fit_iris(y, **options):
    return fit(IRIS, y, **options)


@pytest.fixture(scope="module")
def fitted():
    torch.set_default_dtype(torch.float)
    return fit()


def test_it_is_a_fit_of_folds():
    """Written out: each part of the classifier and its scores know nothing of its fold."""
    model = fit(random_state=5)
    near = kneighbors_graph(StandardScaler().fit_transform(ROWS), 10)
    near = torch.from_numpy(np.stack(near.nonzero())).long()
    hood = Neighborhood(torch.cat([near, near.flip(0)], 1), 300)
    assert torch.equal(model.hood_.source, hood.source)
    rows, folds, labels = np.flatnonzero(Y >= 0), torch.full((300,), -1), torch.from_numpy(LABELS)
    splits = StratifiedKFold(5, shuffle=True, random_state=5).split(rows, Y[rows])
    for fold, (rest, out) in enumerate(splits):
        part = model._parts[fold]
        again = clone(part).fit(ROWS[rows[rest]], Y[rows[rest]])
        np.testing.assert_allclose(again.coef_, part.coef_)
        folds[torch.from_numpy(rows[out])] = fold
    parts = [torch.from_numpy(part.predict_proba(ROWS)) for part in model._parts]
    scores = torch.stack(parts).clamp(min=1e-3).log().float()
    with torch.random.fork_rng():
        torch.manual_seed(5)
        stacked = StackedNMM(3, prior=TABLES).fit(hood, scores, labels, folds=folds, **FEW)
    torch.testing.assert_close(stacked.state_dict(), model.stacked_.state_dict())
    # The temperature is the best one for each row's scores without its fold.
    log_scale = torch.linspace(-2, 2, 4001)
    tempered = log_scale.exp()[:, None, None] * scores[folds[rows], rows]
    log_prob = tempered.log_softmax(-1)[:, torch.arange(len(rows)), labels[rows]].sum(1)
    best = log_scale[(log_prob - log_scale.square() / 2).argmax()]
    assert -model._temperature.log().item() == pytest.approx(best.item(), abs=0.005)


def test_new_rows_join_the_graph(fitted):
    """Rows that were unlabelled in the fit get nearly the same probabilities as new rows."""
    probs = fitted.predict_proba(ROWS[Y < 0])
    np.testing.assert_allclose(probs.sum(1), 1, atol=1e-5)
    assert np.abs(probs - fitted.label_distributions_[Y < 0]).mean() < 0.02
    one_by_one = np.concatenate([fitted.predict_proba(ROWS[i : i + 1]) for i in range(5)])
    np.testing.assert_allclose(one_by_one, fitted.predict_proba(ROWS[:5]), atol=1e-5)
    assert fitted.score(ROWS, LABELS) == (fitted.predict(ROWS) == LABELS).mean()


TEXT = np.array(["ash", "birch", "cedar"], dtype=object)[np.maximum(Y, 0)]
FORMS = {
    "strings": np.where(Y < 0, -1, TEXT),
    "nan": np.where(Y < 0, np.nan, Y),
    "NA": pd.Series(TEXT, dtype="string").where(Y >= 0),
    "masked text": np.ma.array(TEXT.astype(str), mask=Y < 0),
    "Float64": pd.Series(LABELS, dtype="Float64").where(Y >= 0),
}


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.DataConversionWarning")
@pytest.mark.parametrize("kind", FORMS)
def test_labels_of_any_type(fitted, kind):
    model = fit(y=FORMS[kind])
    np.testing.assert_allclose(model.label_distributions_, fitted.label_distributions_)
    assert model.transduction_[0] == model.classes_[fitted.label_distributions_[0].argmax()]
    text = kind in ("strings", "NA", "masked text")
    assert model.classes_.tolist() == (["ash", "birch", "cedar"] if text else [0, 1, 2])
    assert text or model.classes_.dtype == model.transduction_.dtype == int


def test_graphs(fitted):
    near = kneighbors_graph(StandardScaler().fit_transform(ROWS), 10)
    edges = torch.from_numpy(np.stack(near.nonzero()))
    for graph in (near, csr_matrix(near), torch.cat([edges, edges.flip(0)], 1)):
        model = fit(graph=graph)
        found, expected = (each.label_distributions_ for each in (model, fitted))
        np.testing.assert_allclose(found, expected, atol=1e-5)
    with pytest.raises(ValueError, match="cannot place new rows"):
        model.predict_proba(ROWS)
    around = np.stack([np.arange(60), (np.arange(60) + 1) % 60])
    both = np.concatenate([around, around[::-1]], 1)
    assert torch.equal(fit_few(graph=both[::-1]).hood_.source, Neighborhood(both, 60).source)


def test_habits_of_scikit_learn(fitted):
    again = pickle.loads(pickle.dumps(fitted))
    np.testing.assert_array_equal(again.predict_proba(ROWS[:3]), fitted.predict_proba(ROWS[:3]))
    model = clone(fitted).set_params(estimator__C=0.5)
    pipe = make_pipeline(StandardScaler(), model)
    assert cross_val_score(pipe, ROWS, LABELS, cv=2).mean() > 0.6
    frame = pd.DataFrame(ROWS, columns=list("abcd"))
    framed = fit(frame)
    np.testing.assert_allclose(framed.label_distributions_, fitted.label_distributions_)
    assert framed.predict_proba(frame[:2]).shape == (2, 3)


def test_neighbors_of_any_transformer(fitted):
    """The default written out; other columns; one that finds its own number."""
    near = make_pipeline(StandardScaler(), KNeighborsTransformer(n_neighbors=10))
    model = fit(neighbors=near)
    np.testing.assert_array_equal(model.label_distributions_, fitted.label_distributions_)
    only = make_pipeline(FunctionTransformer(lambda X: X[:, :1]), KNeighborsTransformer())
    first = fit(neighbors=only)
    assert first.hood_.num_edges < model.hood_.num_edges
    np.testing.assert_allclose(first.predict_proba(ROWS[:3]).sum(1), 1, atol=1e-5)
    assert torch.equal(fit(csr_matrix(ROWS)).hood_.source, model.hood_.source)


def test_rows_that_a_pipeline_reads():
    """Texts, with neighbours or a graph."""
    rows, read = [f"word{label} leaf{i % 3}" for i, label in enumerate(TRUTH)], CountVectorizer()
    estimator = make_pipeline(read, LogisticRegression())
    near = make_pipeline(read, KNeighborsTransformer(n_neighbors=5))
    model = fit_few(rows, estimator=estimator, neighbors=near)
    assert (model.transduction_ == TRUTH).mean() > 0.9
    assert model.predict_proba(rows[:2]).shape == (2, 3)
    around = fit_few(rows, estimator=estimator, graph=nx.to_scipy_sparse_array(nx.cycle_graph(60)))
    assert around.transduction_.shape == (60,)
    with pytest.raises(ValueError, match=r"Rows of another kind.* need neighbors=make_pipeline"):
        fit_few(rows, estimator=estimator)


def test_summary(fitted):
    text, known = fitted.summary(), set(np.flatnonzero(Y >= 0).tolist())
    near = fitted.hood_
    edges = {(int(a), int(b)) for a, b in zip(near.source, near.target, strict=True) if a < b}
    agree = [LABELS[a] == LABELS[b] for a, b in edges if {a, b} <= known]
    assert text.startswith("300 rows, 75 labels of 3 classes\nneighbours agree in ")
    assert f"agree in {np.mean(agree):.0%} of {len(agree)} pairs" in text
    assert fitted.stacked_.summary() in text
    line = fit_few(graph=csr_matrix((60, 60))).summary().split("\n")[1]
    assert line == "no two neighbours have labels: it is unknown how often neighbours agree"


def some(*numbers):
    """The first labels of each species, so many of each."""
    y = np.full(150, -1)
    for label, number in enumerate(numbers):
        y[50 * label : 50 * label + number] = label
    return y


@pytest.mark.filterwarnings("ignore:The least populated class")
@pytest.mark.parametrize(("numbers", "folds"), [((2, 2), 2), ((3, 2, 2), 3), ((2, 9), 5)])
def test_folds_yield_to_few_labels(numbers, folds):
    model = fit_iris(some(*numbers))
    assert len(model._parts) == folds
    assert np.isfinite(model.label_distributions_).all()
    assert model.predict_proba(IRIS[:2]).shape == (2, len(numbers))


def test_rows_without_a_label_have_no_score():
    model = fit_iris(np.where(KNOWN, SPECIES, -1))
    right = (model.predict(IRIS) == SPECIES)[KNOWN].mean()
    for missing in (-1, None, np.nan, np.ma.masked):
        y = [label if known else missing for label, known in zip(SPECIES, KNOWN, strict=True)]
        assert model.score(IRIS, y) == right
        assert model.score(IRIS, y, sample_weight=1.0 * KNOWN) == right
        with pytest.raises(ValueError, match="y must hold a label"):
            model.score(IRIS[:3], [missing] * 3)


class NotANumber(LogisticRegression):
    def predict_proba(self, X):
        return super().predict_proba(X) * np.where(np.arange(len(X)) == 3, np.nan, 1)[:, None]


def frame_with(bad):
    frame = pd.DataFrame(ROWS).astype(object)
    frame.iloc[3, 1] = bad
    return frame


UNLABELLED = r"-1, NaN and None mean unlabelled.*label another row"
NUMERIC = "default neighbours need numeric rows without missing"
REFUSALS = [
    (lambda: fit(neighbors=StandardScaler()), "end it in a KNeighborsTransformer"),
    (lambda: fit(estimator=LinearSVC()), "must have predict_proba, got LinearSVC"),
    (lambda: fit_few(estimator=NotANumber()), r"estimator gives 1 of 60 rows .* first row 3"),
    (lambda: fit(y=[0] * 10), r"y must have shape \(300,\)"),
    (lambda: fit(y=np.r_[0, np.ones(299)]), "two labelled rows"),
    (lambda: fit(pd.DataFrame(ROWS), pd.Series(Y)[::-1]), r"y must .* rows in the order of X"),
    (lambda: fit(y=np.linspace(0, 1, 300)), "bin them"),
    (lambda: fit_few(y=np.arange(60)), r"got \{0: 1, .* 7: 1\} \.\.\. of n_samples=60"),
    *((lambda y=y: fit_iris(y), UNLABELLED) for y in (some(1, 4), np.where(SPECIES == 0, 1, -1))),
    *((lambda bad=bad: fit(frame_with(bad)), NUMERIC) for bad in ("text", np.nan)),
    (lambda: fit_few(np.ma.array(FEW_ROWS, mask=FEW_ROWS > 3)), r"pass X.filled\(np.nan\)"),
    (lambda: fit_few(graph=csr_matrix((30, 30))), r"graph must have 60 nodes, one for.* got 30"),
    (lambda: fit_few(graph=csr_matrix(np.eye(30))), "graph must have 60 nodes, one for.* got 30"),
    (lambda: fit_iris([0, "spam", "spam"] * 50), "labels of one type, got 0 and 'spam'"),
    (lambda: fit_iris(np.where(KNOWN, NAMES, "nan").astype(str)), "y holds the text 'nan', which"),
]  # fmt: skip


# scikit-learn 1.6 says so first.
@pytest.mark.filterwarnings("ignore:The number of unique classes")
@pytest.mark.parametrize(("call", "message"), REFUSALS)
def test_refusals(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_without_scikit_learn_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(ImportError, match=r"tables need sklearn .*: pip install '\.\[examples\]'"):
        importlib.reload(tabular)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_checks_of_scikit_learn():
    model = QuickClassifier(LogisticRegression(), random_state=0)
    failed = {}
    for estimator, check in estimator_checks_generator(model):
        name = getattr(check, "func", check).__name__
        try:
            if name not in LONG:
                check(estimator)
        except SkipTest:
            continue
        except (AssertionError, TypeError, ValueError) as error:
            failed[name] = str(error)
    assert failed.keys() == EXPECTED.keys(), failed


def test_a_fit_that_fails_leaves_the_last_one():
    class Interrupted(LogisticRegression):
        def fit(self, rows, y):
            if 10 in y:
                raise KeyboardInterrupt
            return super().fit(rows, y)

    model = QuickClassifier(Interrupted(), random_state=0).fit(FEW_ROWS, FEW_Y)
    before = model.predict_proba(FEW_ROWS[:3])
    with pytest.raises(KeyboardInterrupt):
        model.fit(FEW_ROWS, np.where(FEW_Y < 0, -1, 10 * FEW_Y))
    with pytest.raises(ValueError, match="node id 99"):
        model.fit(FEW_ROWS, FEW_Y, graph=[[0], [99]])
    assert np.array_equal(model.predict_proba(FEW_ROWS[:3]), before)
