# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Labels as users have them: numbers or text, some of them missing."""

from collections import Counter
from numbers import Number
from typing import Any

import numpy as np

#: Text that ``str``, pandas, JSON and databases make of a missing value, and that names no label.
SPELLED = {"", "-1", "-1.0", "nan", "NaN", "None", "<NA>", "NaT", "null", "NULL"}


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
    kind = labels.dtype.kind if isinstance(labels, np.ndarray) else ""
    return labels.astype(str) if kind == "S" else labels


def in_label_order(table: Any) -> Any:
    """Columns that are numbered by labels in the order of the labels."""
    columns = {str(column): column for column in getattr(table, "columns", ())}
    order = [str(number) for number in range(len(columns))]
    numbered = columns and {*order} == {*columns}
    return table[[columns[label] for label in order]] if numbered else table


def check_same_order(name: str, values: Any, beside: str = "", others: Any = None) -> None:
    """Refuse pandas data whose index is another order of 0, 1, ..., or of other data's index."""
    index = getattr(values, "index", ())
    index = () if callable(index) else index  # of a list
    wanted = getattr(others, "index", index) if beside else range(len(index))
    if callable(wanted) or np.array_equal(index, wanted):
        return
    if Counter(index) == Counter(wanted):
        cure = f"{name}.loc[{beside}.index]" if beside else f"{name}.sort_index()"
        cure += f", or {name}.to_numpy() to keep the order"
        must = f"have its rows in the order of {beside or 'their numbers 0..N-1'}"
        raise ValueError(f"{name} must {must}, got another order of the same index: pass {cure}")


def check_names(name: str, labels: list) -> None:
    """Refuse labels of several types, and text that spells a missing value."""
    kinds: dict[str, Any] = {}
    for label in labels:
        kinds.setdefault(_kind(label), label)
    some = " and ".join(map(repr, kinds.values()))
    if len(kinds) > 1:
        cure = "give all as text, or all as numbers"
        raise ValueError(f"{name} must hold labels of one type, got {some}: {cure}")
    if not kinds.keys() <= {"text", "number", "bool"}:
        raise ValueError(f"{name} must hold numbers or text, got {some}: pass their text")
    spelled = [text for text in labels if "text" in kinds and text.strip() in SPELLED]
    if spelled:
        got = f"the text {str(spelled[0])!r}, which spells a missing value"
        cure = "for no label use the number -1, NaN or None, in a list or an object array"
        raise ValueError(f"{name} holds {got}: {cure}; rename a label of that name")


def _kind(label: Any) -> str:
    """``text``, ``number``, ``bool``, or the name of another type."""
    for kind, types in {"text": str, "bool": bool | np.bool_, "number": Number}.items():
        if isinstance(label, types):
            return kind
    return type(label).__name__
