# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Splits of the links of a graph."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.transforms import RandomLinkSplit
from torch_geometric.utils import remove_self_loops, to_undirected

from pyro_nmm.arguments import as_edge_index, check_finite
from pyro_nmm.datasets.entries import seeded


class LinkSplit(NamedTuple):
    """Edges ``(2, num_edges)`` to train on, in both directions, and held-out pairs ``(2, P)`` in
    one direction: with an edge, and as many without.

    >>> LinkSplit(torch.tensor([[0, 1], [1, 0]]), *torch.arange(8).view(4, 2, 1)).held_out
    tensor([[0, 2, 4, 6],
            [1, 3, 5, 7]])
    """

    train: Tensor  #: ``(2, num_edges)`` edges, in both directions
    val: Tensor  #: ``(2, P)`` held-out edges for validation
    val_false: Tensor  #: ``(2, P)`` pairs without an edge
    test: Tensor  #: ``(2, P)`` held-out edges
    test_false: Tensor  #: ``(2, P)`` pairs without an edge

    @classmethod
    def of(cls, parts: Any) -> "LinkSplit":
        """Of the three graphs that PyG's ``RandomLinkSplit(is_undirected=True)`` returns."""
        if isinstance(parts, cls):
            return parts
        if not isinstance(parts, tuple) or ["edge_label" in p for p in parts] != [True] * 3:
            cure = "RandomLinkSplit(is_undirected=True, split_labels=False)(data)"
            raise ValueError(f"split must be a LinkSplit or {cure}, got {type(parts)}")
        edges, size = parts[0].edge_index, parts[0].num_nodes
        if not Data(edge_index=edges, num_nodes=size).is_undirected():
            cure = "use RandomLinkSplit(is_undirected=True), of edges in both directions"
            raise ValueError(f"split must train on both directions of every edge: {cure}")
        pairs = [[part.edge_label_index[:, (part.edge_label > 0) == link] for link in (True, False)]
                 for part in parts]  # fmt: skip
        # Edges of a disjoint training set are no messages, but train.
        edges = to_undirected(torch.cat([edges, pairs[0][0]], 1), num_nodes=size)
        return cls(edges, *pairs[1], *pairs[2])

    def to(self, device) -> "LinkSplit":
        """All parts on another device."""
        return LinkSplit(*(pairs.to(device) for pairs in self))

    @property
    def held_out(self) -> Tensor:
        """``(2, P)``: all held-out pairs."""
        return torch.cat(self[1:], 1)


def link_split(
    edge_index: Tensor, num_nodes: int, seed: int, val: float = 0.05, test: float = 0.1
) -> LinkSplit:
    """A random split of an undirected graph's edges by PyG's ``RandomLinkSplit``, with as many
    pairs without an edge, on the CPU. Self-loops and duplicates are dropped.

    >>> split = link_split(torch.tensor([range(20), range(1, 21)]), num_nodes=21, seed=0)
    >>> split.train.shape, split.val.shape, split.test_false.shape
    (torch.Size([2, 34]), torch.Size([2, 1]), torch.Size([2, 2]))

    :param float val: share of the edges that is held out for validation, as ``test`` is for tests.
    """
    edge_index = as_edge_index(edge_index, num_nodes).cpu()
    check_finite(val=val, test=test)
    edge_index = to_undirected(remove_self_loops(edge_index)[0], num_nodes=num_nodes)
    transform = RandomLinkSplit(val, test, is_undirected=True, add_negative_train_samples=False,
                                neg_sampling_ratio=0.0)  # fmt: skip
    with seeded(seed):
        parts = transform(Data(edge_index=edge_index, num_nodes=num_nodes))
        held = [part.edge_label_index for part in parts[1:]]
        sizes = [pairs.shape[1] for pairs in held]
        others = _false_pairs(edge_index, num_nodes, sum(sizes)).split(sizes, 1)
    if min(sizes) < 1:
        got = f"{val} and {test} of {edge_index.shape[1] // 2} edges"
        raise ValueError(f"val and test must hold out an edge at least, got {got}")
    return LinkSplit(parts[0].edge_index, held[0], others[0], held[1], others[1])


def _false_pairs(edge_index: Tensor, num_nodes: int, count: int) -> Tensor:
    """``(2, count)`` different pairs without an edge, in random order."""
    edges = edge_index[0] * num_nodes + edge_index[1]
    free = num_nodes * (num_nodes - 1) // 2 - edge_index.shape[1] // 2
    if free < count:
        raise ValueError(f"val, test need {count} pairs without an edge, but the graph has {free}")
    pairs = torch.zeros(0, dtype=torch.long)
    while len(pairs) < count:
        low, high = torch.randint(num_nodes, (2, 2 * count)).sort(0).values
        number = (low * num_nodes + high)[low < high]
        pairs = torch.cat([pairs, number[~torch.isin(number, edges)]]).unique()
    pairs = pairs[torch.randperm(len(pairs))[:count]]
    return torch.stack([pairs // num_nodes, pairs % num_nodes])
