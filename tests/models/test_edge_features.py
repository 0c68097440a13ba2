# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Features of edges, as fits of hidden fields take them."""

import pytest
import torch

from pyro_nmm import sources
from pyro_nmm.models import NormalEmission, fit_field

SMALL = {"num_starts": 1, "num_steps": 2, "num_draws": 2}


@pytest.mark.parametrize("dtype", [torch.float, torch.double, torch.long, torch.bool])
def test_features_of_edges_have_any_type(dtype):
    """Hops are integers, distances are often in double precision whatever the data are in."""
    hood = sources.grid(4, 4, stride=2)
    for data in (torch.randn(16, 2), torch.randn(16, 2).double()):
        hops = torch.arange(hood.num_edges).to(dtype)
        field = fit_field(NormalEmission(2), hood, data, hops, **SMALL)
        assert field.probs.dtype == data.dtype
        assert field.latents(data).sample().shape == (2, 16)


def test_a_pair_is_no_neighborhood():
    pair = sources.points(torch.rand(9, 2), radius=1.0, spacing=1.0)
    with pytest.raises(ValueError, match=r"hood must be a Neighborhood, got .*tuple.* the first"):
        fit_field(NormalEmission(2), pair, torch.randn(9, 2), **SMALL)


def test_features_that_are_none():
    hood = sources.grid(4, 4, stride=2)
    short, infinite = torch.zeros(3), torch.full((hood.num_edges,), torch.inf)
    wrong = {"must hold numbers of shape": (short, [1.0], short.to(torch.cfloat)),
             "must be finite": (infinite,)}  # fmt: skip
    for message, values in wrong.items():
        for value in values:
            with pytest.raises(ValueError, match=message):
                fit_field(NormalEmission(2), hood, torch.randn(16, 2), value, **SMALL)
