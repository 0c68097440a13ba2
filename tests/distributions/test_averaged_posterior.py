# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Likelihoods of more labels under posteriors and their averages, against enumeration."""

import pytest
import torch

from pyro_nmm import AveragedPosterior, Neighborhood, NeighborMixture

SIZE, LABELS = 6, 3
KNOWN = torch.arange(SIZE) < 2


def random_hood(num_nodes, num_edges):
    return Neighborhood(torch.randint(num_nodes, (2, num_edges)), num_nodes)


@pytest.fixture
def problem():
    """Two mixtures on one graph, and labels."""
    hood = random_hood(SIZE, 9)
    parameters = [(torch.rand(SIZE, LABELS) + 0.1, torch.randn(hood.num_edges)) for _ in range(2)]
    return [NeighborMixture(hood, *each) for each in parameters], torch.randint(LABELS, (SIZE,))


@pytest.mark.parametrize("exact", [False, True])
def test_likelihood_is_unbiased(problem, exact):
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


def test_counts_vary_with_the_parameters():
    """Labels of far nodes depend on each other through the parameters."""
    hood = random_hood(40, 0)
    tilted = [torch.tensor([9.0, 1.0]), torch.tensor([1.0, 9.0])]
    mixes = [NeighborMixture(hood, each.expand(40, -1), torch.zeros(40)) for each in tilted]
    posterior = AveragedPosterior([mix.prior() for mix in mixes])
    counts = posterior.counts([torch.arange(40)], label=0, num_samples=4000).double()
    within, between = 40 * 0.9 * 0.1, (40 * 0.4) ** 2
    assert counts.var().item() == pytest.approx(within + between, rel=0.05)
