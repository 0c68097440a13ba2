# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Read answers of annotators from tables, and list those that are there."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyro_nmm import Neighborhood
from pyro_nmm.arguments import as_expected, expect, expect_all
from pyro_nmm.labels import as_array, check_same_order, is_missing


@dataclass(frozen=True, eq=False)
class Answers:
    """The ``A`` answers that are there in a table ``(N, M)``, node by node."""

    node: Tensor  #: ``(A,)``, ascending
    annotator: Tensor  #: ``(A,)``, ascending at each node
    answer: Tensor  #: ``(A,)``, from zero
    shape: tuple[int, int]  #: of the table

    @classmethod
    def of(cls, data: "Tensor | Answers") -> "Answers":
        """Of a table in which -1 is missing."""
        if isinstance(data, Answers):
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

    def at(self, rows: Tensor) -> "Answers":
        """Only answers about some nodes, a mask ``(N,)``, of a table of the same shape."""
        here = rows[self.node]
        return Answers(self.node[here], self.annotator[here], self.answer[here], self.shape)

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


def read_answers(data: Any, hood: Neighborhood) -> Tensor:
    """``(N, M)`` integers of a tensor, an array, a list or a data frame, -1 where missing."""
    check_same_order("answers", data)
    array = as_array("answers", data.to_numpy() if hasattr(data, "to_numpy") else data)
    if isinstance(array, np.ndarray) and array.dtype.kind == "O":
        entries = [np.nan if is_missing(entry) else entry for entry in array.flat]
        array = np.array(entries).reshape(array.shape)
    if isinstance(array, np.ndarray) and array.dtype.kind == "U":
        cure = "pandas.factorize, or numpy.unique(..., return_inverse=True), makes integers of it"
        raise ValueError(f"answers must hold integers, -1 or NaN if missing, got text: {cure}")
    if hasattr(array, "tocsr") or getattr(array, "layout", torch.strided) != torch.strided:
        raise ValueError("answers must be dense, with -1 for missing ones: label 0 is no gap")
    shape, must = (hood.num_nodes, ("M", 1)), "-1 or NaN if missing"
    table = as_expected("answers", array, shape, like=hood, note=must)
    if table.is_floating_point():
        table = table.masked_fill(table.isnan(), -1)
        expect_all("answers", table, table == table.long(), f"hold integers, {must}")
        table = table.long()
    table = expect("answers", table, kind="labels").long()
    if (silent := (table == -1).all(0)).any():
        place = int(silent.nonzero()[0])
        raise ValueError(f"answers hold none of annotator {place}: leave that column out")
    return table
