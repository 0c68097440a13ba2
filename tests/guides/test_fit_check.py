# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Checks of fits: their numbers by quadrature of an enumerated posterior, and their conclusions."""

import math
import warnings

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from oracle import of_hood
from pyro import poutine
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoDelta, AutoNormal
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
    assert abs(found.shift + shift / slope) < 4.5 * found.shift_error + 0.05
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


@pytest.mark.parametrize("seed", range(2))
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


def with_simplex(y=None):
    share = pyro.sample("share", dist.Dirichlet(torch.ones(2)))
    scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))  # which no label depends on
    group = pyro.sample("group", dist.Bernoulli(0.5), obs=torch.tensor(1.0))
    alpha = share[..., None, :] + 0.5 + 50 * (1 - group) * torch.eye(2)[0]
    nmm(SMALL, alpha.expand(*share.shape[:-1], 5, 2), torch.zeros(SMALL.num_edges), y)
    pyro.sample("shown", dist.Normal(0.0, scale), obs=torch.tensor(1.0))


def test_sites_of_other_shapes():
    """Observed sites beside the labels are not drawn anew; a simplex has a number less."""
    pyro.set_rng_seed(0)
    found = check_fit(fitted(with_simplex, Y, 300), Y, num_draws=200)
    assert found.names == ["share, unconstrained", "scale"]
    assert found.converged
    assert found.mixed
    assert found.fits, str(found)
    assert found.replicates["c"].draws["neighbours that agree"].mean() < 0.9


def test_ridge():
    """A guide without correlations moves slowly along a ridge; the check sees its end."""

    def ridge(y):
        a = pyro.sample("a", dist.Normal(0.0, 1.0))
        b = pyro.sample("b", dist.Normal(a, 0.1))
        of_kappa(b.exp(), SMALL, y=y)

    pyro.set_rng_seed(0)
    guide = AutoNMM(ridge, AutoNormal)
    guide(Y)
    for name in ("a", "b"):
        getattr(guide.parents.locs, name).data.fill_(1.5)
        setattr(guide.parents.scales, name, torch.tensor(0.1))
    found = check_fit(guide, Y, num_draws=200)
    assert not found.converged
    assert (found.shift < -5).all()


def test_local_parameters_of_subsamples():
    def local(y):
        with pyro.plate("graphs", 4, subsample_size=2) as index:
            kappa = pyro.sample("kappa", dist.LogNormal(0.0, 1.0))
            of_kappa(kappa, SMALL, y=y[index])

    guide, y = AutoNMM(local, create_plates=lambda y: pyro.plate("graphs", 4, 2)), Y.expand(4, 5)
    guide(y)
    with pytest.raises(ValueError, match=r"plates \['graphs'\] subsample continuous sites"):
        check_fit(guide, y)


@pytest.mark.parametrize("estimator", [Chains(3), "reward_to_go"])
def test_what_a_check_leaves_alone(estimator):
    pyro.set_rng_seed(0)
    guide = fitted(labelled, Y, 5, estimator=estimator)
    before = {
        name: value.clone() for name, value in guide.state_dict().items() if "extra" not in name
    }
    states = {name: chains.states.clone() for name, chains in guide.chains.items()}
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # other data, which the fit does not see
        check_fit(guide, Y)
        check_fit(guide, 1 - Y)
        with pytest.raises(ValueError, match="num_rounds"):
            check_fit(guide, Y, num_rounds=1)
    guide(Y)  # without a warning
    assert guide.estimator is estimator
    assert states.keys() == guide.chains.keys()
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


def test_no_pair_of_observed_neighbours():
    def masked(y):
        kappa = pyro.sample("kappa", dist.LogNormal(0.0, 1.0))
        of_kappa(kappa, SMALL, y=y, observed=torch.tensor([True, False, False, True, False]))

    found = check_fit(fitted(masked, Y, 3), Y, num_draws=8)
    assert next(iter(found.replicates["c"].data)) == "the commonest label"
    assert found.fits


@pytest.mark.parametrize(
    ("guide", "message"),
    [
        (lambda: AutoNormal(labelled), "guide must be an AutoNMM, got AutoNormal"),
        (lambda: AutoNMM(labelled), "guide has made no step: fit it before check_fit"),
        (lambda: fitted(labelled, Y, 1, guide=AutoDelta), "guide has no widths, as AutoDelta"),
    ],
)
def test_refusals(guide, message):
    with pytest.raises(ValueError, match=message):
        check_fit(guide(), Y)
