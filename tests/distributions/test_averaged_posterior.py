# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Likelihoods of more labels under posteriors and their averages, against enumeration."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from pyro_nmm import AveragedPosterior, Neighborhood, NeighborMixture
from pyro_nmm.distributions import posterior as posteriors
from pyro_nmm.distributions import smc

SIZE, LABELS = 6, 3
original = SimpleNamespace(_systematic=smc._systematic, _exchange=smc._exchange)
KNOWN = torch.arange(SIZE) < 2


def random_hood(num_nodes, num_edges):
    return Neighborhood(torch.randint(num_nodes, (2, num_edges)), num_nodes)


@pytest.fixture
def problem():
    """Two mixtures on one graph, and labels."""
    hood = random_hood(SIZE, 9)
    parameters = [(torch.rand(SIZE, LABELS) + 0.1, torch.randn(hood.num_edges)) for _ in range(2)]
    return [NeighborMixture(hood, *each) for each in parameters], torch.randint(LABELS, (SIZE,))


@pytest.mark.parametrize(("stage", "exact"), [(1, False), (2, True)])
def test_likelihood_is_unbiased(problem, stage, exact, monkeypatch):
    monkeypatch.setattr(smc, "STAGE", stage)
    (mix, _), y = problem
    posterior = mix.condition(y, KNOWN, None if exact else 40, weighted=True)
    new = ~KNOWN & (torch.arange(SIZE) < 5)
    truth = posterior.log_marginal(new.nonzero()[:, 0], y[new]).exp()
    found = torch.stack([posterior.log_likelihood(y, new, 4).exp() for _ in range(600)]).double()
    assert (found.mean() - truth).abs() < 4 * found.std() / len(found) ** 0.5


@pytest.mark.parametrize("kind", ["prior", "posterior", "average"])
def test_likelihood_of_all_others(problem, kind):
    mixes, y = problem
    posterior = mixes[0].prior() if kind == "prior" else mixes[0].condition(y, KNOWN)
    if kind == "average":
        posterior = AveragedPosterior([posterior, mixes[1].condition(y, KNOWN)])
    new = (~posterior.observed).nonzero()[:, 0]
    truth = posterior.log_marginal(new, y[new])
    likelihood = posterior.log_likelihood(y, num_particles=20_000)
    torch.testing.assert_close(likelihood, truth, atol=0.08, rtol=0)
    if kind == "posterior":
        assert posterior.log_likelihood(y, KNOWN) == 0  # of no other label


def test_particles_soon_share_what_was_given(monkeypatch):
    """Whole counts are copied a few times, however many labels follow: the cost is linear."""
    monkeypatch.setattr(smc, "STAGE", 1)
    often = partial(smc.sequential_monte_carlo, threshold=0.99)
    monkeypatch.setattr(posteriors, "sequential_monte_carlo", often)
    copies = {}
    for size in (200, 800):
        calls = {"_systematic": 0, "_exchange": 0}
        for name in calls:
            monkeypatch.setattr(smc, name, counted(calls, name, getattr(original, name)))
        hood, y = random_hood(size, 10 * size), torch.randint(2, (size,))
        mix = NeighborMixture(hood, torch.full((size, 2), 0.05), torch.zeros(hood.num_edges))
        posterior = mix.condition(y, torch.arange(size) % 5 == 0, num_samples=16)
        posterior.log_likelihood(y, num_particles=16)
        assert calls["_systematic"] > size / 4
        copies[size] = calls["_systematic"] - calls["_exchange"]
    assert 0 < copies[800] < 160 < calls["_systematic"]


def counted(calls, name, function):
    def call(*args):
        calls[name] += 1
        return function(*args)

    return call


def test_counts_vary_with_the_parameters():
    """Labels of far nodes depend on each other through the parameters."""
    hood = random_hood(40, 0)
    tilted = [torch.tensor([9.0, 1.0]), torch.tensor([1.0, 9.0])]
    mixes = [NeighborMixture(hood, each.expand(40, -1), torch.zeros(40)) for each in tilted]
    posterior = AveragedPosterior([mix.prior() for mix in mixes])
    counts = posterior.counts([torch.arange(40)], label=0, num_samples=4000).double()
    within, between = 40 * 0.9 * 0.1, (40 * 0.4) ** 2
    assert counts.var().item() == pytest.approx(within + between, rel=0.05)
