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


def test_without_scikit_learn_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(ImportError, match=r"tables need sklearn .*: pip install '\.\[examples\]'"):
        importlib.reload(tabular)
