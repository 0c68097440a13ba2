# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data

from pyro_nmm.expect import as_tensor, expect_device

#: Columns of a data frame with a row for every answer, as crowd-kit has it.
LONG = {"task", "worker", "label"}
#: What a data frame of another form may lack.
FORM = "a row for each answer needs the columns task, worker, label"
#: What stands for a missing answer beside text.
MISSING = ("None", "nan", "NaN", "<NA>", "-1", "-1.0")


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
        cure = f"pass a dense one with -1 for missing ones, or a data frame: {FORM}"
        raise ValueError(f"answers is a sparse matrix, in which label 0 may be missing: {cure}")
    if hasattr(data, "columns"):
        kinds = [data["label"].dtype] if set(data.columns) >= LONG else data.dtypes
        categories = {str(name) for kind in kinds for name in getattr(kind, "categories", ())}
        data = _wide(data, num_nodes) if set(data.columns) >= LONG else _in_order(data)
        annotators = list(data.columns)
    found, labels = _array(data), None
    if isinstance(found, np.ndarray) and found.dtype.kind in "OUST":
        found, labels = _text_as_numbers(found, categories)
    form = "" if annotators is None else f"; {FORM}"
    table = whole_answers(found, num_nodes, device, form)
    refuse_silent(table, annotators)
    return Answers(table, labels, annotators)


def refuse_silent(table: Tensor, annotators: list | None = None) -> None:
    """Every annotator has answers."""
    silent = (table == -1).all(0)
    if table.numel() and silent.all():
        raise ValueError("answers holds no answer: all are -1 or NaN")
    if silent.any():
        number = int(silent.nonzero()[0])
        name = number if annotators is None else annotators[number]
        raise ValueError(f"answers has none of annotator {name}: leave that column out")


def check_names(labels: list[str], number: int, all_of_them: bool) -> None:
    """As many names of labels as there are answers."""
    some = f"{labels[:8]}{' ...' * (len(labels) > 8)}"
    if len(labels) > number:
        must = f"name at most {number} labels (num_labels)"
        raise ValueError(f"answers must {must}, got {len(labels)}: {some}; {FORM}")
    if all_of_them and len(labels) < number:
        cure = f"pass num_labels={len(labels)}, or pandas categories that name all"
        raise ValueError(f"answers must name {number} labels, got {len(labels)}: {some}; {cure}")


def check_range(table: Tensor, number: int, cure: str) -> None:
    """Answers lie in ``0..number - 1``, or are -1."""
    low, top = int(table.min()), int(table.max())
    if low < -1 or top >= number:
        wrong = low if low < -1 else top
        must = f"lie in 0..{number - 1}, or be -1 for a missing one"
        raise ValueError(f"answers holds {wrong}, but must {must}: {cure}")


def in_columns(pred_probs: Any, labels: list[str]) -> Any:
    """Columns with the labels' names may be in any order."""
    columns = list(getattr(pred_probs, "columns", ()))
    if not labels or not columns or not isinstance(columns[0], str):
        return pred_probs
    if set(columns) != set(labels):
        raise ValueError(f"pred_probs must have the columns {labels[:8]}, got {columns[:8]}")
    return pred_probs[labels]


def _in_order(data: Any) -> Any:
    """A wide data frame whose index does not say that its rows are in another order."""
    index, order = np.asarray(data.index), np.arange(len(data))
    other = index.dtype.kind in "iu" and not np.array_equal(index, order)
    if other and np.array_equal(np.sort(index), order):
        cure = "pass answers.sort_index(), or answers.reset_index(drop=True) to keep the order"
        raise ValueError(f"answers has rows in another order than its index, 0..N-1: {cure}")
    return data


def _array(data: Any) -> Any:
    """A data frame as an array, and an array of numbers and None as floats."""
    found = data.to_numpy() if hasattr(data, "to_numpy") else data
    if isinstance(found, np.ndarray) and found.dtype.kind == "S":
        return found.astype(str)
    if isinstance(found, np.ndarray) and found.dtype == object:
        plain = [np.nan if _is_missing(each) else each for each in found.flat]
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
    missing = np.array([_is_missing(each) for each in table.flat], dtype=bool)
    text = table.flat[~missing].astype(str)
    labels = np.array(sorted({*text, *categories}), dtype=str)
    found = np.full(table.size, -1)
    found[~missing] = np.searchsorted(labels, text)
    return found.reshape(table.shape), labels.tolist()


def _is_missing(answer: Any) -> bool:
    return str(answer) in ("-1", "") if isinstance(answer, str) else str(answer) in MISSING


def whole_answers(data: Any, num_nodes: int, device: torch.device, form: str = "") -> Tensor:
    """Answers of a tensor or an array of numbers as ``torch.long``; NaN is -1."""
    if isinstance(data, np.ndarray) and data.dtype.kind in "iuf":
        data = _native(data).to(device)
    must = f"answers must be integers or text of shape ({num_nodes}, M), -1 or NaN if missing"
    if not isinstance(data, Tensor) or data.dtype == torch.bool or data.is_complex():
        kind = data.dtype if isinstance(data, Tensor | np.ndarray) else type(data)
        raise ValueError(f"{must}, got {kind}")
    if data.dim() != 2 or len(data) != num_nodes:
        raise ValueError(f"{must}, got {tuple(data.shape)}{form}")
    expect_device("answers", data, device)
    if data.is_floating_point():
        data = data.masked_fill(data.isnan(), -1)
        if (part := data != data.round()).any() or data.isinf().any():
            raise ValueError(f"{must}, got {data[part | data.isinf()][0].item()}")
    return data.long()


def _native(data: np.ndarray) -> Tensor:
    """A copy, because pandas' arrays are frozen, in the byte order of the machine."""
    return torch.from_numpy(np.array(data, dtype=data.dtype.newbyteorder("=")))


def known_labels(
    known: Any, num_nodes: int, labels: list[str] | int, device: torch.device
) -> Tensor:
    """``(N,)`` true labels, -1 where unknown, of numbers with NaN, or of names."""
    found = _array(known)
    named = isinstance(found, np.ndarray) and found.dtype.kind in "OUST"
    if isinstance(labels, list) and named:
        place = {name: number for number, name in enumerate(labels)}
        text = [-1 if _is_missing(each) else place.get(str(each), len(labels)) for each in found]
        if len(labels) in text:
            name = str(found[text.index(len(labels))])
            raise ValueError(f"known holds {name!r}, which no annotator answers: labels {labels}")
        found = torch.tensor(text, device=device)
    if isinstance(found, np.ndarray) and found.dtype.kind in "iuf":
        found = _native(found).to(device)
    must = f"known must hold integer labels of shape ({num_nodes},), -1 or NaN where unknown"
    if not isinstance(found, Tensor) or found.shape != (num_nodes,) or found.dtype == torch.bool:
        got = (tuple(found.shape), found.dtype) if isinstance(found, Tensor) else type(known)
        raise ValueError(f"{must}, got {got}")
    expect_device("known", found, device)
    if found.is_floating_point():
        found = found.nan_to_num(-1.0)
    if isinstance(labels, list) and not named and (found >= 0).any():
        raise ValueError(f"known must name labels as answers do, {labels}, got {found.dtype}")
    number = labels if isinstance(labels, int) else len(labels)
    wrong = (found != found.long()) | (found < -1) | (found >= number)
    if wrong.any():
        raise ValueError(f"{must} and below {number} elsewhere, got {found[wrong][0].item()}")
    return found.long()


def edges_of(graph: Any, answers: Any) -> tuple[Tensor, int]:
    """Edges and the number of nodes of a graph that is no neighborhood."""
    if isinstance(graph, Data):
        if graph.edge_index is None:
            raise ValueError("graph has no edge_index")
        return graph.edge_index, int(graph.num_nodes)
    if isinstance(graph, Tensor | np.ndarray | list):  # nodes without edges have answers
        graph = as_tensor("graph", graph)
        if set(getattr(answers, "columns", ())) >= LONG:
            return graph, int(graph.max()) + 1 if graph.numel() else 0
        number = answers.shape[0] if hasattr(answers, "shape") else len(answers)
        if len(graph) == 2 and graph.numel() and (top := int(graph.max())) >= number:
            must = f"answers must have a row for each node, got {number}"
            raise ValueError(f"edge_index holds node id {top}, but {must}: -1 or NaN is no answer")
        return graph, number
    cure = "torch_geometric.utils has from_networkx and from_scipy_sparse_matrix"
    if isinstance(graph, tuple):
        cure = "some functions of pyro_nmm.sources return a pair, of which it is the first"
    must = "PyG's Data, an edge_index or a Neighborhood"
    raise ValueError(f"graph must be {must}, got {type(graph)}: {cure}")
