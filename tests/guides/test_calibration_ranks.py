# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Ranks of exact posteriors are uniform, and those of wrong ones are not."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy.stats import chisquare

from pyro_nmm.guides import calibration_ranks

SHIFTS = torch.tensor([0.0, 2.0])


def model(number):
    mean = pyro.sample("mean", dist.Normal(SHIFTS, 1.0).to_event(1))
    pyro.sample("x", dist.Normal(mean, 1.0).expand([number, 2]).to_event(2))


def sample_of(width, shift, thin=1):
    def sample(sites):
        precision = 1 + len(sites["x"])
        mean = (SHIFTS + sites["x"].sum(0)) / precision + shift
        law = dist.Normal(mean, width * precision**-0.5)
        return {"mean": law.sample((19 * thin,))}

    return sample


def p_values(sample):
    torch.manual_seed(0)
    ranks = calibration_ranks(model, sample, 3, num_sets=400)["mean"]
    assert ranks.shape == (400, 2)
    return [chisquare(column.bincount(minlength=20)).pvalue for column in ranks.T]


@pytest.mark.parametrize("thin", [1, 3])
def test_right(thin):
    assert min(p_values(sample_of(1.0, 0.0, thin))) > 0.001


@pytest.mark.parametrize(("width", "shift"), [(0.7, 0.0), (1.5, 0.0), (1.0, 0.3)])
def test_wrong(width, shift):
    assert max(p_values(sample_of(width, shift))) < 1e-6


def test_discrete_sites():
    def model():
        pyro.sample("b", dist.Bernoulli(0.3))

    torch.manual_seed(0)
    ranks = calibration_ranks(
        model, lambda sites: {"b": dist.Bernoulli(0.3).sample((37,))}, num_sets=400
    )
    assert chisquare(ranks["b"].bincount(minlength=20)).pvalue > 0.001


def test_errors():
    for draws in (torch.zeros(19), torch.full((19, 2), torch.nan)):
        with pytest.raises(ValueError, match=r"numbers of shape \(S, 2,\), got"):
            calibration_ranks(model, lambda sites, draws=draws: {"mean": draws}, 3)
    given = pyro.condition(model, {"x": torch.zeros(3, 2)})
    with pytest.raises(ValueError, match=r"model has data at sites \['x'\]"):
        calibration_ranks(given, sample_of(1.0, 0.0), 3)
    with pytest.raises(ValueError, match="num_draws=19 or more, got 5"):
        calibration_ranks(model, lambda sites: {"mean": sites["mean"].expand(5, 2)}, 3)
    with pytest.raises(ValueError, match=r"draws of 'mu', but sites are \['mean', 'x'\]"):
        calibration_ranks(model, lambda sites: {"mu": sites["mean"].expand(19, 2)}, 3)
