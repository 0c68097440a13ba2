# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Graphs of link prediction, and splits of their links: random and published."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from scipy.io import loadmat
from scipy.sparse import coo_matrix
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.transforms import RandomLinkSplit
from torch_geometric.utils import from_scipy_sparse_matrix, remove_self_loops, to_undirected

from benchmarks.shared.graphs import planetoid
from pyro_nmm.datasets import seeded
from pyro_nmm.sparse import identity

#: By name, a file and the key of its matrix: co-authors at NIPS 0 to 12, and interactions of
#: proteins (Pajek).
MATRICES = {"nips12": ("nips12/nips12.mat", "B"), "yeast": ("yeast/yeast.mat", "Problem")}


class LinkSplit(NamedTuple):
    """Edges to train on, in both directions, and held-out pairs ``(2, P)`` in one direction: with
    an edge, and as many without."""

    train: Tensor
    val: Tensor
    val_false: Tensor
    test: Tensor
    test_false: Tensor

    @property
    def held_out(self) -> Tensor:
        """``(2, P)``: all held-out pairs."""
        return torch.cat(self[1:], 1)


def link_split(edge_index: Tensor, num_nodes: int, seed: int) -> LinkSplit:
    """A random split of an undirected graph's edges, of which 5 percent validate and 10 test."""
    edge_index = to_undirected(remove_self_loops(edge_index)[0], num_nodes=num_nodes)
    transform = RandomLinkSplit(
        0.05, 0.1, is_undirected=True, add_negative_train_samples=False, neg_sampling_ratio=0.0
    )
    with seeded(seed):
        parts = transform(Data(edge_index=edge_index, num_nodes=num_nodes))
        held = [part.edge_label_index for part in parts[1:]]
        sizes = [pairs.shape[1] for pairs in held]
        others = _false_pairs(edge_index, num_nodes, sum(sizes)).split(sizes, 1)
    return LinkSplit(parts[0].edge_index, held[0], others[0], held[1], others[1])


def _false_pairs(edge_index: Tensor, num_nodes: int, count: int) -> Tensor:
    """``(2, count)`` different pairs without an edge, in random order."""
    edges = edge_index[0] * num_nodes + edge_index[1]
    pairs = torch.zeros(0, dtype=torch.long)
    while len(pairs) < count:
        low, high = torch.randint(num_nodes, (2, 2 * count)).sort(0).values
        number = (low * num_nodes + high)[low < high]
        pairs = torch.cat([pairs, number[~torch.isin(number, edges)]]).unique()
    pairs = pairs[torch.randperm(len(pairs))[:count]]
    return torch.stack([pairs // num_nodes, pairs % num_nodes])


def link_graph(name: str, root: Path) -> Data:
    """A graph without labels: ``edge_index`` and binary features ``x`` in ``torch.sparse_csr``, the
    identity if the graph has none."""
    if name not in MATRICES:
        data = planetoid(name, root)
        x = (data.x.to_dense() > 0).to(torch.get_default_dtype()).to_sparse_csr()
        return Data(x=x, edge_index=remove_self_loops(data.edge_index)[0],
                    num_nodes=data.num_nodes, has_features=True)  # fmt: skip
    file, key = MATRICES[name]
    content = loadmat(root / file, squeeze_me=True, struct_as_record=False)[key]
    matrix = coo_matrix(content.A if name == "yeast" else content)
    size = matrix.shape[0]
    edge_index = from_scipy_sparse_matrix(matrix)[0]
    edge_index = to_undirected(remove_self_loops(edge_index)[0].long(), num_nodes=size)
    return Data(x=identity(size), edge_index=edge_index, num_nodes=size, has_features=False)


def published_split(path: Path, num_nodes: int) -> LinkSplit:
    """A split of an ``.npz`` file with ``train_edges``, ``val_edges``, ``val_edges_false``, ..."""
    names = ("train_edges", "val_edges", "val_edges_false", "test_edges", "test_edges_false")
    with np.load(path) as file:
        train, *held = (torch.from_numpy(file[name]).long().T.contiguous() for name in names)
    return LinkSplit(to_undirected(train, num_nodes=num_nodes), *held)
