# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Data sets and splits for node classification."""

import functools
import os
import tempfile
from numbers import Integral, Real
from pathlib import Path

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.datasets import Planetoid
from torch_geometric.io import fs
from torch_geometric.transforms import NormalizeFeatures
from torch_geometric.utils import from_scipy_sparse_matrix, index_to_mask, to_undirected

from pyro_nmm.arguments import as_tensor, check_edges, check_range, expect
from pyro_nmm.datasets.entries import as_seed, entry, extra, reading
from pyro_nmm.sparse import to_csr

PLANETOID = {"cora": "Cora", "citeseer": "CiteSeer", "pubmed": "PubMed"}


class WholeFiles(Planetoid):
    """Files appear whole: a process may be killed while it writes them, another may read them."""

    def download(self) -> None:
        for name in self.raw_file_names:
            with tempfile.TemporaryDirectory(dir=self.raw_dir) as folder:
                fs.cp(f"{self.url}/{name}", folder)
                os.replace(f"{folder}/{name}", f"{self.raw_dir}/{name}")

    @classmethod
    def save(cls, data_list, path) -> None:
        with tempfile.TemporaryDirectory(dir=Path(path).parent) as folder:
            super().save(data_list, f"{folder}/data.pt")
            os.replace(f"{folder}/data.pt", path)


def planetoid(name: str, root: str | Path | None = None) -> Data:
    """``"cora"``, ``"citeseer"`` or ``"pubmed"`` with the public split, by PyG. Rows of features
    sum to one; bags of words come in ``torch.sparse_csr``.

    :param root: folder that holds ``Cora/raw`` and the like; default ``~/.cache/pyro-nmm``. Missing
        files are downloaded. PyG unpickles the files of this folder, which can run any code: use
        files from a source that you trust. Several processes may share the folder.
    """
    if name not in PLANETOID:
        raise ValueError(f"name must be one of {tuple(PLANETOID)}, got {name!r}")
    root = Path(root) if root is not None else Path.home() / ".cache" / "pyro-nmm"
    folder = str(root), PLANETOID[name]
    load = functools.partial(WholeFiles, *folder, transform=NormalizeFeatures())
    with reading(Path(*folder)):
        try:
            data = load()[0]
        except Exception:
            processed = Path(*folder, "processed")
            if not (processed / "data.pt").exists():
                raise
            for file in processed.glob("pre_*.pt"):  # PyG 2.6 reads them all the same
                file.unlink(missing_ok=True)
            data = load(force_reload=True)[0]  # from the raw files
    # Dense products are faster for PubMed's features.
    if (data.x != 0).double().mean() < 0.05:
        data.x = to_csr(data.x)
    return data


def digits(num_neighbors: int = 8) -> Data:
    """scikit-learn's images of digits, ``(N, 64)`` in [0, 1], and the graph of nearest neighbours.

    >>> digits()
    Data(x=[1797, 64], edge_index=[2, 19854], y=[1797])
    """
    images = extra("sklearn.datasets", "digits").load_digits()
    graph = extra("sklearn.neighbors", "digits").kneighbors_graph(images.data, num_neighbors)
    edge_index = to_undirected(from_scipy_sparse_matrix(graph)[0])
    x = torch.tensor(images.data, dtype=torch.float) / 16
    return Data(x=x, edge_index=edge_index, y=torch.tensor(images.target))


def random_split(data: Data, train: float, val: float, test: float, seed: int) -> Data:
    """A copy of ``data`` with random masks of these shares. For one seed, ``train`` does not change
    the test and the validation nodes, and smaller training sets are parts of larger ones.

    >>> data = Data(y=torch.zeros(10), num_nodes=10)
    >>> data = random_split(data, train=0.3, val=0.2, test=0.5, seed=0)
    >>> [int(data[f"{name}_mask"].sum()) for name in ("train", "val", "test")]
    [3, 2, 5]
    """
    device, size = entry(data, "y").device, data.num_nodes
    shares = {"test": test, "val": val, "train": train}
    good = all(isinstance(share, Real) and 0 < share <= 1 for share in shares.values())
    parts = {name: round(share * size) if good else 0 for name, share in shares.items()}
    if min(parts.values()) < 1 or sum(parts.values()) > size:
        got = f"{train}, {val}, {test} of {size} nodes"
        raise ValueError(f"train, val and test must select nodes and sum to at most 1, got {got}")
    order = torch.randperm(size, generator=torch.Generator().manual_seed(as_seed(seed)))
    data = data.clone()
    split = order.split([*parts.values(), size - sum(parts.values())])
    for name, nodes in zip(parts, split, strict=False):
        data[name + "_mask"] = index_to_mask(nodes, size).to(device)
    return data


def select_split(data: Data, split: int = 0) -> Data:
    """A copy of ``data`` with masks ``(N,)``, from PyG's masks ``(N,)`` or ``(N, splits)``.

    >>> four = torch.eye(4, dtype=torch.bool)
    >>> data = Data(train_mask=four, val_mask=four, test_mask=four)
    >>> select_split(data, split=2).train_mask
    tensor([False, False,  True, False])
    """
    data = data.clone()
    for name in ("train_mask", "val_mask", "test_mask"):
        mask = entry(data, name)
        if mask.dim() == 2:
            if not isinstance(split, Integral) or not 0 <= split < mask.shape[1]:
                raise ValueError(f"split must be in 0..{mask.shape[1] - 1}, got {split!r}")
            data[name] = mask[:, split]
        elif split:
            raise ValueError(f"split must be 0 where {name} has shape (N,), got {split}")
    return data


def inner_edges(edge_index: Tensor, mask: Tensor) -> Tensor:
    """``(2, P)``: the pairs of adjacent nodes of ``mask``, each once, without self-loops.

    >>> edge_index = torch.tensor([[0, 1, 1, 2, 3], [1, 0, 2, 3, 3]])
    >>> inner_edges(edge_index, torch.tensor([True, True, True, False]))
    tensor([[0, 1],
            [1, 2]])
    """
    edge_index, mask = as_tensor("edge_index", edge_index), as_tensor("mask", mask)
    expect("mask", mask, ("N",), kind="mask")
    check_edges("edge_index", edge_index)
    check_range("edge_index", edge_index, len(mask), cure=", the nodes of mask")
    pairs = edge_index.sort(0).values
    return pairs[:, mask[pairs].all(0) & (pairs[0] < pairs[1])].unique(dim=1)
