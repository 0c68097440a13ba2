# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Masks of integers, whose zeros and ones torch would take for the ids of nodes 0 and 1."""

import pytest
import torch
from graphs import house

from pyro_nmm.models import PooledScores, StackedNMM, compatibility, temperature_scaling


def test_compatibility():
    """Which takes zeros and ones that repeat as a mask, and node ids."""
    hood, y = house(), torch.tensor([0, 1, 2, 1, 0])
    observed = torch.tensor([True, True, False, True, True])
    for same in (observed.long(), observed.to(torch.uint8), torch.tensor([0, 1, 3, 4])):
        assert torch.equal(compatibility(hood, y, same, 3), compatibility(hood, y, observed, 3))
    with pytest.raises(ValueError, match=r"observed must be a boolean mask \(N,\)"):
        compatibility(hood, y, observed[:4], 3)


def test_temperature_scaling():
    scores, y, mask = torch.randn(6, 3), torch.randint(3, (6,)), torch.arange(6) > 2
    for bad in (mask.long(), mask.to(torch.uint8), torch.tensor([3, 4, 5])):
        with pytest.raises(ValueError, match=r"held_out must be a boolean mask.*index_to_mask"):
            temperature_scaling(scores, y, bad)
    with pytest.raises(ValueError, match="held_out selects no node"):
        temperature_scaling(scores, y, mask & ~mask)


def test_pooled_scores():
    """Here too; StackedNMM takes node ids as well, and makes masks of them before."""
    pool, hood, scores, y = PooledScores(3), house(), torch.randn(5, 3), torch.randint(3, (5,))
    known = torch.tensor([False, False, True, True, False])
    for bad in (known.long(), known.to(torch.uint8), torch.tensor([2, 3])):
        with pytest.raises(ValueError, match=r"known must be a boolean mask.*index_to_mask"):
            pool.terms(hood, scores, y, bad)
    stacked = StackedNMM(3)
    assert pool.terms(hood, scores, y, known & ~known).isfinite().all()
    torch.testing.assert_close(
        stacked(hood, scores, y, torch.tensor([3, 2])), stacked(hood, scores, y, known)
    )
