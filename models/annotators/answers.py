# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyro_nmm.arguments import as_tensor, check_order, expect_device
from pyro_nmm.edges import edges_of
from pyro_nmm.labels import as_array, check_names, check_same_order, is_missing

#: Columns of a data frame with a row for every answer, as crowd-kit has it.
LONG = {"task", "worker", "label"}


class Answers(NamedTuple):
    """Answers ``(N, M)`` as ``torch.long`` with -1 for missing ones, and the names of labels and
    annotators where the data have names."""

    table: Tensor
    labels: list[str] | None = None
    annotators: list | None = None


def read_answers(data: Any, num_nodes: int, device: torch.device) -> Answers:
    """Answers of a tensor, an array or a data frame, wide or long; text labels are sorted."""
    annotators, categories = None, set()
    if hasattr(data, "tocsr") or getattr(data, "layout", torch.strided) != torch.strided:
        cure = f"pass a dense one with -1 for missing ones, or a data frame{long_form([])}"
        raise ValueError(f"answers is a sparse matrix, in which label 0 may be missing: {cure}")
    if hasattr(data, "columns"):
        kinds = [data["label"].dtype] if set(data.columns) >= LONG else data.dtypes
        categories = {str(name) for kind in kinds for name in getattr(kind, "categories", ())}
        data = _wide(data, num_nodes) if set(data.columns) >= LONG else data
        annotators = list(data.columns)
    check_order("answers", data)
    try:
        found, labels = _array("answers", data), None
    except ValueError as error:
        raise ValueError(f"{error}{long_form(annotators)}") from None
    if isinstance(found, np.ndarray) and found.dtype.kind in "OUT":
        found, labels = _text_as_numbers(found, categories)
    table = whole_answers(found, num_nodes, device, annotators)
    refuse_silent(table, annotators)
    return Answers(table, labels, annotators)


def long_form(columns: list | None) -> str:
    """What an error adds about a data frame, which may have a row for each answer."""
    hint = "; a row for each answer needs the columns task, worker, label"
    return "" if columns is None else f"{hint}{f', got {columns[:8]}' if columns else ''}"


def refuse_silent(table: Tensor, annotators: list | None = None) -> None:
    """Every annotator has answers."""
    silent = (table == -1).all(0)
    if table.numel() and silent.all():
        raise ValueError("answers holds no answer: all are -1 or NaN")
    if silent.any():
        number = int(silent.nonzero()[0])
        name = number if annotators is None else annotators[number]
        raise ValueError(f"answers has none of annotator {name}: leave that column out")


def check_number(
    labels: list[str] | None, number: int, all_of_them: bool, columns: list | None
) -> None:
    """As many names of labels as there are answers, if they have names."""
    if not labels:
        return
    some = f"{labels[:8]}{' ...' * (len(labels) > 8)}"
    if len(labels) > number:
        must = f"name at most {number} labels (num_labels)"
        raise ValueError(f"answers must {must}, got {len(labels)}: {some}{long_form(columns)}")
    if all_of_them and len(labels) < number:
        cure = f"pass num_labels={len(labels)}, or pandas categories that name all"
        raise ValueError(f"answers must name {number} labels, got {len(labels)}: {some}; {cure}")


def _array(name: str, data: Any) -> Any:
    """A data frame as an array, and an array of numbers and None as floats."""
    found = as_array(name, data.to_numpy() if hasattr(data, "to_numpy") else data)
    if isinstance(found, np.ndarray) and found.dtype.kind in "OUT":
        plain = [None if _no_name(each) else each for each in found.flat]
        check_names(name, [each for each in plain if each is not None])
        if not any(isinstance(each, str) for each in plain):
            return np.array(plain, dtype=float).reshape(found.shape)
    return found


def _wide(data: Any, num_nodes: int) -> Any:
    wrong = ~data["task"].isin(range(num_nodes))
    if wrong.any():
        task = data["task"][wrong].iloc[0]
        cure = "map ids to nodes; Data(edge_index=..., num_nodes=N) counts nodes without edges"
        must = f"answers must have node ids 0..{num_nodes - 1} as tasks"
        raise ValueError(f"{must}, got {task} ({type(task).__name__}): {cure}")
    twice = data.duplicated(["task", "worker"])
    if twice.any():
        task, worker = data[["task", "worker"]][twice].iloc[0]
        raise ValueError(f"answers holds two labels of worker {worker} for task {task}")
    return data.pivot(index="task", columns="worker", values="label").reindex(range(num_nodes))


def _text_as_numbers(table: np.ndarray, categories: set[str]) -> tuple[np.ndarray, list[str]]:
    missing = np.array([_no_name(each) for each in table.flat], dtype=bool)
    text = table.flat[~missing]
    labels = np.array(sorted({*text.tolist(), *categories}), dtype=str)
    found = np.full(table.size, -1)
    found[~missing] = np.searchsorted(labels, text.astype(str))
    return found.reshape(table.shape), labels.tolist()


def _no_name(answer: Any) -> bool:
    """Arrays of text have no -1 but its text."""
    return answer in ("-1", "") if isinstance(answer, str) else is_missing(answer)


def whole_answers(
    data: Any, num_nodes: int, device: torch.device, columns: list | None = None
) -> Tensor:
    """Answers of a tensor or an array of numbers as ``torch.long``; NaN is -1."""
    if isinstance(data, np.ndarray) and data.dtype.kind in "iuf":
        data = as_tensor("answers", data, device)
    must = f"answers must be integers or text of shape ({num_nodes}, M), -1 or NaN if missing"
    if not isinstance(data, Tensor) or data.dtype == torch.bool or data.is_complex():
        kind = data.dtype if isinstance(data, Tensor | np.ndarray) else type(data)
        raise ValueError(f"{must}, got {kind}")
    if data.dim() != 2 or len(data) != num_nodes:
        raise ValueError(f"{must}, got {tuple(data.shape)}{long_form(columns)}")
    expect_device("answers", data, device)
    if data.is_floating_point():
        data = data.masked_fill(data.isnan(), -1)
        if (part := data != data.round()).any() or data.isinf().any():
            raise ValueError(f"{must}, got {data[part | data.isinf()][0].item()}")
    return data.long()


def check_beside(answers: Any, **tables: Any) -> None:
    """Known labels and probabilities have a row for each node, in the order of wide answers."""
    for name, values in tables.items():
        if not set(getattr(answers, "columns", ())) >= LONG:
            check_same_order(name, values, "answers", answers)


def known_labels(
    known: Any, num_nodes: int, labels: list[str] | int, device: torch.device
) -> Tensor:
    """``(N,)`` true labels, -1 where unknown, of numbers with NaN, or of names."""
    check_order("known", known)
    found = _array("known", known)
    named = isinstance(found, np.ndarray) and found.dtype.kind in "OUT"
    if isinstance(labels, list) and named:
        place = {name: number for number, name in enumerate(labels)} | {None: -1}
        names = [None if _no_name(each) else each for each in found.flat]
        text = [place.get(name, len(labels)) for name in names]
        if len(labels) in text:
            name = str(names[text.index(len(labels))])
            raise ValueError(f"known holds {name!r}, which no annotator answers: labels {labels}")
        found = torch.tensor(text, device=device).view(found.shape)
    if isinstance(found, Tensor) or (isinstance(found, np.ndarray) and found.dtype.kind in "iuf"):
        found = as_tensor("known", found, device)
    must = f"known must hold integer labels of shape ({num_nodes},), -1 or NaN where unknown"
    if not isinstance(found, Tensor) or found.shape != (num_nodes,) or found.dtype == torch.bool:
        got = (tuple(found.shape), found.dtype) if isinstance(found, Tensor) else type(known)
        raise ValueError(f"{must}, got {got}")
    expect_device("known", found, device)
    if found.is_floating_point():
        found = found.masked_fill(found.isnan(), -1)
    if isinstance(labels, list) and not named and (found >= 0).any():
        raise ValueError(f"known must name labels as answers do, {labels}, got {found.dtype}")
    number = labels if isinstance(labels, int) else len(labels)
    wrong = (found != found.long()) | (found < -1) | (found >= number)
    if wrong.any():
        raise ValueError(f"{must} and below {number} elsewhere, got {found[wrong][0].item()}")
    return found.long()


def edges_and_size(graph: Any, answers: Any) -> tuple[Tensor, int]:
    """Edges and the number of nodes of a graph that is no neighborhood."""
    edges, size = edges_of(graph)
    if size is not None:
        return edges, size
    top = int(edges.max()) if edges.numel() else -1
    if set(getattr(answers, "columns", ())) >= LONG:
        return edges, top + 1
    number = answers.shape[0] if hasattr(answers, "shape") else len(answers)
    if top >= number:  # nodes without edges have answers
        must = f"answers must have a row for each node, got {number}: -1 or NaN is no answer"
        columns = list(answers.columns) if hasattr(answers, "columns") else None
        raise ValueError(f"edge_index holds node id {top}, but {must}{long_form(columns)}")
    return edges, number
