# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Likelihoods of more labels, and averages over parameters, against enumeration."""

import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from pyro_nmm import Neighborhood, NeighborMixture
from pyro_nmm.distributions import posterior as posteriors
from pyro_nmm.distributions import smc
from pyro_nmm.distributions.averaged_posterior import AveragedPosterior

SIZE, LABELS = 6, 3
original = SimpleNamespace(_systematic=smc._systematic, _exchange=smc._exchange)
KNOWN = torch.tensor([True, True, False, False, False, False])


def random_hood(num_nodes, num_edges):
    return Neighborhood(torch.randint(num_nodes, (2, num_edges)), num_nodes)


@pytest.fixture
def problem():
    """Two mixtures on one graph, labels, and what is known of them."""
    hood = random_hood(SIZE, 9)
    mixes = [
        NeighborMixture(hood, torch.rand(SIZE, LABELS) + 0.1, torch.randn(hood.num_edges))
        for _ in range(2)
    ]
    return mixes, torch.randint(LABELS, (SIZE,))


@pytest.fixture
def pair(problem):
    mixes, y = problem
    members = [mix.condition(y, KNOWN) for mix in mixes]
    return AveragedPosterior(members), mixes, y


def joint(mixes, y):
    """``(3,) * 4``: the average of exact conditionals of the unknown labels."""
    every = torch.cartesian_prod(*[torch.arange(LABELS)] * 4)
    whole = torch.cat([y[:2].expand(len(every), -1), every], 1)
    found = [mix.log_prob(whole).log_softmax(0).exp() for mix in mixes]
    return (sum(found) / len(found)).view([LABELS] * 4)


@pytest.mark.parametrize(("stage", "exact"), [(1, False), (2, True)])
def test_likelihood_is_unbiased(problem, stage, exact, monkeypatch):
    monkeypatch.setattr(smc, "STAGE", stage)
    (mix, _), y = problem
    posterior = mix.condition(y, KNOWN, None if exact else 40, weighted=True)
    new = ~KNOWN & (torch.arange(SIZE) < 5)
    truth = posterior.log_marginal(new.nonzero()[:, 0], y[new]).exp()
    found = torch.stack([posterior.log_likelihood(y, new, 4).exp() for _ in range(600)]).double()
    assert (found.mean() - truth).abs() < 4 * found.std() / len(found) ** 0.5


def test_likelihood_of_all_others(problem):
    (mix, _), y = problem
    posterior, new = mix.condition(y, KNOWN), (~KNOWN).nonzero()[:, 0]
    truth = posterior.log_marginal(new, y[new])
    torch.testing.assert_close(posterior.log_likelihood(y, None, 20_000), truth, atol=0.05, rtol=0)
    prior = mix.prior().log_likelihood(y, num_particles=20_000)
    torch.testing.assert_close(prior, mix.log_prob(y), atol=0.08, rtol=0)


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


def test_likelihood_of_no_label_is_certain(problem):
    (mix, _), y = problem
    assert mix.condition(y, KNOWN).log_likelihood(y, KNOWN) == 0


def test_joint_queries(pair):
    posterior, mixes, y = pair
    table, nodes = joint(mixes, y), torch.arange(2, 6)
    truth = table[tuple(y[2:])].log()
    torch.testing.assert_close(posterior.log_marginal(nodes, y[2:]), truth)
    found = posterior.log_likelihood(y, num_particles=20_000)
    torch.testing.assert_close(found, truth, atol=0.05, rtol=0)
    best = torch.stack(torch.unravel_index(table.argmax(), table.shape))
    assert posterior.predict(nodes, method="joint").tolist() == best.tolist()
    assert torch.equal(posterior.predict(), posterior.marginals().argmax(-1))


def test_counts_vary_with_the_parameters():
    """Labels of far nodes depend on each other through the parameters."""
    hood = random_hood(40, 0)
    tilted = [torch.tensor([9.0, 1.0]), torch.tensor([1.0, 9.0])]
    mixes = [NeighborMixture(hood, each.expand(40, -1), torch.zeros(40)) for each in tilted]
    posterior = AveragedPosterior([mix.prior() for mix in mixes])
    counts = posterior.counts([torch.arange(40)], label=0, num_samples=4000).double()
    within, between = 40 * 0.9 * 0.1, (40 * 0.4) ** 2
    assert counts.var().item() == pytest.approx(within + between, rel=0.05)


def test_members_are_shown(pair):
    posterior, _, y = pair
    assert repr(posterior).startswith("AveragedPosterior(num_members=2, Posterior(")
    assert math.isclose(posterior.log_marginal(torch.tensor([0]), y[:1]).item(), 0, abs_tol=1e-6)
