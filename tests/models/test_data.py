# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Data sets that are downloaded, also after a kill."""

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.sparse import csr_matrix
from torch_geometric.io import fs

from pyro_nmm.datasets.nodes import planetoid, select_split


@pytest.fixture(autouse=True)
def as_a_user():
    torch.set_default_dtype(torch.float)


@pytest.mark.data
def test_cora_loads(request):
    root = request.config.getoption("--data-root")
    data = select_split(planetoid("cora", root))
    assert data.x.layout == torch.sparse_csr
    assert [int(data[f"{m}_mask"].sum()) for m in ("train", "val", "test")] == [140, 500, 1000]
    torch.testing.assert_close(data.x.to_dense().sum(-1), torch.ones(2708))
    assert data.edge_index.shape == (2, 10556)
    assert data.y.shape == (2708,)


def raw_files(nodes=520, test=10):
    """A ring in the format of Planetoid's files."""
    rest, y = nodes - test, np.eye(2)[np.arange(nodes) % 2]
    x = csr_matrix(np.random.default_rng(0).random((nodes, 30)) < 0.1, dtype=np.float32)
    parts = {"x": x[:4], "tx": x[rest:], "allx": x[:rest], "y": y[:4], "ty": y[rest:]}
    parts |= {
        "ally": y[:rest],
        "graph": {i: [(i + 1) % nodes, (i - 1) % nodes] for i in range(nodes)},
    }
    files = {f"ind.cora.{name}": pickle.dumps(part) for name, part in parts.items()}
    return files | {"ind.cora.test.index": "\n".join(map(str, range(rest, nodes))).encode()}


@pytest.fixture
def internet(monkeypatch):
    """What a download finds."""
    files = raw_files()

    def download(url, folder):
        name = url.rpartition("/")[2]
        Path(folder, name).write_bytes(files[name])

    monkeypatch.setattr(fs, "cp", download)
    return files


def killed(write):
    """The process ends after a part of the file."""

    def part(given, place):
        write(given, place)
        path = Path(place) if Path(place).is_file() else next(Path(place).glob("ind.*"))
        path.write_bytes(path.read_bytes()[:100])
        raise KeyboardInterrupt

    return part


def test_planetoid_after_kills(tmp_path, internet, monkeypatch):
    """In a download, and while PyG writes what it has processed."""
    for name, kept in (("cp", set()), ("torch_save", internet.keys())):
        with monkeypatch.context() as patch:
            patch.setattr(fs, name, killed(getattr(fs, name)))
            with pytest.raises(KeyboardInterrupt):
                planetoid("cora", tmp_path)
        assert {path.name for path in tmp_path.rglob("*.*")} == kept
    data = planetoid("cora", tmp_path)
    assert data.edge_index.shape == (2, 1040)
    for name in ("data.pt", "pre_filter.pt"):
        file = tmp_path / "Cora/processed" / name
        file.write_bytes(file.read_bytes()[:100])
        again = planetoid("cora", tmp_path)
        assert torch.equal(again.x.to_dense(), data.x.to_dense())
        assert torch.equal(again.edge_index, data.edge_index)


def test_planetoid_without_readable_files(tmp_path, internet):
    internet["ind.cora.allx"] = internet["ind.cora.allx"][:100]
    with pytest.raises(ValueError, match=r"Cora cannot be read: UnpicklingError"):
        planetoid("cora", tmp_path)
