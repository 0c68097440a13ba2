# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Read answers of annotators from tables and data frames, and list those that are there."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyro_nmm.arguments import as_tensor, check_order, expect_device
from pyro_nmm.edges import edges_of
from pyro_nmm.labels import as_array, check_names, is_missing

#: Columns of a data frame with a row for every answer, as crowd-kit has it.
LONG = {"task", "worker", "label"}


@dataclass(frozen=True, eq=False)
class Entries:
    """The ``A`` answers that are there in a table ``(N, M)``, node by node."""

    node: Tensor  #: ``(A,)``, ascending
    annotator: Tensor  #: ``(A,)``, ascending at each node
    answer: Tensor  #: ``(A,)``, from zero
    shape: tuple[int, int]  #: of the table

    @classmethod
    def of(cls, data: "Tensor | Entries") -> "Entries":
        """Of a table in which -1 is missing."""
        if isinstance(data, Entries):
            return data
        if (data < -1).any():
            raise ValueError(f"answers must be -1 where missing, got {int(data.min())}")
        node, annotator = (data >= 0).nonzero(as_tuple=True)
        return cls(node, annotator, data[node, annotator], (data.shape[0], data.shape[1]))

    def table(self) -> Tensor:
        """``(N, M)``, -1 for missing answers."""
        table = self.answer.new_full(self.shape, -1)
        table[self.node, self.annotator] = self.answer
        return table

    def at(self, rows: Tensor) -> "Entries":
        """Only answers about some nodes, a mask ``(N,)``, of a table of the same shape."""
        here = rows[self.node]
        return Entries(self.node[here], self.annotator[here], self.answer[here], self.shape)

    def number(self) -> Tensor:
        """``(N,)``: answers about each node."""
        return self.node.bincount(minlength=self.shape[0])

    def votes(self, num_answers: int) -> Tensor:
        """``(N, K)``: how many annotators give each answer about each node."""
        place = self.node * num_answers + self.answer
        return place.bincount(minlength=self.shape[0] * num_answers).view(-1, num_answers)

    def confusion(self, labels: Tensor, num_answers: int) -> Tensor:
        """``(M, C, K)`` in double precision: answers counted with weights ``(A, C)`` of labels."""
        size = self.shape[1] * num_answers, labels.shape[1]
        # In double precision: a million small shares, one after the other, lose three digits.
        counts, place = labels.new_zeros(size, dtype=torch.double), self.annotator * num_answers
        counts.index_add_(0, place + self.answer, labels.double())
        return counts.view(-1, num_answers, labels.shape[1]).mT

    def evidence(self, confusion: Tensor) -> Tensor:
        """``(N, C)``: log-likelihood of all answers about a node, given matrices ``(M, C, K)``."""
        log = confusion.log()
        rows = log[self.annotator, :, self.answer]
        return log.new_zeros(self.shape[0], log.shape[1]).index_add(0, self.node, rows)


class Answers(NamedTuple):
    """Answers ``(N, M)``, -1 if missing, and names of labels and annotators, if given."""

    table: Tensor
    labels: list[str] | None = None
    annotators: list | None = None


def read_answers(data: Any, num_nodes: int, device: torch.device) -> Answers:
    """Answers of a tensor, an array or a data frame, wide or long; text labels are sorted."""
    if hasattr(data, "tocsr") or getattr(data, "layout", torch.strided) != torch.strided:
        cure = f"pass a dense one with -1 for missing ones, or a data frame with {sorted(LONG)}"
        raise ValueError(f"answers is a sparse matrix, in which label 0 may be missing: {cure}")
    annotators, categories, labels = None, set(), None
    if hasattr(data, "columns"):
        kinds = [data["label"].dtype] if is_long(data) else data.dtypes
        categories = {str(name) for kind in kinds for name in getattr(kind, "categories", ())}
        data = _wide(data, num_nodes) if is_long(data) else data
        annotators = list(data.columns)
    array = _array("answers", data)
    if _is_text(array):
        names = {str(name) for name in array.flat if not _is_no_name(name)}
        labels = sorted(names | categories)
        array = _numbered("answers", array, labels)
    must = f"answers must be integers or text of shape ({num_nodes}, M), -1 or NaN if missing"
    table = _integers("answers", array, (num_nodes, "M"), device, must)
    silent = (table == -1).all(0).nonzero()[:, 0].tolist()
    if table.numel() and len(silent) == table.shape[1]:
        raise ValueError("answers holds no answer: all are -1 or NaN")
    if silent:
        name = silent[0] if annotators is None else annotators[silent[0]]
        raise ValueError(f"answers has none of annotator {name}: leave that column out")
    return Answers(table, labels, annotators)


def known_labels(
    known: Any, num_nodes: int, labels: list[str] | int, device: torch.device
) -> Tensor:
    """``(N,)`` true labels, -1 where unknown, of numbers with NaN, or of names."""
    array = _array("known", known)
    named = isinstance(labels, list) and _is_text(array)
    must = f"known must hold integer labels of shape ({num_nodes},), -1 or NaN where unknown"
    entries = _numbered("known", array, labels) if named else array
    numbers = _integers("known", entries, (num_nodes,), device, must)
    if isinstance(labels, list) and not named and (numbers >= 0).any():
        raise ValueError(f"known must name labels as answers do, {labels}, got {array.dtype}")
    number = labels if isinstance(labels, int) else len(labels)
    if (wrong := (numbers < -1) | (numbers >= number)).any():
        raise ValueError(f"{must} and below {number} elsewhere, got {numbers[wrong][0].item()}")
    return numbers


def is_long(data: Any) -> bool:
    """Whether a data frame has a row for each answer."""
    return set(getattr(data, "columns", ())) >= LONG


def long_form(data: Any) -> str:
    """What an error adds about a data frame, which may be meant to have a row for each answer."""
    if not hasattr(data, "columns") or is_long(data):
        return ""
    columns = list(data.columns)[:8]
    return f"; a row for each answer needs the columns task, worker, label, got {columns}"


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


def _array(name: str, data: Any) -> Any:
    """A data frame as an array, and an array of numbers and None as floats."""
    check_order(name, data)
    array = as_array(name, data.to_numpy() if hasattr(data, "to_numpy") else data)
    if _is_text(array):
        plain = [None if _is_no_name(entry) else entry for entry in array.flat]
        check_names(name, [entry for entry in plain if entry is not None])
        if not any(isinstance(entry, str) for entry in plain):
            return np.array(plain, dtype=float).reshape(array.shape)
    return array


def _is_text(array: Any) -> bool:
    return isinstance(array, np.ndarray) and array.dtype.kind in "OUT"


def _is_no_name(answer: Any) -> bool:
    """Arrays of text have no -1 but its text."""
    return answer in ("-1", "") if isinstance(answer, str) else is_missing(answer)


def _numbered(name: str, text: np.ndarray, labels: Any) -> np.ndarray:
    """Places of names among the labels, -1 for missing ones."""
    place: dict = {label: number for number, label in enumerate(labels)} | {None: -1}
    names = [None if _is_no_name(entry) else str(entry) for entry in text.flat]
    if strange := [entry for entry in names if entry not in place]:
        missing = f"holds {strange[0]!r}, which no annotator answers"
        raise ValueError(f"{name} {missing}: labels {labels}")
    return np.array([place[entry] for entry in names]).reshape(text.shape)


def _integers(name: str, data: Any, shape: tuple, device: torch.device, must: str) -> Tensor:
    """A tensor or an array of numbers as ``torch.long``, in which NaN is -1."""
    if isinstance(data, np.ndarray) and data.dtype.kind in "iuf":
        data = as_tensor(name, data, device)
    if not isinstance(data, Tensor) or data.dtype == torch.bool or data.is_complex():
        kind = data.dtype if isinstance(data, Tensor | np.ndarray) else type(data)
        raise ValueError(f"{must}, got {kind}")
    if data.shape[:1] != shape[:1] or data.dim() != len(shape):
        raise ValueError(f"{must}, got {tuple(data.shape)}")
    expect_device(name, data, device)
    if data.is_floating_point():
        data = data.masked_fill(data.isnan(), -1)
        if (part := (data != data.round()) | data.isinf()).any():
            raise ValueError(f"{must}, got {data[part][0].item()}")
    return data.long()


def edges_and_size(graph: Any, answers: Any) -> tuple[Tensor, int]:
    """Edges and the number of nodes of a graph that is no neighborhood."""
    edges, size = edges_of(graph, None if is_long(answers) else answers)
    if size is not None:
        return edges, size
    top = int(edges.max()) if edges.numel() else -1
    if is_long(answers):
        return edges, top + 1
    number = answers.shape[0] if hasattr(answers, "shape") else len(answers)
    if top >= number:  # nodes without edges have answers
        must = f"answers must have a row for each node, got {number}: -1 or NaN is no answer"
        raise ValueError(f"edge_index holds node id {top}, but {must}{long_form(answers)}")
    return edges, number
