# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Few labels, and labels of a kind that the scikit-learn classifier has to explain."""

import importlib
import sys

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.datasets import load_iris
from sklearn.linear_model import LogisticRegression

from pyro_nmm.models import tabular
from pyro_nmm.models.stacked.fit import FitOptions

ROWS, SPECIES = load_iris(return_X_y=True)
KNOWN = np.arange(150) % 5 == 0


@pytest.fixture(autouse=True)
def few_steps(monkeypatch):
    torch.set_default_dtype(torch.float)
    defaults = FitOptions.__init__.__defaults__
    monkeypatch.setattr(FitOptions.__init__, "__defaults__", (5, *defaults[1:]))


def fitted(y, **options):
    model = tabular.NeighborMixtureClassifier(LogisticRegression(), random_state=0, **options)
    return model.fit(ROWS, y)


def some(*numbers):
    """The first labels of each species, so many of each."""
    y = np.full(150, -1)
    for label, number in enumerate(numbers):
        y[50 * label : 50 * label + number] = label
    return y


@pytest.mark.filterwarnings("ignore:The least populated class")
@pytest.mark.parametrize(
    ("numbers", "folds"), [((2, 2), 2), ((4, 4), 4), ((3, 2, 2), 3), ((2, 9), 5), ((5, 5), 5)]
)
def test_default_folds_yield_to_few_labels(numbers, folds):
    model = fitted(some(*numbers))
    assert len(model._parts) == len(model._fold_temperatures) == folds
    assert np.isfinite(model.label_distributions_).all()
    assert model.predict_proba(ROWS[:2]).shape == (2, len(numbers))


def test_chosen_folds_are_kept():
    assert len(fitted(some(4, 4), cv=2)._parts) == 2
    with pytest.raises(ValueError, match="n_splits=6"):
        fitted(some(4, 4), cv=6)


@pytest.mark.parametrize("y", [some(1, 4), np.where(SPECIES == 0, 1, -1)])
def test_refused_labels_say_what_is_unlabelled_and_the_cure(y):
    with pytest.raises(ValueError, match=r"-1, NaN and None mean unlabelled.*label another row"):
        fitted(y)


@pytest.mark.parametrize("kind", ["int64", "Int64", "Float64"])
def test_missing_labels_do_not_make_classes_floats(kind):
    model = fitted(pd.Series(SPECIES, dtype=kind).where(KNOWN))
    assert model.classes_.dtype == model.transduction_.dtype == int
    assert model.classes_.tolist() == [0, 1, 2]


def test_floats_without_nan_stay_floats():
    assert fitted(np.where(KNOWN, SPECIES, -1.0)).classes_.dtype == float


NAMES = np.array(["ash", "oak", "yew"], dtype=object)[SPECIES]
SPELLED = ["-1", "-1.0", "nan", "NaN", "None", "<NA>", "NaT", "null", "NULL", "", " ", " nan "]


@pytest.mark.parametrize("text", SPELLED)
def test_text_of_a_missing_value(text):
    """As ``astype(str)`` of a column makes it, or a file."""
    y = np.where(KNOWN, NAMES, text)
    with pytest.raises(ValueError, match=f"y holds the text {text!r} .120 times.*or None"):
        fitted(y.astype(str))
    with pytest.raises(ValueError, match=f"y holds the text {text!r}"):
        fitted(pd.Series(y, dtype="category"))


@pytest.mark.parametrize(
    ("two", "match"),
    [((0, "spam"), "0 and 'spam'"), ((1, "1"), "1 and '1'"), ((2, True), "2 and True")],
)
def test_labels_of_several_types(two, match):
    y = [two[0] if number % 2 else two[1] for number in range(150)]
    y[0] = two[0]
    for given in (y, np.array(y, dtype=object), pd.Series(y, dtype=object)):
        with pytest.raises(ValueError, match=f"y must hold labels of one type, got {match}"):
            fitted(given)


@pytest.mark.parametrize("labels", [SPECIES, NAMES.astype(str)])
def test_masked_labels_are_missing(labels):
    model, y = fitted(np.where(KNOWN, SPECIES, -1)), np.ma.array(labels, mask=~KNOWN)
    other = fitted(y)
    np.testing.assert_array_equal(other.label_distributions_, model.label_distributions_)
    assert other.classes_.tolist() == np.unique(labels).tolist()
    assert other.score(ROWS, y) == other.score(ROWS, list(y))


def test_labels_in_another_order_than_the_rows():
    y, model = (
        pd.Series(np.where(KNOWN, SPECIES, -1)),
        tabular.NeighborMixtureClassifier(LogisticRegression()),
    )
    other, frame = y.sample(frac=1, random_state=0), pd.DataFrame(ROWS)
    with pytest.raises(ValueError, match=r"y must have its rows in the order of X.*y.loc\[X.ind"):
        model.fit(frame, other)
    model.fit(frame, other.to_numpy()[np.argsort(other.index)])
    model.fit(frame, y.set_axis(np.arange(150) + 9))  # another index is not read


@pytest.mark.parametrize("missing", [-1, None, np.nan, np.ma.masked])
def test_rows_without_a_label_have_no_score(missing):
    model = fitted(np.where(KNOWN, SPECIES, -1))
    right = (model.predict(ROWS) == SPECIES)[KNOWN].mean()
    y = [label if known else missing for label, known in zip(SPECIES, KNOWN, strict=True)]
    assert model.score(ROWS, y) == right
    assert model.score(ROWS, y, sample_weight=1.0 * KNOWN) == right
    with pytest.raises(ValueError, match="y must hold a label"):
        model.score(ROWS[:3], [missing] * 3)


def test_without_scikit_learn_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(ImportError, match=r"tables need sklearn .*: pip install '\.\[examples\]'"):
        importlib.reload(tabular)
