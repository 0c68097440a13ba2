# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Labels as users have them: numbers or text, some of them missing."""

import warnings
from collections import Counter
from collections.abc import Iterable
from numbers import Number
from typing import Any

import numpy as np

#: Text that ``str``, pandas, JSON and databases make of a missing value, and that names no label.
SPELLED = {"", "-1", "-1.0", "nan", "NaN", "None", "<NA>", "NaT", "null", "NULL"}
#: Text that may mean the same, or name a label, such as the country NA; in lower case.
PERHAPS = {"nan", "none", "<na>", "nat", "null", "na", "n/a", "#n/a"}


def is_missing(label: Any) -> bool:
    """Whether a label is -1, NaN, None, masked, or a missing value of pandas."""
    if label is None or label is np.ma.masked:
        return True
    try:
        return bool(label != label or label == -1)
    except TypeError:  # pandas.NA is neither equal nor different
        return True


def as_array(labels: Any) -> Any:
    """
    Lists, masked arrays and bytes as arrays, None where masked. Numbers beside text stay numbers.
    Other data are returned as they are.
    """
    if isinstance(labels, list | tuple):
        labels = np.asarray(labels, dtype=object)
        if len({_kind(each) for each in labels.flat}) == 1:
            labels = np.asarray(labels.tolist())
    if isinstance(labels, np.ma.MaskedArray):
        mask, labels = np.ma.getmaskarray(labels), labels.data.astype(object)
        labels[mask] = None
    if isinstance(labels, np.ndarray) and labels.dtype.kind == "S":
        labels = labels.astype(str)
    if isinstance(labels, np.ndarray) and labels.dtype == object:
        found = np.empty(labels.shape, dtype=object)
        found.flat = [each.decode() if isinstance(each, bytes) else each for each in labels.flat]
        return found
    return labels


def check_same_order(name: str, values: Any, beside: str, others: Any) -> None:
    """Refuse pandas data whose index is another order of the index of other data."""
    found, wanted = (getattr(each, "index", None) for each in (values, others))
    if not hasattr(found, "equals") or not hasattr(wanted, "equals") or found.equals(wanted):
        return
    if Counter(found) == Counter(wanted):
        cure = f"{name}.loc[{beside}.index], or {name}.to_numpy() to keep the order"
        raise ValueError(
            f"{name} has rows in another order than the index of {beside}: pass {cure}"
        )


def check_names(name: str, labels: Iterable[Any]) -> None:
    """
    Refuse labels of several types, and text that spells a missing value. Warn of text that may
    spell one.

    >>> check_names("y", ["oak", "NaN", "yew", "NaN"])
    Traceback (most recent call last):
        ...
    ValueError: y holds the text 'NaN' (2 times), which spells a missing value: for no label use ...
    """
    labels, kinds = list(labels), {}
    for label in labels:
        kinds.setdefault(_kind(label), label)
    if len(kinds) > 1:
        some = " and ".join(map(repr, kinds.values()))
        cure = "give all as text, or all as numbers"
        raise ValueError(f"{name} must hold labels of one type, got {some}: {cure}")
    for text, number in Counter(labels if "text" in kinds else ()).items():
        plain = text.strip()
        if plain in SPELLED:
            cure = "for no label use the number -1, NaN or None, in a list or an object array"
            raise ValueError(
                f"{name} holds the text {str(text)!r} ({number} times), which spells a missing "
                f"value: {cure}; rename a label of that name"
            )
        if plain.lower() in PERHAPS:
            warnings.warn(
                f"{name} holds the text {str(text)!r} ({number} times), which counts as a label. "
                f"For no label use the number -1, NaN or None.",
                stacklevel=4,
            )


def _kind(label: Any) -> str:
    if isinstance(label, str):
        return "text"
    if isinstance(label, bool | np.bool_):
        return "bool"
    return "number" if isinstance(label, Number) else type(label).__name__
