# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Data sets that are downloaded."""

import pytest
import torch

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
