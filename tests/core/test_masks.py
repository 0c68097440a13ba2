# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Sets of nodes: masks, masks of integers, whose zeros and ones torch would take for the ids of
nodes 0 and 1, and node ids."""

import pytest
import torch
from graphs import house
from torch_geometric.data import Data
from torch_geometric.nn import GraphSAGE

from pyro_nmm.datasets import with_in_degree
from pyro_nmm.guides import SeedLoss
from pyro_nmm.models import (
    NMMNetwork,
    PooledScores,
    StackedNMM,
    compatibility,
    temperature_scaling,
)


def test_compatibility():
    """Which takes zeros and ones that repeat as a mask, and node ids."""
    hood, y = house(), torch.tensor([0, 1, 2, 1, 0])
    observed = torch.tensor([True, True, False, True, True])
    for same in (observed.long(), observed.to(torch.uint8), torch.tensor([0, 1, 3, 4])):
        assert torch.equal(compatibility(hood, y, same, 3), compatibility(hood, y, observed, 3))


def test_temperature_scaling():
    scores, y, mask = torch.randn(6, 3), torch.randint(3, (6,)), torch.arange(6) > 2
    for same in (mask.long(), mask.to(torch.uint8), torch.tensor([3, 5, 4]), [3, 4, 5]):
        assert temperature_scaling(scores, y, same) == temperature_scaling(scores, y, mask)


def test_pooled_scores():
    pool, hood, scores, y = PooledScores(3), house(), torch.randn(5, 3), torch.randint(3, (5,))
    known = torch.tensor([False, False, True, True, False])
    for same in (known.long(), known.to(torch.uint8), torch.tensor([3, 2]), [2, 3]):
        expected = pool.terms(hood, scores, y, known)
        torch.testing.assert_close(pool.terms(hood, scores, y, same), expected)
    stacked = StackedNMM(3)
    assert pool.terms(hood, scores, y, known & ~known).isfinite().all()
    torch.testing.assert_close(
        stacked(hood, scores, y, torch.tensor([3, 2])), stacked(hood, scores, y, known)
    )


def test_seeds():
    hood, mask = house(), torch.tensor([True, True, False, True, True])
    edges = torch.stack([hood.source, hood.target])
    batch = with_in_degree(Data(torch.randn(5, 2), edges, y=torch.tensor([0, 1, 1, 0, 1])))
    sage = (GraphSAGE(2, 4, 1, out_channels=2) for _ in range(2))
    loss, found = SeedLoss(NMMNetwork(*sage, num_classes=2)), []
    for seeds in (mask, mask.long(), torch.tensor([4, 0, 1, 3]), [0, 1, 3, 4]):
        torch.manual_seed(0)
        found.append(loss(batch, seeds).item())
    assert found[0] != 0
    assert found == found[:1] * 4
    assert loss(batch, []) == 0
    with pytest.raises(ValueError, match=r"seeds must be a boolean mask.*that repeat"):
        loss(batch, torch.tensor([1, 1]))
