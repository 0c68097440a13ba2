# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Posteriors by scores at points, beside exact ones on a grid, and when they are refused."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from oracle import of_hood
from pyro.infer import Predictive

from pyro_nmm import Neighborhood
from pyro_nmm.guides import nested_posterior
from pyro_nmm.models import nmm

HOOD = Neighborhood(torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]]), 3)
ALPHA = torch.tensor([[0.4, 0.8], [0.9, 0.3], [0.3, 0.3]]).double()
OWN = (HOOD.source == HOOD.target).double()
ZERO = torch.zeros(()).double()
TIMES = 150


def log_probs(log_kappa, beta):
    """Of all labellings of three nodes."""
    found = of_hood(HOOD, ALPHA.double() * math.exp(log_kappa), beta * OWN.double())
    return torch.tensor(found.labels), torch.tensor(found.log_prob).flatten()


def labellings(seed):
    torch.manual_seed(seed)
    labels, logs = log_probs(0.0, 0.5)
    return labels[torch.multinomial(logs.exp(), TIMES, replacement=True)]


def attended(y):
    kappa = pyro.sample("kappa", dist.LogNormal(ZERO, 1.0))
    beta = pyro.sample("beta", dist.Normal(ZERO, 1.0))
    with pyro.plate("labellings", TIMES):
        nmm(HOOD, kappa * ALPHA, beta * OWN, y, collapsed=True)


def sensed(x):
    """Of latent labels, with the spread of their measurements."""
    kappa = pyro.sample("kappa", dist.LogNormal(ZERO, 1.0))
    sd = pyro.sample("sd", dist.LogNormal(ZERO, 1.0))
    with pyro.plate("labellings", TIMES):
        y = nmm(HOOD, kappa * ALPHA, 0.5 * OWN, collapsed=True)
        pyro.sample("x", dist.Normal(1.5 * y, sd).to_event(1), obs=x)


def moments(log_likelihood, first, second):
    """Means and standard deviations on a grid of two numbers with standard normal priors."""
    logs = torch.tensor([[log_likelihood(float(a), float(b)) for b in second] for a in first])
    logs = logs.double() - first[:, None] ** 2 / 2 - second**2 / 2
    weights = logs.flatten().softmax(0).view_as(logs)
    parts = (weights.sum(1), first), (weights.sum(0), second)
    means = [float(w @ at) for w, at in parts]
    return means, [
        float((w @ (at - m) ** 2).sqrt()) for (w, at), m in zip(parts, means, strict=True)
    ]


def check(found, means, sds):
    assert found.fits, str(found)
    off = (found.mean - torch.tensor(means).double()) / torch.tensor(sds).double()
    assert (off.abs() < 4 * found.mean_error + 0.06).all()
    assert ((found.sd / torch.tensor(sds).double()).log().abs() < 4 * found.sd_error + 0.06).all()
    assert (found.mean_error < 0.15).all()


def test_two_parameters():
    y = labellings(0)

    def log_likelihood(log_kappa, beta):
        labels, logs = log_probs(log_kappa, beta)
        same = (y[:, None] == labels).all(-1)
        return float((same.double() @ logs).sum())

    pyro.set_rng_seed(0)
    found = nested_posterior(attended, y, num_sweeps=400)
    assert found.names == ["kappa", "beta"]
    grid = torch.linspace(-2.5, 2.5, 41).double(), torch.linspace(-2.5, 3.0, 41).double()
    means, sds = moments(log_likelihood, *grid)
    check(found, means, sds)
    assert {"misfit", "kappa", "beta"} <= set(str(found).split())
    logs = torch.tensor([[log_likelihood(float(a), float(b)) for b in grid[1]] for a in grid[0]])
    priors = grid[0][:, None] ** 2 / 2 + grid[1] ** 2 / 2 + math.log(2 * math.pi)
    area = (grid[0][1] - grid[0][0]) * (grid[1][1] - grid[1][0])
    evidence, error = found.log_evidence(20, 81)
    exact = (logs.double() - priors).flatten().logsumexp(0) + area.log()
    assert abs(evidence - exact) < 4 * error + 0.1
    with pytest.raises(ValueError, match="are in plates"):
        found.posterior(1)
    draws = found.sample(2000)
    assert abs(draws["kappa"].log().mean() - means[0]) < 0.3 * sds[0]
    assert Predictive(attended, {k: v[:3] for k, v in draws.items()})(None)["y"].shape == (
        3,
        150,
        3,
    )


def test_latent_labels():
    torch.manual_seed(1)
    x = 1.5 * labellings(1) + 0.6 * torch.randn(TIMES, 3).double()

    def log_likelihood(log_kappa, log_sd):
        labels, logs = log_probs(log_kappa, 0.5)
        seen = dist.Normal(1.5 * labels, math.exp(log_sd)).log_prob(x[:, None]).sum(-1)
        return float((seen + logs).logsumexp(1).sum())

    pyro.set_rng_seed(0)
    found = nested_posterior(sensed, x, num_sweeps=400)
    grid = torch.linspace(-3.2, 3.4, 45).double(), torch.linspace(-0.8, -0.2, 41).double()
    check(found, *moments(log_likelihood, *grid))


def test_few_labels_and_a_skewed_prior():
    """Points that begin too far from the mode run away from it."""
    y = torch.tensor([0, 0, 1])

    def model():
        kappa = pyro.sample("kappa", dist.Gamma(2 + ZERO, 2.0))
        nmm(HOOD, kappa * ALPHA, 0.5 * OWN, y, collapsed=True)

    logs = []
    for log_kappa in LOG_KAPPAS:
        labels, log_prob = log_probs(float(log_kappa), 0.5)
        same = (labels == y).all(-1)
        logs.append(log_prob[same].sum() + 2 * log_kappa - 2 * log_kappa.exp())
    weights = torch.stack(logs).softmax(0)
    mean = weights @ LOG_KAPPAS
    sd = (weights @ (LOG_KAPPAS - mean) ** 2).sqrt()
    for seed in range(3):
        pyro.set_rng_seed(seed)
        found = nested_posterior(model, num_sweeps=100)
        assert abs(found.mean - mean) < 0.15 * sd
        assert abs(found.sd / sd - 1) < 0.15


LOG_KAPPAS = torch.linspace(-6.0, 6.0, 121).double()


@pytest.mark.parametrize("latent", [False, True])
def test_labels_are_mixed_over_parameters(latent):
    """Of three nodes, two of which are observed, or all of them with an error."""
    y, observed = torch.tensor([1, 1, 0]), torch.tensor([True, True, False])
    evidence = torch.tensor([[0.0, 1.5], [0.0, 1.0], [0.0, 0.0]]).double()

    def model():
        kappa = pyro.sample("kappa", dist.LogNormal(ZERO, 2.0))
        given = {} if latent else {"y": y, "observed": observed}
        drawn = nmm(HOOD, kappa * ALPHA, 0.5 * OWN, collapsed=True, **given)
        if latent:
            with pyro.plate("nodes", 3):
                pyro.factor("measured", evidence[torch.arange(3), drawn])

    logs, tables = [], []
    for log_kappa in LOG_KAPPAS:
        labels, log_prob = log_probs(float(log_kappa), 0.5)
        if latent:
            log_prob = log_prob + evidence[torch.arange(3), labels].sum(-1)
        else:
            log_prob = log_prob.masked_fill((labels != y)[:, observed].any(-1), -torch.inf)
        logs.append(log_prob.logsumexp(0) - log_kappa**2 / 8)
        tables.append(log_prob.softmax(0) @ labels.double())
    exact = torch.stack(logs).softmax(0) @ torch.stack(tables)
    pyro.set_rng_seed(0)
    found = nested_posterior(model, num_sweeps=200)
    posterior = found.posterior(400, 4, 10)["c"]
    assert (posterior.marginals()[:, 1] - exact).abs().max() < 0.05
    assert (posterior.sample((4000,)).double().mean(0) - exact).abs().max() < 0.07
    assert torch.equal(posterior.predict(), posterior.marginals().argmax(-1))
    if latent:
        with pytest.raises(ValueError, match="of observed labels"):
            found.log_evidence()


def test_two_modes_are_seen():
    """The sign of a parameter that the model squares."""

    def squared(y):
        beta = pyro.sample("beta", dist.Normal(ZERO, 1.0))
        with pyro.plate("labellings", TIMES):
            nmm(HOOD, ALPHA, 6 * beta.square() * OWN, y, collapsed=True)

    torch.manual_seed(2)
    labels, logs = log_probs(0.0, 3.0)
    y = labels[torch.multinomial(logs.exp(), TIMES, replacement=True)]
    for seed in range(3):
        pyro.set_rng_seed(seed)
        found = nested_posterior(squared, y, num_sweeps=100)
        assert not found.fits
        assert "use FieldGibbs" in str(found)


def refused(model, match, **options):
    with pytest.raises(ValueError, match=match):
        nested_posterior(model, **options)


def field(alpha):
    nmm(HOOD, alpha, 0.0 * OWN, torch.zeros(3).long(), collapsed=True)


def of_normals(size):
    with pyro.plate("rows", size):
        field_of = pyro.sample("x", dist.Normal(ZERO, 1.0))
    field(ALPHA * field_of.sum().exp())


def with_discrete():
    field(
        ALPHA
        * (1 + pyro.sample("m", dist.Bernoulli(0.5)) + pyro.sample("x", dist.LogNormal(ZERO, 1)))
    )


def test_refusals():
    refused(lambda: of_normals(9), "model has 9 continuous numbers, and a polynomial 1 to 8")
    refused(lambda: field(ALPHA), "model has 0 continuous numbers")
    refused(with_discrete, r"sites \['m'\] are discrete")
    refused(lambda: of_normals(1), "num_sweeps must", num_sweeps=3)


def test_one_and_three_numbers():
    """The posterior is the prior, because parameters do not change the density."""
    for size in (1, 3):
        pyro.set_rng_seed(0)

        def model(size=size):
            with pyro.plate("rows", size):
                x = pyro.sample("x", dist.Normal(0.5 + ZERO, 0.3))
            nmm(
                HOOD,
                ALPHA * (1 + 1e-6 * x.sum().exp()),
                0.0 * OWN,
                torch.zeros(3).long(),
                collapsed=True,
            )

        found = nested_posterior(model, num_sweeps=20)
        assert (found.mean - 0.5).abs().max() < 0.02
        assert (found.sd - 0.3).abs().max() < 0.02
