# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Labels as users have them: missing ones, and text that may spell them."""

import numpy as np
import pandas as pd
import pytest

from pyro_nmm.labels import as_array, check_names, is_missing

ONE = [1, 0, -2, 0.5, True, "", "nan", "-1", b"a", ("a", 1)]


@pytest.mark.parametrize("label", [-1, -1.0, np.nan, None, np.ma.masked, pd.NA, pd.NaT])
def test_missing(label):
    assert is_missing(label)
    assert is_missing(as_array("y", [label, 1]).tolist()[0])
    assert not any(map(is_missing, ONE))


@pytest.mark.parametrize("text", ["NA", "none", "Null", "n/a", "NAN", " Nan"])
def test_text_that_may_be_a_missing_value(text):
    """NA is a country too."""
    with pytest.warns(UserWarning, match=f"y holds the text '{text}' .2 times.*as a label"):
        check_names("y", ["oak", text, text])


@pytest.mark.parametrize("names", [["nano", "nil", "0", "-10"], [1, 2.5, np.int8(3)], [True], []])
def test_names_of_labels(names):
    check_names("y", names)


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ([0, 1, np.nan], [0.0, 1.0, np.nan]),
        ([b"a", None, b"b"], ["a", None, "b"]),
        (np.array([b"a", b"b"]), ["a", "b"]),
        (["a", 1], ["a", 1]),
        (np.ma.array([1, 2], mask=[True, False]), [None, 2]),
        (np.ma.array(["a", "b"], mask=[True, False]), [None, "b"]),
        ([[1], [2]], [[1], [2]]),
    ],
)
def test_arrays_of_labels(labels, expected):
    assert str(as_array("y", labels).tolist()) == str(expected)


def test_other_types_are_refused():
    with pytest.raises(ValueError, match="y must hold lists of one length"):
        as_array("y", [[1], [2, 3]])
    with pytest.raises(ValueError, match=r"y must hold numbers or text, got Timestamp.*their text"):
        check_names("y", [pd.Timestamp("2020")])
