# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The scikit-learn classifier on a graph of nearest rows."""

import math
import pickle
from contextlib import nullcontext
from unittest import SkipTest

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.sparse import csr_matrix
from sklearn.base import clone
from sklearn.datasets import load_digits, make_blobs
from sklearn.ensemble import RandomForestClassifier
from sklearn.exceptions import DataConversionWarning
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss
from sklearn.model_selection import StratifiedKFold, cross_val_score
from sklearn.neighbors import KNeighborsTransformer, kneighbors_graph
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, StandardScaler
from sklearn.svm import LinearSVC
from sklearn.utils.estimator_checks import estimator_checks_generator

from pyro_nmm import Neighborhood
from pyro_nmm.models import StackedNMM
from pyro_nmm.models.stacked import bounded_temperature
from pyro_nmm.models.stacked.fit import FitOptions
from pyro_nmm.models.tabular import NeighborMixtureClassifier
from pyro_nmm.models.tabular.classifier import TABLES
from pyro_nmm.models.tabular.temperature import averaged_temperature, temperature_posterior

#: Checks of scikit-learn that it does not pass, and why.
EXPECTED = {"check_classifiers_classes": "-1 is a row without a label"}
#: Checks that it passes in more than a few seconds.
LONG = {"check_classifiers_train", "check_estimators_dtypes", "check_fit_score_takes_y"}
DEFAULTS = FitOptions.__init__.__defaults__


@pytest.fixture(autouse=True)
def single_precision():
    torch.set_default_dtype(torch.float)


@pytest.fixture(scope="module", autouse=True)
def few_steps():
    """Most of these tests are of the interface."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FitOptions.__init__, "__defaults__", (30, *DEFAULTS[1:]))
        yield


@pytest.fixture
def all_steps(monkeypatch):
    monkeypatch.setattr(FitOptions.__init__, "__defaults__", DEFAULTS)


@pytest.fixture(scope="module")
def blobs():
    rows, labels = make_blobs(300, 4, centers=3, cluster_std=4.0, random_state=0)
    return rows, labels, np.where(np.arange(300) % 4 == 0, labels, -1)


@pytest.fixture(scope="module")
def fitted(blobs):
    rows, _, y = blobs
    return NeighborMixtureClassifier(LogisticRegression(), random_state=0).fit(rows, y)


def test_digits_with_few_labels(all_steps):
    """Better than the forest alone, in accuracy and in log loss, by a wide margin."""
    rows, labels = load_digits(return_X_y=True)
    known = np.random.default_rng(0).permutation(1797) < 200
    forest = RandomForestClassifier(50, random_state=0)
    model = NeighborMixtureClassifier(forest, random_state=0)
    model.fit(rows, np.where(known, labels, -1))
    alone = forest.fit(rows[known], labels[known]).predict_proba(rows[~known])
    probs = model.label_distributions_[~known]
    assert log_loss(labels[~known], probs) < 0.5 * log_loss(labels[~known], alone)
    assert (probs.argmax(1) == labels[~known]).mean() > 0.02 + (
        alone.argmax(1) == labels[~known]
    ).mean()


def test_it_is_a_fit_of_folds(blobs):
    """Written out with the library's own parts."""
    rows, labels, y = blobs
    model = NeighborMixtureClassifier(LogisticRegression(), cv=3, random_state=5).fit(rows, y)
    scaled = StandardScaler().fit_transform(rows)
    near = torch.from_numpy(np.stack(kneighbors_graph(scaled, 10).nonzero())).long()
    hood = Neighborhood(torch.cat([near, near.flip(0)], 1), 300)
    assert torch.equal(model.hood_.source, hood.source)
    known, folds = torch.from_numpy(y >= 0), torch.full((300,), -1)
    parts = [each.predict_proba(rows) for each in model._parts]
    scores = torch.from_numpy(np.stack(parts)).clamp(min=1e-3).log().float()
    for fold, part in enumerate(model._parts):  # the fold is what a part has not seen
        seen = [np.allclose(clone(part).fit(rows[m], y[m]).coef_, part.coef_) for m in held(y, 3)]
        folds[torch.from_numpy(held_rows(y, 3)[seen.index(True)])] = fold
    with torch.random.fork_rng():
        torch.manual_seed(5)
        stacked = StackedNMM(3, prior=TABLES).fit(
            hood, scores, torch.from_numpy(labels), folds=folds
        )
    torch.testing.assert_close(stacked.state_dict(), model.stacked_.state_dict())
    whole = torch.from_numpy(model.estimator_.predict_proba(rows)).clamp(min=1e-3).log().float()
    truth = torch.from_numpy(labels)[known]
    held_out = scores[folds[known], known.nonzero()[:, 0]]
    given = temperature_posterior(held_out, truth)
    mean = [averaged_temperature(each, given) for each in (whole, *scores)]
    mean = (mean[0] + torch.stack(mean[1:]).mean(0)) / 2
    own = [bounded_temperature(held_out, truth, folds[known] == k) for k in range(3)]
    own = torch.stack([(part / t).softmax(1) for part, t in zip(scores, own, strict=True)]).mean(0)
    pooled = mean.log() * stacked.pool.temperature
    posterior = stacked.posterior(
        hood, pooled, torch.from_numpy(labels), known, num_draws=0, beside=(mean + own) / 2
    )
    np.testing.assert_allclose(posterior.marginals(), model.label_distributions_, atol=1e-5)


def test_posterior_of_the_temperature():
    """By hand: a normal prior of its logarithm, and each label's probability."""
    x, grid = [[1.0, 0.0], [0.5, 2.0]], [math.exp(-3 + k / 10) for k in range(61)]
    found, weights = temperature_posterior(torch.tensor(x), torch.tensor([0, 0]))
    np.testing.assert_allclose(found, grid, rtol=1e-5)
    expected = [
        math.exp(-(math.log(t) ** 2) / 2) / (1 + math.exp(-1 / t)) / (1 + math.exp(1.5 / t))
        for t in grid
    ]
    np.testing.assert_allclose(weights, np.array(expected) / sum(expected), rtol=1e-5)


def held_rows(y, cv):
    from sklearn.model_selection import StratifiedKFold

    rows = np.flatnonzero(y >= 0)
    splits = StratifiedKFold(cv, shuffle=True, random_state=5).split(rows, y[rows])
    return [rows[out] for _, out in splits]


def held(y, cv):
    rows = np.flatnonzero(y >= 0)
    return [np.setdiff1d(rows, out) for out in held_rows(y, cv)]


def test_new_rows_join_the_graph(fitted, blobs):
    """Those that were unlabelled in the fit get nearly the same probabilities as new rows."""
    rows, labels, y = blobs
    probs = fitted.predict_proba(rows[y < 0])
    np.testing.assert_allclose(probs.sum(1), 1, atol=1e-5)
    assert np.abs(probs - fitted.label_distributions_[y < 0]).mean() < 0.02
    one_by_one = np.concatenate([fitted.predict_proba(rows[i : i + 1]) for i in range(5)])
    np.testing.assert_allclose(one_by_one, fitted.predict_proba(rows[:5]), atol=1e-5)
    assert fitted.score(rows, labels) == (fitted.predict(rows) == labels).mean()


def test_joint_queries(fitted):
    assert fitted.posterior_.sample((5,)).shape == (5, 300)
    assert fitted.posterior_.counts([torch.arange(300)], label=1).shape[-1] == 1
    pair = fitted.posterior_.pairwise(torch.tensor([[1], [2]]))
    np.testing.assert_allclose(pair.sum((1, 2)), 1, atol=1e-5)


@pytest.mark.parametrize("kind", ["strings", "nan", "none", "column", "series", "NA"])
def test_labels_of_any_type(fitted, blobs, kind):
    rows, _, y = blobs
    names = np.array(["ash", "birch", "cedar"], dtype=object)[np.maximum(y, 0)]
    given = {
        "strings": np.where(y < 0, -1, names),
        "nan": np.where(y < 0, np.nan, y),
        "none": np.where(y < 0, None, names),
        "column": y[:, None],
        "series": pd.Series(names).where(y >= 0),
        "NA": pd.Series(names, dtype="string").where(y >= 0),
    }[kind]
    column = pytest.warns(DataConversionWarning) if kind == "column" else nullcontext()
    with column:
        model = clone(fitted).fit(rows, given)
    np.testing.assert_allclose(model.label_distributions_, fitted.label_distributions_)
    assert model.transduction_[0] == model.classes_[fitted.label_distributions_[0].argmax()]


def test_graphs(fitted, blobs):
    rows, _, y = blobs
    near = kneighbors_graph(StandardScaler().fit_transform(rows), 10)
    edges = torch.from_numpy(np.stack(near.nonzero()))
    for graph in (near, csr_matrix(near), torch.cat([edges, edges.flip(0)], 1)):
        model = clone(fitted).fit(rows, y, graph=graph)
        np.testing.assert_allclose(
            model.label_distributions_, fitted.label_distributions_, atol=1e-5
        )
    with pytest.raises(ValueError, match="cannot place new rows"):
        model.predict_proba(rows)


def test_habits_of_scikit_learn(fitted, blobs):
    rows, labels, _y = blobs
    again = pickle.loads(pickle.dumps(fitted))
    np.testing.assert_array_equal(again.predict_proba(rows[:3]), fitted.predict_proba(rows[:3]))
    model = clone(fitted).set_params(estimator__C=0.5, n_neighbors=5, cv=2)
    pipe = make_pipeline(StandardScaler(), model)
    assert cross_val_score(pipe, rows, labels, cv=2).mean() > 0.6
    frame = pd.DataFrame(rows, columns=list("abcd"))
    framed = clone(fitted).fit(frame, _y)
    np.testing.assert_allclose(framed.label_distributions_, fitted.label_distributions_)
    assert framed.predict_proba(frame[:2]).shape == (2, 3)


def test_neighbors_of_any_transformer(fitted, blobs):
    """The default written out; other columns and metrics; one that finds its own number."""
    rows, _, y = blobs
    near = make_pipeline(StandardScaler(), KNeighborsTransformer(n_neighbors=10))
    model = clone(fitted).set_params(neighbors=near).fit(rows, y)
    np.testing.assert_array_equal(model.label_distributions_, fitted.label_distributions_)
    only = make_pipeline(FunctionTransformer(lambda X: X[:, :1]), KNeighborsTransformer())
    first = clone(fitted).set_params(neighbors=only).fit(rows, y)
    assert first.hood_.num_edges < model.hood_.num_edges
    np.testing.assert_allclose(first.predict_proba(rows[:3]).sum(1), 1, atol=1e-5)
    other = clone(fitted).set_params(metric="manhattan").fit(rows, y)
    assert not torch.equal(other.hood_.source, model.hood_.source)
    sparse = clone(fitted).fit(csr_matrix(rows), y)
    assert torch.equal(sparse.hood_.source, model.hood_.source)


@pytest.mark.filterwarnings("ignore:hood")
def test_summary_of_edges_in_one_direction(fitted, blobs):
    rows, _, y = blobs
    near = fitted.hood_
    pairs = torch.stack([near.source, near.target])[:, near.source < near.target]
    both = torch.cat([pairs, pairs.flip(0)], 1)
    once, twice = (clone(fitted).fit(rows, y, graph=edges) for edges in (pairs, both))
    lines = [model.summary().split("\n")[1] for model in (once, twice)]
    assert lines[0] == lines[1]


def test_summary(fitted, blobs):
    rows, labels, y = blobs
    text = fitted.summary()
    assert text.startswith("300 rows, 75 labels of 3 classes\nneighbours agree in ")
    known = np.flatnonzero(y >= 0)
    near = fitted.hood_
    edges = {(int(a), int(b)) for a, b in zip(near.source, near.target, strict=True) if a < b}
    pairs = [(a, b) for a, b in edges if a in set(known) and b in set(known)]
    agree = np.mean([labels[a] == labels[b] for a, b in pairs])
    assert f"agree in {agree:.0%} of {len(pairs)} pairs" in text
    assert list(fitted.stacked_.evidence.nll) == [
        "classifier",
        "temperature scaling",
        "pool",
        "NMM",
    ]
    assert f"{float(fitted.stacked_.share):.3f}" in text
    unseen = [part.predict_proba(rows) for part in fitted._parts]
    folds = np.full(len(known), -1)
    for fold, (_, out) in enumerate(
        StratifiedKFold(5, shuffle=True, random_state=0).split(rows[known], labels[known])
    ):
        folds[out] = fold
    probs = np.clip([unseen[k][row] for k, row in zip(folds, known, strict=True)], 1e-3, 1)
    loss = log_loss(labels[known], probs / probs.sum(1, keepdims=True))
    assert fitted.stacked_.evidence.nll["classifier"] == pytest.approx(loss, rel=1e-4)


def test_random_states(blobs):
    """An integer repeats a fit, a generator continues."""
    rows, _, y = blobs
    state = np.random.RandomState(3)
    model = NeighborMixtureClassifier(LogisticRegression(), random_state=state)
    first = model.fit(rows, y).label_distributions_
    assert np.abs(first - model.fit(rows, y).label_distributions_).max() > 0
    again = model.set_params(random_state=np.random.RandomState(3)).fit(rows, y)
    np.testing.assert_array_equal(again.label_distributions_, first)


def test_zero_probabilities_are_clipped(blobs):
    rows, _, y = blobs
    forest = RandomForestClassifier(5, random_state=0)
    probs = NeighborMixtureClassifier(forest, clip=0.01).fit(rows, y).label_distributions_
    assert np.isfinite(probs).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cv": 1}, "cv must be"),
        ({"n_neighbors": 0}, "n_neighbors must be"),
        ({"clip": 0.0}, "clip must lie"),
        ({"y": [0] * 10}, r"y must have shape \(300,\)"),
        ({"y": np.full(300, -1)}, "two classes"),
        ({"y": np.r_[0, np.ones(299)]}, "two labelled rows"),
        ({"y": np.linspace(0, 1, 300)}, "bin them"),
        ({"y": np.where(np.arange(300) % 2, "-1", "oak")}, "the text '-1'"),
        (
            {"neighbors": KNeighborsTransformer(), "n_neighbors": 5},
            "have no effect beside neighbors",
        ),
        ({"neighbors": StandardScaler()}, "end it in a KNeighborsTransformer"),
        ({"estimator": LinearSVC()}, "must have predict_proba, got LinearSVC"),
    ],
)
def test_errors(blobs, change, message):
    rows, _, y = blobs
    model = NeighborMixtureClassifier(LogisticRegression())
    options = {name: value for name, value in change.items() if name != "y"}
    with pytest.raises(ValueError, match=message):
        model.set_params(**options).fit(rows, change.get("y", y))


@pytest.mark.parametrize("bad", ["text", np.nan])
def test_default_neighbours_need_numbers(blobs, bad):
    rows, _, y = blobs
    frame = pd.DataFrame(rows).astype(object)
    frame.iloc[3, 1] = bad
    with pytest.raises(ValueError, match="default neighbours need numeric rows without missing"):
        NeighborMixtureClassifier(LogisticRegression()).fit(frame, y)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_checks_of_scikit_learn(monkeypatch):
    """Of the interface, so few steps will do."""
    defaults = FitOptions.__init__.__defaults__
    monkeypatch.setattr(FitOptions.__init__, "__defaults__", (5, *defaults[1:-1], 2))
    model = NeighborMixtureClassifier(LogisticRegression(), cv=2, random_state=0)
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
