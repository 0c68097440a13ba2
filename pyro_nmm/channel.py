# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""What edges make of labels: one value for edges that keep, permute or mix them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from pyro.ops.provenance import extract_provenance, track_provenance
from torch import Size, Tensor
from torch.nn.functional import one_hot

from pyro_nmm.neighborhood import Neighborhood
from pyro_nmm.provenance import untracked


@dataclass(frozen=True, eq=False)
class Channel:
    """
    What each of ``E`` edges makes of a label. This class keeps every label; its subclasses have
    the same operations. ``rows`` are the rows whose edges these are.
    """

    relabel: Any = None  #: as users give it
    keeps = True  #: whether no edge changes a label
    certain = True  #: whether the label that is shown follows from the label that is borrowed
    batch_shape = Size()

    def of(self, edges: Tensor | slice) -> Channel:
        """The channel of some edges."""
        return self

    def detach(self) -> Channel:
        return self

    def check_values(self) -> None:
        """Follows ``validate_args``, because it reads the data."""

    def push(self, probs: Tensor) -> Tensor:
        """``(..., E, C)``: probabilities of borrowed labels, as those of the labels shown."""
        return probs

    def push_tables(self, first: Tensor, second: Tensor, tables: Tensor) -> Tensor:
        """``(..., K, C, C)``: joint moments of two borrowed labels, over two edges ``(K,)``."""
        return tables

    def borrowed(self, rows: Neighborhood, labels: Tensor) -> Tensor:
        """
        The borrowed label of every row over each of its edges, ``(..., E)``, given the labels shown
        ``(..., n)``; these themselves, if edges keep labels.
        """
        return labels

    def chosen(self, rows: Neighborhood, choices: Tensor) -> Channel:
        """The channel of every row's chosen edge, for choices ``(..., n)``."""
        return self

    def show(self, labels: Tensor) -> Tensor:
        """The labels shown of borrowed ones, one for each edge of this channel."""
        return labels

    def borrow(self, labels: Tensor) -> Tensor:
        """The inverse of :meth:`show`."""
        return labels

    def draw(self, rows: Neighborhood, choices: Tensor, borrowed: Tensor) -> Tensor:
        """``(..., n)``: labels shown, given choices and borrowed labels ``(..., n)``."""
        return self.chosen(rows, choices).show(borrowed)

    def matrices(self, like: Tensor) -> Tensor:
        """``(..., E, C, C)``: probabilities of the labels shown, given the borrowed ones."""
        raise NotImplementedError

    def evidence(self, rows: Neighborhood, labels: Tensor, like: Tensor) -> Tensor:
        r"""``(..., E, C)``: :math:`\log p(y_i \mid u_i)` of labels shown ``(..., n)``, in nats."""
        matrices, shown = self.matrices(like), labels.index_select(-1, rows.row)
        batch = torch.broadcast_shapes(matrices.shape[:-3], labels.shape[:-1])
        shown = shown[..., None].expand(*batch, *matrices.shape[-3:-1])
        return log_entries(taken(matrices.expand(*batch, *matrices.shape[-3:]), shown))

    def split(self, batch: Size) -> list[Channel]:
        """One channel for each element of a batch."""
        return [self] * batch.numel()


class Permutations(Channel):
    """Edges with a permutation each, ``(E, C)``; in :meth:`chosen` ``(..., n, C)``."""

    keeps = False

    @property
    def batch_shape(self) -> Size:  # type: ignore[override]
        return Size(self.relabel.shape[:-2])

    def of(self, edges: Tensor | slice) -> Channel:
        return Permutations(self.relabel[edges])

    def check_values(self) -> None:
        labels = torch.arange(self.relabel.shape[-1], device=self.relabel.device)
        wrong = (self.relabel.sort(-1).values != labels).any(-1)
        _refuse(self.relabel, wrong, f"permutations of 0..{len(labels) - 1}")

    @property
    def inverse(self) -> Tensor:
        return self.relabel.argsort(-1)

    def push(self, probs: Tensor) -> Tensor:
        return probs.gather(-1, self.inverse.expand(probs.shape))

    def push_tables(self, first: Tensor, second: Tensor, tables: Tensor) -> Tensor:
        for edges in (first, second):
            columns = self.of(edges).inverse.unsqueeze(-2)  # type: ignore[attr-defined]
            tables = tables.mT.gather(-1, columns.expand(tables.shape))
        return tables

    def borrowed(self, rows: Neighborhood, labels: Tensor) -> Tensor:
        return self.borrow(labels.index_select(-1, rows.row))

    def chosen(self, rows: Neighborhood, choices: Tensor) -> Channel:
        (relabel, choices), provenance = untracked(self.relabel, choices)
        edges = rows.find(choices.reshape(-1, rows.num_rows)).clamp(min=0)
        found = relabel[edges].view(*choices.shape, relabel.shape[-1])
        return Permutations(track_provenance(found, provenance))

    def show(self, labels: Tensor) -> Tensor:
        return _entries(self.relabel, labels)

    def borrow(self, labels: Tensor) -> Tensor:
        return _entries(self.inverse, labels)

    def matrices(self, like: Tensor) -> Tensor:
        return one_hot(self.relabel, self.relabel.shape[-1]).to(like)


class Matrices(Channel):
    """Edges with a stochastic matrix each, ``(..., E, C, C)``."""

    keeps = certain = False

    @property
    def batch_shape(self) -> Size:  # type: ignore[override]
        return Size(self.relabel.shape[:-3])

    def of(self, edges: Tensor | slice) -> Channel:
        return Matrices(self.relabel[..., edges, :, :])

    def detach(self) -> Channel:
        return Matrices(self.relabel.detach())

    def check_values(self) -> None:
        wrong = ~((self.relabel >= 0).all(-1) & ((self.relabel.sum(-1) - 1).abs() < 1e-4))
        _refuse(self.relabel, wrong, "probabilities that sum to one over the last dimension")

    def push(self, probs: Tensor) -> Tensor:
        return (probs.unsqueeze(-2) @ self.relabel).squeeze(-2)

    def push_tables(self, first: Tensor, second: Tensor, tables: Tensor) -> Tensor:
        for edges in (first, second):
            tables = tables.mT @ self.relabel[..., edges, :, :]
        return tables

    def shown_probs(self, rows: Neighborhood, choices: Tensor, borrowed: Tensor) -> Tensor:
        """``(..., n, C)``: the probability of every label that a row may show."""
        (relabel, *values), provenance = untracked(self.relabel, choices, borrowed)
        batch = torch.broadcast_shapes(self.batch_shape, *(value.shape[:-1] for value in values))
        choices, borrowed = (v.expand(*batch, -1).reshape(-1, rows.num_rows) for v in values)
        places: tuple = rows.find(choices).clamp(min=0), borrowed
        event = relabel.shape[-3:]
        if self.batch_shape.numel() == 1:
            relabel = relabel.reshape(event)
        else:
            relabel = relabel.expand(*batch, *event).reshape(-1, *event)
            places = torch.arange(len(relabel), device=rows.device)[:, None], *places
        probs = relabel[places]
        return track_provenance(probs.view(*batch, *probs.shape[-2:]), provenance)

    def draw(self, rows: Neighborhood, choices: Tensor, borrowed: Tensor) -> Tensor:
        probs = self.shown_probs(rows, choices, borrowed)
        return torch.distributions.Categorical(probs, validate_args=False).sample()

    def matrices(self, like: Tensor) -> Tensor:
        return self.relabel

    def split(self, batch: Size) -> list[Channel]:
        event = self.relabel.shape[-3:]
        return [Matrices(part) for part in self.relabel.expand(*batch, *event).reshape(-1, *event)]


#: Edges that keep labels.
KEEP = Channel()


@extract_provenance.register(Channel)
def _extract_provenance(channel: Channel) -> tuple[Channel, frozenset]:
    relabel, provenance = extract_provenance(channel.relabel)
    return type(channel)(relabel), provenance


def taken(table: Tensor, labels: Tensor) -> Tensor:
    """``(...)``: the entry of every row of ``table``, ``(..., C)``, at its label ``(...)``."""
    return table.gather(-1, labels.unsqueeze(-1)).squeeze(-1)


def _entries(table: Tensor, labels: Tensor) -> Tensor:
    shape = torch.broadcast_shapes(table.shape[:-1], labels.shape)
    return taken(table.expand(*shape, -1), labels.expand(shape))


def log_entries(matrices: Tensor) -> Tensor:
    """
    Logarithms of probabilities, ``-inf`` of zeros. Zeros get no gradient: the derivative of ``log``
    at zero is infinite, and times the zero derivative of a constant it would be NaN.
    """
    zero = matrices == 0
    return matrices.masked_fill(zero, 1).log().masked_fill(zero, -torch.inf)


def _refuse(relabel: Tensor, wrong: Tensor, needed: str) -> None:
    if wrong.any():
        where = wrong.nonzero()[0].tolist()
        got = [round(number, 4) for number in relabel[tuple(where)].tolist()]
        raise ValueError(f"relabel must hold {needed}, got {got} at {where}")
