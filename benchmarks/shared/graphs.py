# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Planetoid's graphs, and edges among some nodes."""

from pathlib import Path

from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.datasets import Planetoid
from torch_geometric.transforms import NormalizeFeatures

PLANETOID = {"cora": "Cora", "citeseer": "CiteSeer", "pubmed": "PubMed"}


def planetoid(name: str, root: Path | None = None) -> Data:
    """A graph of PyG with the public split. Rows of features sum to one; bags of words are sparse.

    :param root: folder that holds ``Cora/raw`` and the like; default ``~/.cache/pyro-nmm``.
    """
    folder = str(root or Path.home() / ".cache" / "pyro-nmm")
    data = Planetoid(folder, PLANETOID[name], transform=NormalizeFeatures())[0]
    # Dense products are faster for PubMed's features.
    if (data.x != 0).double().mean() < 0.05:
        data.x = data.x.to_sparse_csr()
    return data


def inner_edges(edge_index: Tensor, mask: Tensor) -> Tensor:
    """``(2, P)``: the pairs of adjacent nodes of ``mask``, each once, without self-loops."""
    pairs = edge_index.sort(0).values
    return pairs[:, mask[pairs].all(0) & (pairs[0] < pairs[1])].unique(dim=1)
