# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""What fits of hidden fields take and refuse."""

import math

import pytest
import torch
from emissions import ANSWERS, FEATURES
from graphs import shared_sources

from pyro_nmm import sources
from pyro_nmm.models import Annotators, NormalEmission, fit_field

QUICK = {"num_starts": 1, "num_steps": 2, "num_draws": 2}
BAD = {
    "data must be a tensor, an array or a nested list": (NormalEmission(2), "five words"),
    r"\(5, D\), a row for every node of hood, got \(4, 2\)": (NormalEmission(2), FEATURES[:4]),
    "data must be a floating-point tensor": (NormalEmission(2), ANSWERS),
    "same everywhere in column 1": (NormalEmission(2), FEATURES * torch.tensor([1, math.nan])),
    "data of column 0 is too large or small": (NormalEmission(2), 1e25 * FEATURES.float()),
    "same everywhere in column 0": (NormalEmission(2), FEATURES * torch.tensor([0, 1])),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_data(message):
    emission, data = BAD[message]
    with pytest.raises(ValueError, match=message):
        fit_field(emission, shared_sources(), data)


def test_other_types_of_numbers():
    """Half precision is raised to single, small integers are labels."""
    hood, answers = shared_sources(), ANSWERS.clamp(min=0).to(torch.uint8)
    field = fit_field(NormalEmission(2), hood, FEATURES.half(), **QUICK)
    assert field.values["mean"].dtype == torch.float
    field = fit_field(Annotators(2), hood, answers, **QUICK)
    assert field.probs.shape == (5, 2)


@pytest.mark.parametrize("dtype", [torch.float, torch.double, torch.long, torch.bool])
def test_features_of_edges_have_any_type(dtype):
    """Hops are integers, distances are often in double precision whatever the data are in."""
    hood = sources.grid(4, 4, stride=2)
    hops = torch.arange(hood.num_edges).to(dtype)
    for data in (torch.randn(16, 2), torch.randn(16, 2).double()):
        field = fit_field(NormalEmission(2), hood, data, hops, **QUICK)
        assert field.probs.dtype == data.dtype
        assert field.latents(data).sample().shape == (2, 16)


REFUSED = {
    "hood must be a Neighborhood, got.*edge_index, num_nodes": {"hood": torch.tensor([[0], [1]])},
    "hood must be a Neighborhood, got .*tuple": {"hood": (0, 1)},
    **{name: {name: 0} for name in ("num_starts", "num_steps", "num_draws", "num_chains")},
    r"edge_attr must have shape \(8, F\), or \(8,\)": {"edge_attr": torch.zeros(7)},
    "edge_attr must be finite and real, got 0": {"edge_attr": torch.full((8,), 1j)},
    "edge_attr must be finite and real, got inf": {"edge_attr": torch.full((8,), torch.inf)},
}


@pytest.mark.parametrize("message", REFUSED)
def test_bad_arguments(message):
    options = QUICK | REFUSED[message]
    hood = options.pop("hood", shared_sources())
    with pytest.raises(ValueError, match=message):
        fit_field(Annotators(2), hood, ANSWERS, **options)


def test_refusals_beside_a_fit():
    with pytest.raises(ValueError, match="num_labels"):
        NormalEmission(1)
    field = fit_field(Annotators(2), shared_sources(), ANSWERS, **QUICK)
    with pytest.raises(ValueError, match="gelman_rubin needs at least 2 chains of 4 draws"):
        field.chains.gelman_rubin()
