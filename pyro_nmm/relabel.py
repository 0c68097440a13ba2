# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

r"""Edges that relabel. A node borrows a label :math:`u_i \sim z_{c_i}`, which the edge :math:`e`
from :math:`c_i` turns into the label :math:`y_i` that it shows. ``relabel`` holds for every edge a
permutation, ``(E, C)`` integers whose entry ``[e, u]`` is :math:`y`; or a stochastic matrix,
``(..., E, C, C)``, whose entry ``[e, u, y]`` is the probability of :math:`y` given :math:`u`.
"""

from dataclasses import dataclass
from typing import Any

import torch
from pyro.ops.provenance import extract_provenance, track_provenance
from torch import Size, Tensor
from torch.nn.functional import one_hot

from pyro_nmm.arguments import expect_all, expect_device
from pyro_nmm.neighborhood import Neighborhood
from pyro_nmm.provenance import untracked


@dataclass(frozen=True, eq=False)
class Channel:
    """What each of ``E`` edges makes of a label. This class keeps labels."""

    relabel: Any = None  #: as users give it
    keeps = True  #: whether no edge changes a label
    certain = True  #: whether the label that is shown follows from the label that is borrowed
    event_dim = 0  #: dimensions of ``relabel`` that are no batch

    @property
    def batch_shape(self) -> Size:
        return Size() if self.keeps else Size(self.relabel.shape[: -self.event_dim])

    def of(self, edges: Tensor | slice) -> "Channel":
        """The channel of some edges."""
        return self

    def detach(self) -> "Channel":
        return self

    def check_values(self) -> None:
        """Refuse bad entries. Follows ``validate_args``, because it reads the data."""

    def push(self, probs: Tensor) -> Tensor:
        """``(..., E, C)``: probabilities of the labels shown, from the borrowed labels'."""
        return probs

    def push_tables(self, first: Tensor, second: Tensor, tables: Tensor) -> Tensor:
        """``(..., K, C, C)``: joint moments of two borrowed labels, over two edges ``(K,)``."""
        return tables

    def borrowed(self, rows: Neighborhood, labels: Tensor) -> Tensor:
        """``(..., E)``: the label borrowed over each edge; ``(..., n)`` if edges keep labels."""
        return labels

    def chosen(self, rows: Neighborhood, choices: Tensor) -> "Channel":
        """The channel of every row's chosen edge, for choices ``(..., n)``."""
        return self

    def show(self, labels: Tensor) -> Tensor:
        """The label shown of each edge's borrowed one."""
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
        return log_entries(entries_at(matrices.expand(*batch, *matrices.shape[-3:]), shown))

    def split(self, batch: Size) -> "list[Channel]":
        """One channel for each element of a batch."""
        return [self] * batch.numel()


class Permutations(Channel):
    """Edges with a permutation each, ``(E, C)``; in :meth:`chosen` ``(..., n, C)``."""

    keeps = False
    event_dim = 2

    def of(self, edges: Tensor | slice) -> Channel:
        return Permutations(self.relabel[edges])

    def check_values(self) -> None:
        labels = torch.arange(self.relabel.shape[-1], device=self.relabel.device)
        good = (self.relabel.sort(-1).values == labels).all(-1)
        expect_all("relabel", self.relabel, good, f"hold permutations of 0..{len(labels) - 1}")

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
        chosen = relabel[edges].view(*choices.shape, relabel.shape[-1])
        return Permutations(track_provenance(chosen, provenance))

    def show(self, labels: Tensor) -> Tensor:
        shape = torch.broadcast_shapes(self.relabel.shape[:-1], labels.shape)
        return entries_at(self.relabel.expand(*shape, -1), labels.expand(shape))

    def borrow(self, labels: Tensor) -> Tensor:
        return Permutations(self.inverse).show(labels)

    def matrices(self, like: Tensor) -> Tensor:
        return one_hot(self.relabel, self.relabel.shape[-1]).to(like)


class Matrices(Channel):
    """Edges with a stochastic matrix each, ``(..., E, C, C)``."""

    keeps = certain = False
    event_dim = 3

    def of(self, edges: Tensor | slice) -> Channel:
        return Matrices(self.relabel[..., edges, :, :])

    def detach(self) -> Channel:
        return Matrices(self.relabel.detach())

    def check_values(self) -> None:
        good = (self.relabel >= 0).all(-1) & ((self.relabel.sum(-1) - 1).abs() < 1e-4)
        must = "hold probabilities that sum to one over the last dimension"
        expect_all("relabel", self.relabel, good, must)

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


def entries_at(table: Tensor, labels: Tensor) -> Tensor:
    """``(...)``: entries of a table ``(..., C)`` at labels ``(...)``."""
    return table.gather(-1, labels.unsqueeze(-1)).squeeze(-1)


def log_entries(matrices: Tensor) -> Tensor:
    """Logarithms of probabilities, ``-inf`` of zeros, which get a gradient of zero, not NaN."""
    zero = matrices == 0
    return matrices.masked_fill(zero, 1).log().masked_fill(zero, -torch.inf)


def as_channel(relabel: Any, needed: str = "be a tensor") -> Channel:
    """A channel of permutations, matrices or ``None``."""
    if relabel is None or isinstance(relabel, Channel):
        return relabel or KEEP
    if not isinstance(relabel, Tensor):
        raise ValueError(f"relabel must {needed}, got {type(relabel)}; see torch.from_numpy")
    return Matrices(relabel) if relabel.is_floating_point() else Permutations(relabel)


def check_relabel(hood: Neighborhood, relabel: Any, num_classes: int, kinds: str = "") -> Channel:
    """A channel of all edges; with ``kinds="permutations"`` without matrices."""
    channel, shape = as_channel(relabel), (hood.num_edges, num_classes)
    needed = f"integers of shape {shape}"
    if not kinds:
        needed += f" or probabilities of shape {(*shape, num_classes)}"
    fits = channel.certain or not kinds
    if isinstance(channel, Permutations):
        fits = channel.relabel.dim() == 2  # no batch
    return _checked(channel, fits, shape, needed, hood.device, "hood")


def check_permutations(relabel: Any, choices: Tensor, num_classes: int) -> Channel:
    """A channel of the edges of choices ``(..., n)``: permutations ``(..., n, C)`` or nothing."""
    shape = choices.shape[-1], num_classes
    needed = f"integers of shape (..., {shape[0]}, {shape[1]}), a permutation for every choice"
    channel = as_channel(relabel, f"hold {needed}")
    return _checked(channel, channel.certain, shape, needed, choices.device, "choices")


def _checked(
    channel: Channel, fits: bool, shape: tuple[int, ...], needed: str, device: torch.device,
    beside: str,
) -> Channel:  # fmt: skip
    if channel.keeps:
        return channel
    relabel = channel.relabel
    shape = shape if channel.certain else (*shape, shape[-1])
    if not fits or relabel.shape[-len(shape) :] != shape:
        got = f"{relabel.dtype} of shape {tuple(relabel.shape)}"
        raise ValueError(f"relabel must hold {needed}, got {got}")
    expect_device("relabel", relabel, device, beside)
    return Permutations(relabel.long()) if channel.certain else channel
