# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Path sampling of the likelihood against enumeration, in its own standard errors."""

import networkx as nx
import numpy as np
import pytest
import torch
from cases import house_and_parameters, matrices
from graphs import parameters, random_sources, to_hood
from oracle import label_probs

from pyro_nmm import Neighborhood, NeighborMixture
from pyro_nmm.distributions import path

RUNS = 40
#: What twenty graphs are asked for, in turn.
QUERIES = "labels", "latent labels", "given labels", "matrices", "mask", "sources"


def problem(seed):
    """A small mixture, a function that estimates it ``RUNS`` times, and the exact value."""
    query, generator = QUERIES[seed % len(QUERIES)], torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    num_nodes, num_classes = 4 + seed % 2, 2
    hood = to_hood(nx.connected_watts_strogatz_graph(num_nodes, 2, 0.5, seed=seed))
    if query == "sources":
        hood, num_classes = random_sources(num_nodes, 3, generator), 3
    scale = (0.5, 1.0, 2.0)[seed % 3]
    alpha, logits = parameters(hood, num_classes, scale=scale)
    relabel = matrices(hood, num_classes) if query == "matrices" else None
    labels, probs = label_probs(hood, alpha, logits, relabel)
    labels, probs = torch.as_tensor(labels), torch.as_tensor(probs)
    y, mask = torch.randint(num_classes, (num_nodes,)), torch.arange(num_nodes) % 3 > 0
    mix = NeighborMixture(hood, alpha.expand(RUNS, -1, -1), logits, relabel)

    def marginal(nodes):
        return probs[(labels == y)[:, nodes].all(1)].sum().log()

    if query == "latent labels":
        evidence = torch.randn(num_nodes, num_classes)
        evidence[0, 0] = -torch.inf
        terms = evidence.gather(1, labels.T).sum(0)
        return mix.latents(evidence).path_likelihood, (probs.log() + terms).logsumexp(0)
    every = torch.ones_like(mask)
    if query == "given labels":
        exact = marginal(every) - marginal(mask)
        return lambda *options: mix.path_likelihood(y, None, mask, *options), exact
    observed = mask if query == "mask" else every
    return lambda *options: mix.path_likelihood(y, observed, None, *options), marginal(observed)


def scores(estimate, exact):
    """Deviations in standard errors, to which rounding adds its part."""
    value, error = estimate
    rounding = 4 * torch.finfo(value.dtype).eps * abs(exact)
    return (value - exact) / error.hypot(torch.as_tensor(rounding).to(error))


@pytest.mark.slow
def test_twenty_graphs():
    """
    Estimates of four chains vary as their standard error says. It has about seven degrees of
    freedom, with which scores have a standard deviation of 1.18.
    """
    found = []
    for seed in range(20):
        run, exact = problem(seed)
        found.append(scores(run(4, 41, 3), exact))
        assert found[-1].mean().abs() < 4.5 * 1.18 / RUNS**0.5, (seed, found[-1])
    found = torch.cat(found)
    assert 0.9 < found.std() < 1.3, found.std()
    assert found.mean().abs() < 4 * 1.18 / len(found) ** 0.5


LABELS = torch.tensor([0, 1, 1, 0, 1])
UNEVEN = [[1e-4, 1e-4], [1.0, 0.5], [1e6, 2e6], [0.03, 0.01], [30.0, 9.0]]
EXTREME = {
    "uneven": torch.tensor(UNEVEN).double(),
    "huge, in single precision": torch.full((5, 2), 1e6, dtype=torch.float),
}


def exact_of_house(alpha, logits):
    labels, probs = label_probs(house_and_parameters()[0], alpha.double(), logits.double())
    return float(np.log(probs[(labels == LABELS.numpy()).all(1)].sum()))


@pytest.mark.parametrize("name", EXTREME)
def test_extreme_concentrations(name):
    alpha = EXTREME[name]
    hood, _, logits = house_and_parameters()
    mix = NeighborMixture(hood, alpha.expand(RUNS, -1, -1), logits.to(alpha))
    value, error = mix.path_likelihood(LABELS, num_sweeps=16)
    assert value.dtype == alpha.dtype
    found = scores((value, error), exact_of_house(alpha, logits))
    assert found.mean().abs() < 0.85  # 4.5 standard errors
    assert error.mean() < 0.06


def test_error_falls_as_sweeps_grow():
    hood, alpha, logits = house_and_parameters()
    mix = NeighborMixture(hood, (0.1 * alpha).expand(RUNS, -1, -1), logits)
    exact, errors = exact_of_house(0.1 * alpha, logits), []
    for num_sweeps in (1, 16):
        value, error = mix.path_likelihood(LABELS, num_chains=2, num_sweeps=num_sweeps)
        errors.append((value - exact).square().mean().sqrt())
        assert 0.5 < errors[-1] / error.square().mean().sqrt() < 1.6
    assert errors[1] < 0.45 * errors[0]  # a quarter, but for noise


def full(num_nodes, num_sources):
    """Every node reaches every source."""
    pairs = torch.cartesian_prod(torch.arange(num_sources), torch.arange(num_nodes))
    return Neighborhood(pairs.T, num_nodes, num_sources)


def test_error_of_a_coarse_grid():
    """Without any noise, all of the standard error is that of Simpson's rule."""
    hood, y = full(40, 1), torch.zeros(40, dtype=torch.long)
    mix = NeighborMixture(hood, torch.ones(1, 20), torch.zeros(40))
    exact, errors = mix.log_prob(y), []
    for num_points in (5, 9, 41):
        value, error = mix.path_likelihood(y, num_chains=2, num_points=num_points)
        assert abs(value - exact) < 3 * error + path.TAIL
        errors.append(error)
    assert errors[0] > 0.1 > errors[1] > 0.01 > errors[2]


def test_elements_of_a_batch():
    hood, alpha, logits = house_and_parameters()
    alpha, y = torch.stack([alpha, 0.2 * alpha]), torch.stack([LABELS, 1 - LABELS, LABELS])
    value, error = NeighborMixture(hood, alpha[:, None], logits).path_likelihood(y, num_chains=30)
    exact = torch.stack([NeighborMixture(hood, one, logits).log_prob(y) for one in alpha])
    assert value.shape == error.shape == (2, 3)
    assert (scores((value, error), exact).abs() < 4.5).all()


@pytest.mark.parametrize("num_points", [4, 43])
def test_points_of_the_grid(num_points):
    hood, alpha, logits = house_and_parameters()
    with pytest.raises(ValueError, match="num_points must be"):
        NeighborMixture(hood, alpha, logits).path_likelihood(LABELS, num_points=num_points)


def test_errors_hold_if_chains_are_slow():
    """The ways of a chain that takes one of two modes have errors in common."""
    number, size = 10, 4000
    edges = torch.stack([torch.tensor([0, 1]).repeat(number), torch.arange(2 * number) // 2])
    hood, alpha = Neighborhood(edges, number, 2), torch.tensor([[0.3, 0.1], [0.1, 0.3]])
    mix = NeighborMixture(hood, alpha.expand(size, 2, 2), torch.zeros(size, hood.num_edges))
    found = mix.path_likelihood(torch.arange(number).expand(size, number) % 2, None, None, 3, 21, 1)
    # Errors of ways taken as independent are .94 of the spread.
    assert found.standard_error.mean() > found.log_likelihood.std()
