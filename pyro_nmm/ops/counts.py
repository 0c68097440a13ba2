# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Counts of earlier and later entries that share a key, and sums over graphs of a batch."""

from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from pyro_nmm import compiled
from pyro_nmm.neighborhood import Neighborhood


def ranks(choices: Tensor, labels: Tensor, num_nodes: int, num_classes: int) -> tuple[Tensor, ...]:
    """``(2, B, n)`` twice: how many earlier entries chose the same, with the same label and with
    any; and numbers of choices with their labels, and of choices, after those of all labels."""
    every, size = choices + num_nodes * num_classes, num_nodes * (num_classes + 1)
    keys = torch.stack([torch.add(labels, choices, alpha=num_classes), every])
    if compiled.runs_on(choices.device):
        from pyro_nmm.compiled import loops

        return loops.ranks(choices, labels, num_nodes, num_classes), keys
    # One sorted list for both takes half of the calls to a GPU.
    first = torch.arange(0, len(choices) * size, size, device=keys.device)[:, None]
    key, order = torch.sort((keys + first).flatten(), stable=True)
    rank = torch.arange(len(key), device=keys.device) - torch.searchsorted(key, key)
    return order.scatter(0, order, rank).view_as(keys), keys


class Groups:
    """Sums of values ``(B, K)`` over earlier or later entries with the same key ``(b, K)``."""

    def __init__(self, key: Tensor, num_keys: int) -> None:
        self.batch = len(key)
        if len(key) > 1:
            key = key + num_keys * torch.arange(len(key), device=key.device)[:, None]
        self._sorted_key, self.order = torch.sort(key.flatten(), stable=True)
        place = torch.arange(key.numel(), device=key.device)
        self.rank = torch.empty_like(place).scatter_(0, self.order, place)

    # Both without a count of every key, which needs memory, or of all runs, for which a GPU waits.
    @cached_property
    def first(self) -> Tensor:
        """First place of the run of equal keys that contains each entry."""
        key = self._sorted_key
        return torch.searchsorted(key, key).index_select(0, self.rank)

    @cached_property
    def last(self) -> Tensor:
        """Last place of this run."""
        key = self._sorted_key
        return torch.searchsorted(key, key, right=True).index_select(0, self.rank) - 1

    def earlier(self, values: Tensor) -> Tensor:
        """``(B, K)`` sums over the entries before each one in its group."""
        ordered, sums = self._cumulate(values)
        before = sums - ordered
        before = before.index_select(1, self.rank) - before.index_select(1, self.first)
        return before.view_as(values)

    def later(self, values: Tensor) -> Tensor:
        """``(B, K)`` sums over the entries after each one in its group."""
        _, sums = self._cumulate(values)
        after = sums.index_select(1, self.last) - sums.index_select(1, self.rank)
        return after.view_as(values)

    def _cumulate(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Values in order, and their running sums up to a constant of each line."""
        flat = values.reshape(-1, len(self.order)) if self.batch > 1 else values
        flat = flat.index_select(1, self.order)
        # A GPU shares one sum of all lines among its processors, but gives each of several to one.
        return flat, flat.flatten().cumsum(0, dtype=flat.dtype).view_as(flat)


class Places:
    """Integers ``(K,)`` that occur, each with a ``place`` ``(K,)`` in a table."""

    place: Tensor

    def __init__(self, keys: Tensor) -> None:
        self.keys, self.place = keys.unique(return_inverse=True)

    def find(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Places of other keys ``(...)``, and whether they have one."""
        # torch would copy other layouts itself, and warn users of it.
        place = torch.searchsorted(self.keys, keys.contiguous()).clamp(max=len(self.keys) - 1)
        return place, self.keys[place] == keys


class ChoiceGroups:
    r"""Sums over the earlier or the later choices of each edge's source: of those with the edge's
    label ``(b, num_edges)``, as :math:`s_{ij}`, and of all, as :math:`S_{ij}`. An edge has ``size``
    entries, one or one for each label. Cost: :math:`O(E \log E)`, and :math:`O(B E)` a sum.
    """

    def __init__(self, rows: Neighborhood, labels: Tensor, num_classes: int, size: int = 1) -> None:
        self.size = size
        if size > 1:
            self.groups = Groups(rows.source[None, ::size], rows.num_sources)
            return
        # One sorted list for both sums takes half of the calls to a GPU.
        by_label = rows.num_sources + rows.source * num_classes + labels
        key = torch.cat([rows.source.expand_as(by_label), by_label], 1)
        self.groups = Groups(key, rows.num_sources * (num_classes + 1))

    def earlier(self, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """With the same label and with any, from an :func:`indicator` ``(B, num_edges)``."""
        if self.size > 1:
            same = self._of_labels(self.groups.earlier, chosen)
            return same, self._of_edges(same)
        every, same = self.groups.earlier(chosen.repeat(1, 2)).chunk(2, 1)
        return same, every

    def _of_labels(self, sums: Callable[[Tensor], Tensor], values: Tensor) -> Tensor:
        lines = values.unflatten(1, (-1, self.size)).mT  # (B, C, edges)
        return sums(lines.flatten(0, 1)).view(lines.shape).mT.flatten(1)

    def _of_edges(self, values: Tensor) -> Tensor:
        """The sum over the entries of each edge, for each of them."""
        values = values.unflatten(1, (-1, self.size))
        return values.sum(-1, keepdim=True, dtype=values.dtype).expand_as(values).flatten(1)


def indicator(edges: Tensor, num_edges: int) -> Tensor:
    """``(B, num_edges)`` int32, one at the chosen edges ``(B, num_rows)``."""
    zeros = torch.zeros(len(edges), num_edges, dtype=torch.int32, device=edges.device)
    return zeros.scatter_(1, edges, 1)


def posterior_alpha(alpha: Tensor, choices: Tensor, labels: Tensor) -> Tensor:
    r"""``(..., N, C)``: :math:`\alpha + s(c, y)` for node ids and labels ``(..., n)``."""
    num_nodes, num_classes = alpha.shape[-2:]
    index = choices * num_classes + labels
    ones = torch.ones_like(index, dtype=alpha.dtype)
    empty = alpha.new_zeros(*index.shape[:-1], num_nodes * num_classes)
    return alpha + empty.scatter_add(-1, index, ones).unflatten(-1, (num_nodes, num_classes))
