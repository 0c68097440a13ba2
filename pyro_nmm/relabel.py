# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

r"""Edges that relabel. A node borrows a label :math:`u_i \sim z_{c_i}`, which the edge :math:`e`
from :math:`c_i` turns into the label :math:`y_i` that it shows. ``relabel`` holds for every edge a
stochastic matrix, ``(..., E, C, C)``, whose entry ``[e, u, y]`` is the probability of :math:`y`
given :math:`u`. Permutations ``(E, C)`` of labels are ``one_hot(permutations).float()``.
"""

from dataclasses import dataclass
from typing import Any

import torch
from pyro.ops.provenance import extract_provenance, track_provenance
from torch import Size, Tensor

from pyro_nmm.arguments import as_expected, expect_all
from pyro_nmm.neighborhood import Neighborhood
from pyro_nmm.provenance import untracked


@dataclass(frozen=True, eq=False)
class Channel:
    """What each of ``E`` edges makes of a label: by default it keeps it."""

    relabel: Any = None  #: ``(..., E, C, C)``, or ``None``

    @property
    def keeps(self) -> bool:
        """Whether no edge changes a label."""
        return self.relabel is None

    @property
    def batch_shape(self) -> Size:
        return Size() if self.keeps else Size(self.relabel.shape[:-3])

    def of(self, edges: Tensor | slice) -> "Channel":
        """The channel of some edges."""
        return self if self.keeps else Channel(self.relabel[..., edges, :, :])

    def detach(self) -> "Channel":
        return self if self.keeps else Channel(self.relabel.detach())

    def check_values(self) -> None:
        """Refuse bad entries. Follows ``validate_args``, because it reads the data."""
        if not self.keeps:
            good = (self.relabel >= 0).all(-1) & ((self.relabel.sum(-1) - 1).abs() < 1e-4)
            must = "hold probabilities that sum to one over the last dimension"
            expect_all("relabel", self.relabel, good, must)

    def push(self, probs: Tensor) -> Tensor:
        """``(..., E, C)``: probabilities of the labels shown, from the borrowed labels'."""
        return probs if self.keeps else (probs.unsqueeze(-2) @ self.relabel).squeeze(-2)

    def push_tables(self, first: Tensor, second: Tensor, tables: Tensor) -> Tensor:
        """``(..., K, C, C)``: joint moments of two borrowed labels, over two edges ``(K,)``."""
        if not self.keeps:
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
        """``(..., n)``: labels shown, given choices and borrowed labels ``(..., n)``."""
        if self.keeps:
            return borrowed
        probs = self.shown_probs(rows, choices, borrowed)
        return torch.distributions.Categorical(probs, validate_args=False).sample()

    def evidence(self, rows: Neighborhood, labels: Tensor) -> Tensor:
        r"""``(..., E, C)``: :math:`\log p(y_i \mid u_i)` of labels shown ``(..., n)``, in nats."""
        matrices, shown = self.relabel, labels.index_select(-1, rows.row)
        batch = torch.broadcast_shapes(matrices.shape[:-3], labels.shape[:-1])
        shown = shown[..., None].expand(*batch, *matrices.shape[-3:-1])
        return log_entries(entries_at(matrices.expand(*batch, *matrices.shape[-3:]), shown))

    def split(self, batch: Size) -> "list[Channel]":
        """One channel for each element of a batch."""
        if self.keeps:
            return [self] * batch.numel()
        event = self.relabel.shape[-3:]
        return [Channel(part) for part in self.relabel.expand(*batch, *event).reshape(-1, *event)]


#: Edges that keep labels.
KEEP = Channel()


@extract_provenance.register(Channel)
def _extract_provenance(channel: Channel) -> tuple[Channel, frozenset]:
    relabel, provenance = extract_provenance(channel.relabel)
    return Channel(relabel), provenance


def entries_at(table: Tensor, labels: Tensor) -> Tensor:
    """``(...)``: entries of a table ``(..., C)`` at labels ``(...)``."""
    return table.gather(-1, labels.unsqueeze(-1)).squeeze(-1)


def log_entries(matrices: Tensor) -> Tensor:
    """Logarithms of probabilities, ``-inf`` of zeros, which get a gradient of zero, not NaN."""
    zero = matrices == 0
    return matrices.masked_fill(zero, 1).log().masked_fill(zero, -torch.inf)


def check_relabel(hood: Neighborhood, relabel: Any, num_classes: int) -> Channel:
    """A channel of all edges, of matrices or ``None``."""
    channel = relabel if isinstance(relabel, Channel) else Channel(relabel)
    if channel.keeps:
        return channel
    shape = "...", hood.num_edges, num_classes, num_classes
    note = "probabilities (of permutations, torch.nn.functional.one_hot(relabel).float())"
    return Channel(
        as_expected("relabel", channel.relabel, shape, kind="float", like=hood, note=note)
    )
