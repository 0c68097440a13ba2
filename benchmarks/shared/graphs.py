# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Planetoid's graphs."""

from pathlib import Path

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
