# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

from dataclasses import dataclass, replace

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Entries:
    """
    The answers that are there in a table ``(N, M)``, node by node: a table of many annotators who
    give few answers each is read once.

    >>> found = Entries.of(torch.tensor([[0, -1], [-1, 2]]))
    >>> found.node, found.annotator, found.answer
    (tensor([0, 1]), tensor([0, 1]), tensor([0, 2]))
    """

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
        found = self.answer.new_full(self.shape, -1)
        found[self.node, self.annotator] = self.answer
        return found

    def at(self, rows: Tensor) -> "Entries":
        """Only answers about some nodes, a mask ``(N,)``, of a table of the same shape."""
        here = rows[self.node]
        return Entries(self.node[here], self.annotator[here], self.answer[here], self.shape)

    def replaced(self, answer: Tensor) -> "Entries":
        """Other answers ``(A,)`` at the same places."""
        return replace(self, answer=answer)

    def number(self) -> Tensor:
        """``(N,)``: answers about each node."""
        return self.node.bincount(minlength=self.shape[0])

    def votes(self, num_answers: int) -> Tensor:
        """``(N, K)``: how many annotators give each answer about each node."""
        flat = self.node * num_answers + self.answer
        return flat.bincount(minlength=self.shape[0] * num_answers).view(-1, num_answers)
