# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Checks of fits: their numbers by quadrature of an enumerated posterior, and their conclusions."""

import math

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from oracle import of_hood
from pyro import poutine
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from pyro.optim import ClippedAdam

from pyro_nmm import Neighborhood
from pyro_nmm.guides import AutoNMM, Chains, check_fit
from pyro_nmm.models import nmm

SMALL = Neighborhood(torch.tensor([[0, 1, 2, 3, 4, 0, 1], [1, 2, 3, 4, 0, 2, 4]]), 5)
Y, X = torch.tensor([0, 0, 1, 0, 0]), torch.tensor([0.3, -0.2, 1.1, 0.4, 0.1])
GRID = Neighborhood.grid(15, 15)


def of_kappa(kappa, hood, collapsed=True, y=None, observed=None):
    alpha = kappa[..., None, None] * torch.full((hood.num_nodes, 2), 0.5)
    return nmm(hood, alpha, torch.zeros(hood.num_edges), y, observed, collapsed=collapsed)


def labelled(y=None, hood=SMALL, collapsed=True):
    kappa = pyro.sample("kappa", dist.LogNormal(0.0, 1.0))
    of_kappa(kappa, hood, collapsed, y)


def hidden(x):
    labels = of_kappa(pyro.sample("kappa", dist.LogNormal(0.0, 1.0)), SMALL)
    pyro.sample("x", dist.Normal(labels.to(x.dtype), 1.0).to_event(1), obs=x)


def log_posterior(u, program):
    """Of log kappa, up to a constant."""
    alpha = math.exp(u) * torch.full((5, 2), 0.5)
    oracle = of_hood(SMALL, alpha, torch.zeros(SMALL.num_edges))
    if program is labelled:
        return oracle.log_prob[oracle.index(Y)].item() - u**2 / 2
    emitted = dist.Normal(torch.tensor(oracle.labels).double(), 1.0).log_prob(X).sum(-1)
    return np.logaddexp.reduce(oracle.log_prob + emitted.numpy()).item() - u**2 / 2


@pytest.mark.parametrize(("program", "data"), [(labelled, Y), (hidden, X)])
def test_numbers(way, program, data):
    """Shift and width of a guide that has learned nothing, in standard errors."""
    pyro.set_rng_seed(0)
    guide = AutoNMM(program, AutoNormal)
    guide(data)
    mean, sd = 0.6, 0.5
    guide.parents.locs.kappa.data.fill_(mean)
    guide.parents.scales.kappa = torch.tensor(sd)
    found = check_fit(guide, data, num_draws=400, num_rounds=20)
    x, weights = np.polynomial.hermite_e.hermegauss(20)
    weights = weights / weights.sum()
    scores = [
        (log_posterior(u + 1e-4, program) - log_posterior(u - 1e-4, program)) / 2e-4
        for u in mean + sd * x
    ]
    shift, slope = sd * weights @ scores, sd * weights @ (scores * x)
    assert found.names == ["kappa"]
    assert abs(found.median - math.exp(mean)) < 0.02
    # The guide's own moments are of 64 times as many draws.
    assert abs(found.shift - shift) < 4.5 * found.shift_error + 0.03
    assert abs(found.width.log() + math.log(-slope) / 2) < 4.5 * found.width_error + 0.02
    assert found.shift_error < 0.03


def fitted(model, y, steps, **options):
    pyro.clear_param_store()
    guide = AutoNMM(model, **options)
    elbo = Trace_ELBO(4, vectorize_particles=True, max_plate_nesting=0)
    svi = SVI(model, guide, ClippedAdam({"lr": 0.1, "lrd": 0.05 ** (1 / steps)}), elbo)
    for _ in range(steps):
        svi.step(y)
    return guide


@pytest.mark.parametrize("seed", range(3))
def test_three_cases(seed):
    """Too few steps; enough; and halves of one label each, which an NMM does not make."""
    pyro.set_rng_seed(seed)

    def model(y=None):
        labelled(y, GRID)

    y = poutine.trace(model).get_trace().nodes["y"]["value"]
    few = check_fit(fitted(model, y, 20), y)
    assert (few.converged, few.fits) == (False, True)
    enough = check_fit(fitted(model, y, 300), y)
    assert (enough.converged, enough.mixed, enough.fits) == (True, True, True)
    halves = torch.arange(225) // 113
    wrong = check_fit(fitted(model, halves, 300), halves)
    assert not wrong.fits
    assert "the model does not make such labels" in str(wrong)
    assert "not converged: take more steps" in str(few)


def test_what_a_check_leaves_alone():
    pyro.set_rng_seed(0)
    guide = fitted(labelled, Y, 5, estimator=Chains(3))
    before = {
        name: value.clone() for name, value in guide.state_dict().items() if "extra" not in name
    }
    states, estimator = guide.chains["c"].states.clone(), guide.estimator
    check_fit(guide, Y)
    assert guide.estimator is estimator
    assert torch.equal(guide.chains["c"].states, states)
    after = guide.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert all(value.grad is None or not value.grad.any() for value in guide.parameters())


def test_errors_too_large_to_tell():
    pyro.set_rng_seed(0)
    guide = fitted(labelled, Y, 100)
    found = check_fit(guide, Y)
    vague = found._replace(shift=0 * found.shift, shift_error=torch.ones(1))
    assert vague.converged is None
    assert "raise num_draws" in str(vague)
    stuck = found._replace(r_hat=2 * torch.ones(1))
    assert not stuck.mixed
    assert "chains do not agree" in str(stuck)


@pytest.mark.parametrize(
    ("guide", "message"),
    [
        (lambda: AutoNormal(labelled), "guide must be an AutoNMM, got AutoNormal"),
        (lambda: AutoNMM(labelled), "guide has made no step: fit it before check_fit"),
    ],
)
def test_refusals(guide, message):
    with pytest.raises(ValueError, match=message):
        check_fit(guide(), Y)
