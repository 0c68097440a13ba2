# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Read answers of annotators from tables and data frames, and list those that are there."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyro_nmm import Neighborhood
from pyro_nmm.arguments import as_expected, check_order, expect, expect_all
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


def read_answers(data: Any, hood: Neighborhood) -> Answers:
    """Answers of a tensor, an array or a data frame, wide or long; text labels are sorted."""
    data = _wide(data, hood.num_nodes) if is_long(data) else data
    annotators = list(data.columns) if hasattr(data, "columns") else None
    table, labels = _numbered("answers", data, (hood.num_nodes, "M"), hood)
    silent = (table == -1).all(0)
    if silent.all():
        raise ValueError(f"answers of shape {tuple(table.shape)} hold none: all are -1 or NaN")
    if silent.any():
        place = int(silent.nonzero()[0])
        name = annotators[place] if annotators else place
        raise ValueError(f"answers hold none of annotator {name}: leave that column out")
    return Answers(table, labels, annotators)


def known_labels(known: Any, labels: list[str] | None, hood: Neighborhood) -> Tensor:
    """``(N,)`` true labels, -1 where unknown, of numbers with NaN, or of names."""
    numbers, names = _numbered("known", known, (hood.num_nodes,), hood, labels)
    if bool(names) != bool(labels) and (numbers >= 0).any():
        must = f"name labels as answers do, {labels}" if labels else "hold integer labels"
        raise ValueError(f"known must {must}, got {'text' if names else 'numbers'}")
    return numbers


def is_long(data: Any) -> bool:
    """Whether a data frame has a row for each answer."""
    return set(getattr(data, "columns", ())) >= LONG


def _wide(data: Any, num_nodes: int) -> Any:
    wrong = data["task"][~data["task"].isin(range(num_nodes))]
    if len(wrong):
        must = f"answers must have node ids 0..{num_nodes - 1} as tasks"
        raise ValueError(f"{must}, got {wrong.iloc[0]}: map ids to nodes")
    if (twice := data.duplicated(["task", "worker"])).any():
        task, worker = data[["task", "worker"]][twice].iloc[0]
        raise ValueError(f"answers hold two labels of worker {worker} for task {task}")
    return data.pivot(index="task", columns="worker", values="label").reindex(range(num_nodes))


def _numbered(
    name: str, data: Any, shape: tuple, hood: Neighborhood, labels: list[str] | None = None
) -> tuple[Tensor, list[str] | None]:
    """Integers, -1 where missing, and the labels whose places they are, if the data are text."""
    check_order(name, data)
    array, names = as_array(name, data.to_numpy() if hasattr(data, "to_numpy") else data), None
    if isinstance(array, np.ndarray) and array.dtype.kind in "OUT":
        entries = [None if is_missing(x) or x in ("-1", "") else x for x in array.flat]
        there = [entry for entry in entries if entry is not None]
        check_names(name, there)
        if any(isinstance(entry, str) for entry in there):
            names = labels or sorted({str(entry) for entry in there})
            if strange := sorted(set(there) - set(names)):
                raise ValueError(f"{name} holds {str(strange[0])!r}, which no annotator answers")
            place = {label: number for number, label in enumerate(names)}
            entries = [None if entry is None else place[entry] for entry in entries]
        array = np.array(entries, dtype=float).reshape(array.shape)
    if hasattr(array, "tocsr") or getattr(array, "layout", torch.strided) != torch.strided:
        raise ValueError(f"{name} must be dense, with -1 for missing ones: label 0 is no gap")
    table = as_expected(name, array, shape, like=hood, note="-1 or NaN if missing")
    if table.is_floating_point():
        table = table.masked_fill(table.isnan(), -1)
        expect_all(name, table, table == table.long(), "hold integers, -1 or NaN if missing")
        table = table.long()
    return expect(name, table, kind="labels").long(), names


def edges_and_size(graph: Any, answers: Any) -> tuple[Tensor, int]:
    """Edges and the number of nodes of a graph that is no neighborhood."""
    edges, size = edges_of(graph, None if is_long(answers) else answers)
    if size is None:
        size = top = int(edges.max()) + 1 if edges.numel() else 0
        if not is_long(answers):  # nodes without edges have answers
            size = answers.shape[0] if hasattr(answers, "shape") else len(answers)
        if top > size:
            must = f"answers must have a row for each node, got {size}"
            raise ValueError(f"graph holds node id {top - 1}, but {must}")
    return edges, size
