# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Markov random fields against sums over all labellings."""

import math

import networkx as nx
import numpy as np
import pyro
import pytest
import torch
from graphs import labellings, parameters, to_hood
from hypothesis import given, settings
from hypothesis import strategies as st
from pyro.ops.provenance import get_provenance, track_provenance
from scipy.stats import chisquare

from pyro_nmm import Neighborhood, NeighborMixture
from pyro_nmm.guides import mean_field
from pyro_nmm.models import (
    MarginalField,
    PairwiseMRF,
    annealed_log_normalizer,
    coarse_to_fine,
    grid_edges,
    ising,
    ising_posterior,
    potts,
)


def random_field(seed, num_nodes, num_classes, batch=()):
    """A Potts-like field with an interaction of its own on a random graph."""
    torch.manual_seed(seed)
    graph = nx.gnp_random_graph(num_nodes, 0.5, seed=seed)
    edges = torch.tensor(list(graph.edges), dtype=torch.long).view(-1, 2).T
    flip = torch.rand(edges.shape[1]) < 0.5
    edges = torch.where(flip, edges.flip(0), edges)
    interaction = torch.randn(num_classes, num_classes)
    return PairwiseMRF(
        edges,
        torch.randn(*batch, num_nodes, num_classes),
        torch.randn(*batch, edges.shape[1]),
        interaction + interaction.T,
    )


def by_hand(field, y):
    """The log-potential of one labelling, term by term."""
    total = sum(field.unary[i, k] for i, k in enumerate(y.tolist()))
    for (i, j), strength in zip(field.edges.T.tolist(), field.strength, strict=True):
        total = total + strength * field.interaction[y[i], y[j]]
    return total


@settings(max_examples=40)
@given(st.integers(0, 2**31 - 1), st.integers(1, 7), st.integers(2, 3))
def test_exact_against_enumeration(seed, num_nodes, num_classes):
    field = random_field(seed, num_nodes, num_classes)
    everything = labellings(num_nodes, num_classes)
    potential = field.log_potential(everything)
    torch.testing.assert_close(potential[-1], by_hand(field, everything[-1]))
    log_z = potential.logsumexp(0)
    torch.testing.assert_close(field.log_normalizer(), log_z)
    probs = (potential - log_z).exp()
    torch.testing.assert_close(field.log_prob(everything).exp(), probs)
    onehot = torch.eye(num_classes)[everything]
    torch.testing.assert_close(field.marginals(), torch.einsum("q,qnc->nc", probs, onehot))


def test_batches():
    field = random_field(3, 5, 2, batch=(4, 1))
    y = torch.randint(2, (4, 6, 5))
    log_prob = field.log_prob(y)
    assert log_prob.shape == (4, 6)
    assert field.marginals().shape == (4, 1, 5, 2)
    for b in range(4):
        one = PairwiseMRF(field.edges, field.unary[b, 0], field.strength[b, 0], field.interaction)
        torch.testing.assert_close(log_prob[b], one.log_prob(y[b]))
        torch.testing.assert_close(field.marginals()[b, 0], one.marginals())


def test_derivative_by_the_coupling():
    coupling = torch.tensor(0.3, requires_grad=True)
    field = torch.randn(6)
    everything = labellings(6)

    def log_z(coupling):
        return ising(grid_edges(2, 3), coupling, field).log_potential(everything).logsumexp(0)

    (gradient,) = torch.autograd.grad(
        ising(grid_edges(2, 3), coupling, field).log_normalizer(), coupling
    )
    expected = (log_z(torch.tensor(0.3 + 1e-6)) - log_z(torch.tensor(0.3 - 1e-6))) / 2e-6
    torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(("coupling", "log_z"), [(0.3, 225.5606), (0.5, 271.0859)])
def test_published_normalizers(coupling, log_z):
    # Two independent transfer-matrix programs agreed on these, fields from NumPy's seed 1.
    field = torch.tensor(np.random.RandomState(1).randn(16, 16).ravel() * 0.5)
    assert abs(ising(grid_edges(16, 16), coupling, field).log_normalizer() - log_z) < 1e-4


def test_closed_form_of_a_chain():
    # A chain without fields: Z = 2 (2 cosh J)^(n - 1); the longest that a table can never hold.
    chain = ising(grid_edges(1, 300), 0.7, torch.zeros(300))
    expected = math.log(2) + 299 * math.log(2 * math.cosh(0.7))
    assert abs(chain.log_normalizer() - expected) < 1e-9


def test_samples():
    field = random_field(5, 4, 3)
    field.unary *= 0.3
    field.strength *= 0.3
    draws = field.sample((30_000,))
    probs = field.log_prob(labellings(4, 3)).exp()
    number = (draws * 3 ** torch.arange(3, -1, -1)).sum(-1)
    seen = torch.bincount(number, minlength=81)
    assert (probs * len(draws)).min() > 5
    assert chisquare(seen.numpy(), (probs * len(draws)).numpy()).pvalue > 1e-3


@settings(max_examples=25)
@given(st.integers(0, 2**31 - 1), st.integers(2, 5), st.integers(2, 3))
def test_expected_potential(seed, num_nodes, num_classes):
    field = random_field(seed, num_nodes, num_classes)
    hood = to_hood(nx.gnp_random_graph(num_nodes, 0.6, seed=seed + 1))
    mix = NeighborMixture(hood, *parameters(hood, num_classes))
    everything = labellings(num_nodes, num_classes)
    probs = mix.log_prob(everything).exp()
    expected = (probs * field.log_potential(everything)).sum()
    torch.testing.assert_close(field.expected_potential(mix), expected)


def test_denoising_is_prior_times_noise():
    image = torch.randn(2, 3)
    field, prior = ising_posterior(image, 0.8, 1.5), ising(grid_edges(2, 3), 0.8, torch.zeros(6))
    for y in labellings(6):
        noise = torch.distributions.Normal(2.0 * y - 1, 1.5).log_prob(image.flatten()).sum()
        torch.testing.assert_close(field.log_potential(y), prior.log_potential(y) + noise)


def test_potts_of_two_labels_is_ising():
    edges, unary = grid_edges(2, 3), torch.randn(6, 2)
    field = (unary[:, 1] - unary[:, 0]) / 2
    torch.testing.assert_close(
        potts(edges, 0.8, unary).marginals(), ising(edges, 0.4, field).marginals()
    )


def test_annealing_is_unbiased():
    field = random_field(7, 5, 3)
    start = torch.rand(5, 3).softmax(-1)
    runs = [annealed_log_normalizer(field, start, 10, 200) for _ in range(60)]
    log_z = field.log_normalizer()
    ratio = torch.stack([estimate for estimate, _ in runs]).sub(log_z).exp()
    assert abs(ratio.mean() - 1) < 4 * ratio.std() / len(runs) ** 0.5
    stated = torch.stack([error for _, error in runs]).median()
    assert 0.5 < stated / ratio.std() < 2


def test_colors_and_orders():
    field = random_field(11, 9, 2)
    colors = field.colors()
    assert sorted(torch.cat(colors).tolist()) == list(range(9))
    number = torch.empty(9, dtype=torch.long)
    for k, nodes in enumerate(colors):
        number[nodes] = k
    assert (number[field.edges[0]] != number[field.edges[1]]).all()
    assert len(ising(grid_edges(4, 5), 1.0, torch.zeros(20)).colors()) == 2
    order = coarse_to_fine(5, 6)
    assert sorted(order.tolist()) == list(range(30))
    place = torch.empty(30, dtype=torch.long).scatter_(0, order, torch.arange(30))
    last = (order[15:]).tolist()
    for i, j in grid_edges(5, 6).T.tolist():
        assert (i in last) != (j in last)
        assert (place[i] < place[j]) == (j in last)


@settings(max_examples=20)
@given(st.integers(0, 2**31 - 1), st.integers(2, 6), st.integers(2, 3))
def test_mean_field(seed, num_nodes, num_classes):
    field = random_field(seed, num_nodes, num_classes)
    marginals, losses = mean_field(field, num_sweeps=5000)
    everything = labellings(num_nodes, num_classes)
    q = torch.stack([marginals[i, everything[:, i]] for i in range(num_nodes)]).prod(0)
    loss = (q * (q.log() - field.log_potential(everything))).sum()
    torch.testing.assert_close(losses[0], loss, rtol=1e-6, atol=1e-6)
    assert (losses[1:] >= losses[:-1]).all()
    assert losses[0] >= -field.log_normalizer() - 1e-9
    # Stationary: a coordinate's update would change nothing.
    update = field.local_logits(marginals).softmax(-1)
    torch.testing.assert_close(update, marginals, rtol=0, atol=1e-4)
    # Self-loops alone make an NMM the mean field.
    hood = Neighborhood(torch.empty(2, 0, dtype=torch.long), num_nodes)
    mix = NeighborMixture(hood, 3 * marginals + 1e-12, torch.zeros(num_nodes))
    bound = -mix.entropy_bound().squeeze() - field.expected_potential(mix)
    torch.testing.assert_close(bound, losses[0], rtol=1e-6, atol=1e-6)


def test_sampled_couplings_keep_their_provenance():
    coupling = track_provenance(torch.tensor(0.4, dtype=torch.double), frozenset("J"))
    field = ising(grid_edges(2, 2), coupling, torch.zeros(4, dtype=torch.float))
    assert get_provenance(field.log_normalizer()) == frozenset("J")
    assert get_provenance(field.log_potential(torch.zeros(4, dtype=torch.long))) == frozenset("J")


def test_in_a_plate():
    field = ising(grid_edges(2, 2), 0.3, torch.randn(4))
    with pyro.plate("images", 3):
        y = pyro.sample("y", field)
    assert y.shape == (3, 4)
    with torch.inference_mode():
        mix = NeighborMixture(Neighborhood.grid(2, 2), torch.ones(4, 2), torch.zeros(16))
        assert field.expected_potential(mix).isfinite()
    strength = torch.randn(3, 1)
    logits = ising(grid_edges(2, 2), strength, torch.zeros(4)).local_logits(torch.ones(4, 2) / 2)
    assert logits.shape == (3, 4, 2)


def test_bad_input():
    edges, unary = grid_edges(2, 2), torch.zeros(4, 2)
    with pytest.raises(ValueError, match=r"edges must hold every pair .* once"):
        potts(torch.cat([edges, edges.flip(0)], 1), 1.0, unary)
    with pytest.raises(ValueError, match="edges must hold every pair"):
        potts(torch.tensor([[1], [1]]), 1.0, unary)
    with pytest.raises(ValueError, match=r"edges must hold node ids in 0\.\.3"):
        potts(torch.tensor([[1], [4]]), 1.0, unary)
    with pytest.raises(ValueError, match="edges must be integers of shape"):
        potts(edges.T, 1.0, unary)
    with pytest.raises(ValueError, match="unary must have shape"):
        potts(edges, 1.0, torch.zeros(4, 1))
    with pytest.raises(ValueError, match="strength must have shape"):
        potts(edges, torch.zeros(3), unary)
    with pytest.raises(ValueError, match="interaction must be a symmetric"):
        PairwiseMRF(edges, unary, torch.ones(1), torch.tensor([[0.0, 1.0], [2.0, 0.0]]))
    with pytest.raises(ValueError, match="log_potential, which needs no normalizer"):
        ising(grid_edges(30, 30), 0.4, torch.zeros(900)).log_normalizer()
    with pytest.raises(ValueError, match="sample needs a field without batch"):
        random_field(0, 3, 2, batch=(2,)).sample()
    with pytest.raises(ValueError, match="image must have shape"):
        ising_posterior(torch.zeros(4))
    with pytest.raises(ValueError, match="field, must be floating-point"):
        ising(edges, 0.7, torch.zeros(4, dtype=torch.long))
    with pytest.raises(ValueError, match=r"interaction must be torch\.float64"):
        PairwiseMRF(edges, unary, torch.ones(1), torch.eye(2, dtype=torch.float))
    field = potts(edges, 1.0, unary)
    with pytest.raises(ValueError, match="value must have shape"):
        field.log_potential(torch.zeros(2, dtype=torch.long))
    with pytest.raises(ValueError, match="mixture must have 4 nodes"):
        field.expected_potential(
            NeighborMixture(Neighborhood.grid(1, 2), torch.ones(2, 2), torch.zeros(4))
        )
    with pytest.raises(ValueError, match="num_steps must be at least 1"):
        annealed_log_normalizer(field, torch.full((4, 2), 0.5), 0)
    with pytest.raises(ValueError, match="start must have shape"):
        annealed_log_normalizer(field, torch.full((3, 2), 0.5))
    with pytest.raises(ValueError, match="starts must hold probabilities of shape"):
        mean_field(field, torch.zeros(4, 2))
    with pytest.raises(ValueError, match="unary must be finite"):
        ising(grid_edges(1, 2), 0.3, torch.tensor([0.0, -torch.inf]))
    alpha, hood = torch.ones(4, 2, dtype=torch.float), Neighborhood(edges, 4)
    mix = NeighborMixture(hood, alpha, torch.zeros(hood.num_edges, dtype=torch.float))
    with pytest.raises(ValueError, match=r"mixture must be torch\.float64"):
        field.expected_potential(mix)
    for other in (random_field(0, 3, 2, batch=(2,)), MarginalField(field)):
        with pytest.raises(ValueError, match="field must be a PairwiseMRF without batch"):
            mean_field(other)
        with pytest.raises(ValueError, match="field must be a PairwiseMRF without batch"):
            annealed_log_normalizer(other, torch.full((4, 2), 0.5))
