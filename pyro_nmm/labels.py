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
_PERHAPS = {"nan", "none", "<na>", "nat", "null", "na", "n/a", "#n/a"}


def is_missing(label: Any) -> bool:
    """Whether a label is -1, NaN, None, masked, or a missing value of pandas."""
    if label is None or label is np.ma.masked:
        return True
    try:
        return bool(label != label or label == -1)
    except TypeError:  # pandas.NA is neither equal nor different
        return True


def as_array(name: str, labels: Any) -> Any:
    """Lists, masked arrays and bytes as arrays, None where masked; other data as they are."""
    if isinstance(labels, list | tuple):
        labels = np.asarray(labels, dtype=object)
        kinds = {_kind(label) for label in labels.flat}
        if kinds == {"list"}:  # which NumPy makes no table of
            raise ValueError(f"{name} must hold lists of one length")
        if len(kinds) == 1 and kinds != {"MaskedConstant"}:
            labels = np.asarray(labels.tolist())
    if isinstance(labels, np.ma.MaskedArray):
        mask, labels = np.ma.getmaskarray(labels), labels.data.astype(object)
        labels[mask] = None
    if isinstance(labels, np.ndarray) and labels.dtype.kind == "S":
        labels = labels.astype(str)
    if isinstance(labels, np.ndarray) and labels.dtype == object:
        decoded = np.empty(labels.size, dtype=object)
        texts = (text.decode() if isinstance(text, bytes) else text for text in labels.flat)
        decoded[:] = list(texts)
        return decoded.reshape(labels.shape)
    return labels


def in_label_order(name: str, table: Any, labels: list[str] | None = None) -> Any:
    """Columns that are named by labels, or numbered by them, in the order of the labels."""
    columns = {str(column): column for column in getattr(table, "columns", ())}
    if not columns:
        return table
    named = all(isinstance(column, str) for column in columns.values())
    if labels and named and set(columns) != set(labels):
        raise ValueError(f"{name} must have the columns {labels[:8]}, got {[*columns][:8]}")
    numbers = [str(number) for number in range(len(columns))]
    for order in (labels or [], numbers):
        if set(order) == set(columns):
            return table[[columns[label] for label in order]]
    return table


def check_same_order(name: str, values: Any, beside: str, others: Any) -> None:
    """Refuse pandas data whose index is another order of the index of other data."""
    index, wanted = (getattr(data, "index", ()) for data in (values, others))
    if callable(index) or callable(wanted) or np.array_equal(index, wanted):  # of lists
        return
    if Counter(index) == Counter(wanted):
        cure = f"{name}.loc[{beside}.index], or {name}.to_numpy() to keep the order"
        must = f"have its rows in the order of {beside}"
        raise ValueError(f"{name} must {must}, got another order of the same index: pass {cure}")


def check_names(name: str, labels: Iterable[Any]) -> None:
    """Refuse labels of several types, and text that spells a missing value; warn if it may."""
    labels = list(labels)
    kinds: dict[str, Any] = {}
    for label in labels:
        kinds.setdefault(_kind(label), label)
    some = " and ".join(map(repr, kinds.values()))
    if len(kinds) > 1:
        cure = "give all as text, or all as numbers"
        raise ValueError(f"{name} must hold labels of one type, got {some}: {cure}")
    if not kinds.keys() <= {"text", "number", "bool"}:
        raise ValueError(f"{name} must hold numbers or text, got {some}: pass their text")
    for text, number in Counter(labels if "text" in kinds else ()).items():
        plain = text.strip()
        if plain in SPELLED:
            cure = "for no label use the number -1, NaN or None, in a list or an object array"
            raise ValueError(
                f"{name} holds the text {str(text)!r} ({number} times), which spells a missing "
                f"value: {cure}; rename a label of that name"
            )
        if plain.lower() in _PERHAPS:
            warnings.warn(
                f"{name} holds the text {str(text)!r} ({number} times), which counts as a label. "
                f"For no label use the number -1, NaN or None.",
                stacklevel=4,
            )


def _kind(label: Any) -> str:
    """``text``, ``number``, ``bool``, or the name of another type."""
    if isinstance(label, str):
        return "text"
    if isinstance(label, bool | np.bool_):
        return "bool"
    return "number" if isinstance(label, Number) else type(label).__name__
