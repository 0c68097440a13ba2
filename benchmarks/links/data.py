# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Graphs of link prediction, and published splits."""

from pathlib import Path

import numpy as np
import torch
from scipy.io import loadmat
from scipy.sparse import coo_matrix
from torch_geometric.data import Data
from torch_geometric.utils import from_scipy_sparse_matrix, remove_self_loops, to_undirected

from pyro_nmm.datasets import LinkSplit, planetoid
from pyro_nmm.sparse import csr_of_entries, identity

#: By name, a file and the key of its matrix: co-authors at NIPS 0 to 12, and interactions of
#: proteins (Pajek).
MATRICES = {"nips12": ("nips12/nips12.mat", "B"), "yeast": ("yeast/yeast.mat", "Problem")}


def link_graph(name: str, root: Path) -> Data:
    """A graph without labels: ``edge_index`` and binary features ``x`` in ``torch.sparse_csr``, the
    identity if the graph has none."""
    if name not in MATRICES:
        data = planetoid(name, root)
        rows, columns = (data.x.to_dense() > 0).nonzero(as_tuple=True)
        x = csr_of_entries(rows, columns, torch.ones(len(rows)), tuple(data.x.shape))
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
