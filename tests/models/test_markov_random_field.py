# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Markov random fields against sums over all labellings."""

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
from torch_geometric.utils import remove_self_loops

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
    edges = torch.where(torch.rand(edges.shape[1]) < 0.5, edges.flip(0), edges)
    interaction = torch.randn(num_classes, num_classes)
    unary, strength = torch.randn(*batch, num_nodes, num_classes), torch.randn(*batch, len(edges.T))
    return PairwiseMRF(edges, unary, strength, interaction + interaction.T)


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
    everything, strength = labellings(num_nodes, num_classes), field.strength.requires_grad_()
    potential = field.log_potential(everything)
    torch.testing.assert_close(potential[-1], by_hand(field, everything[-1]))
    log_z, found = potential.logsumexp(0), field.log_normalizer()
    torch.testing.assert_close(found, log_z)
    if field.num_edges:
        torch.testing.assert_close(*(torch.autograd.grad(z, strength)[0] for z in (found, log_z)))
    potential, log_z = potential.detach(), log_z.detach()
    probs = (potential - log_z).exp()
    torch.testing.assert_close(field.log_prob(everything).exp(), probs)
    onehot = torch.eye(num_classes)[everything]
    torch.testing.assert_close(field.marginals(), torch.einsum("q,qnc->nc", probs, onehot))
    hood = to_hood(nx.gnp_random_graph(num_nodes, 0.6, seed=seed + 1))
    mix = NeighborMixture(hood, *parameters(hood, num_classes))
    expected = (mix.log_prob(everything).exp() * potential).sum()
    torch.testing.assert_close(field.expected_potential(mix), expected)


def test_batches_and_samples():
    """Each field of a batch alone, and counts of draws."""
    field = random_field(3, 4, 3, batch=(2, 1))
    y = torch.randint(3, (2, 6, 4))
    log_prob, marginals = field.log_prob(y), field.marginals()
    assert field.local_logits(torch.ones(4, 3) / 3).shape == (2, 1, 4, 3)
    for b in range(2):
        one = field.edges, 0.3 * field.unary[b, 0], 0.3 * field.strength[b, 0], field.interaction
        again = PairwiseMRF(field.edges, field.unary[b, 0], field.strength[b, 0], field.interaction)
        torch.testing.assert_close(log_prob[b], again.log_prob(y[b]))
        torch.testing.assert_close(marginals[b, 0], again.marginals())
    mild = PairwiseMRF(*one)
    draws = mild.sample((30_000,)) @ 3 ** torch.arange(3, -1, -1)
    expected = 30_000 * mild.log_prob(labellings(4, 3)).exp()
    assert expected.min() > 5
    assert chisquare(draws.bincount(minlength=81), expected).pvalue > 1e-3


def test_fields_of_images():
    """An Ising model is a Potts model of two labels, and a posterior is prior times noise."""
    edges, image, unary = grid_edges(2, 3), torch.randn(2, 3), torch.randn(6, 2)
    prior = ising(edges, 0.4, (unary[:, 1] - unary[:, 0]) / 2)
    torch.testing.assert_close(potts(edges, 0.8, unary).marginals(), prior.marginals())
    flat, y = ising(edges, 0.8, torch.zeros(6)), labellings(6)
    noise = torch.distributions.Normal(2.0 * y - 1, 1.5).log_prob(image.flatten()).sum(-1)
    expected = flat.log_potential(y) + noise
    torch.testing.assert_close(ising_posterior(image, 0.8, 1.5).log_potential(y), expected)
    with pyro.plate("images", 3):
        assert pyro.sample("y", ising(grid_edges(2, 2), 0.3, torch.randn(4))).shape == (3, 4)


@pytest.mark.parametrize(("coupling", "log_z"), [(0.3, 225.5606), (0.5, 271.0859)])
def test_published_normalizers(coupling, log_z):
    # Two independent transfer-matrix programs agreed on these, fields from NumPy's seed 1.
    field = torch.tensor(np.random.RandomState(1).randn(16, 16).ravel() * 0.5)
    assert abs(ising(grid_edges(16, 16), coupling, field).log_normalizer() - log_z) < 1e-4


def test_annealing_is_unbiased():
    field = random_field(7, 5, 3)
    runs = [annealed_log_normalizer(field, None, 10, 200) for _ in range(60)]
    log_z = field.log_normalizer()
    ratio = torch.stack([estimate for estimate, _ in runs]).sub(log_z).exp()
    assert abs(ratio.mean() - 1) < 4 * ratio.std() / len(runs) ** 0.5
    stated = torch.stack([error for _, error in runs]).median()
    assert 0.5 < stated / ratio.std() < 2


GRID = grid_edges(4, 4)
#: Fields of several modes, in which a mean field is one mode.
MODES = {
    "repelling": ising(GRID, -1.0, torch.zeros(16)),
    "weak field": ising(GRID, 1.0, torch.full((16,), 0.01)),
    "three labels": potts(GRID, 2.0, torch.zeros(16, 3)),
}


@pytest.mark.parametrize("kind", MODES)
@pytest.mark.parametrize("one_mode", [False, True])
@pytest.mark.filterwarnings("ignore:log Z is:UserWarning")
def test_annealing_finds_all_modes(kind, one_mode):
    """From one mode alone the estimate is log 2 or log 3 too low, and its error below .05."""
    pyro.set_rng_seed(0)
    field = MODES[kind]
    start = mean_field(field).marginals if one_mode else None
    estimate, error = annealed_log_normalizer(field, start, 300, 32)
    assert (estimate - field.log_normalizer()).abs() < 4 * error
    assert error < 0.3


@pytest.mark.parametrize(
    ("coupling", "steps", "match"),
    [
        (1.0, 1000, r"log Z is .* from the field's own terms and .* from start: the lower one"),
        (3.0, 3, "of 32 chains carry the weight, so log Z may be too low: raise num_steps"),
    ],
)
def test_annealing_warns(coupling, steps, match):
    pyro.set_rng_seed(0)
    field = ising(GRID, coupling, torch.zeros(16))
    one_mode = torch.tensor([1.0, 0.0]).expand(16, 2) if steps > 3 else None
    with pytest.warns(UserWarning, match=match):
        annealed_log_normalizer(field, one_mode, steps, 32)


def test_what_cannot_be():
    """The cure of an error: queries are those of a sum that leaves out what cannot be."""
    unary = torch.randn(4, 2)
    with pytest.raises(ValueError, match=r"unary must be finite.*give 100 less than the largest"):
        potts(EDGES, 1.0, unary.index_fill(0, torch.tensor(3), -torch.inf))
    unary[3, 1] = unary.max() - 100
    field, everything = potts(EDGES, 1.0, unary), labellings(4, 2)
    possible = everything[everything[:, 3] == 0]
    log_z = field.log_potential(possible).logsumexp(0)
    torch.testing.assert_close(field.log_normalizer(), log_z)
    probs = (field.log_potential(possible) - log_z).exp()
    torch.testing.assert_close(field.marginals()[:, 1], probs @ possible.double())


def test_cure_of_pairs_in_both_directions():
    """Also of pairs that all have the larger node first, and of self-loops."""
    listed = torch.cat([EDGES.flip(0), EDGES[:, :2], torch.ones(2, 1).long()], 1)
    with pytest.raises(ValueError, match=r"remove_self_loops.edges.sort.0..values.unique.dim=1"):
        potts(listed, 1.0, UNARY)
    edges = remove_self_loops(listed.sort(0).values.unique(dim=1))[0]
    assert potts(edges, 1.0, UNARY).log_normalizer() == potts(EDGES, 1.0, UNARY).log_normalizer()


def test_colors_and_orders():
    field = random_field(11, 9, 2)
    colors = field.colors()
    assert sorted(torch.cat(colors).tolist()) == list(range(9))
    for nodes in colors:
        assert not torch.isin(field.edges, nodes).all(0).any()
    assert len(ising(grid_edges(4, 5), 1.0, torch.zeros(20)).colors()) == 2
    order = coarse_to_fine(5, 6)
    assert sorted(order.tolist()) == list(range(30))
    place, last = order.argsort(), order[15:].tolist()
    for i, j in grid_edges(5, 6).T.tolist():
        assert (i in last) != (j in last)
        assert (place[i] < place[j]) == (j in last)


@settings(max_examples=10)
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
    for value in (field.log_normalizer(), field.log_potential(torch.zeros(4, dtype=torch.long))):
        assert get_provenance(value) == frozenset("J")


EDGES, UNARY = grid_edges(2, 2), torch.zeros(4, 2, dtype=torch.double)
EVEN, FIELD = UNARY + 0.5, potts(EDGES, 1.0, UNARY)
BATCH = potts(EDGES, torch.ones(2, 1), UNARY)


def mixture(hood):
    alpha, logits = torch.ones(hood.num_nodes, 2), torch.zeros(hood.num_edges)
    return NeighborMixture(hood, alpha.float(), logits.float())


@pytest.mark.parametrize(
    ("run", "match"),
    [
        (lambda: potts(torch.tensor([[1], [4]]), 1.0, UNARY), r"must hold node ids in 0\.\.3"),
        (lambda: potts(EDGES, torch.zeros(3), UNARY), "strength must have shape"),
        (lambda: PairwiseMRF(EDGES, UNARY, torch.ones(1), torch.tensor([[0.0, 1], [2, 0]])),
         r"interaction must be symmetric, got 1. at \[0, 1\]: edges have no direction"),
        (lambda: PairwiseMRF(EDGES, UNARY, torch.ones(1), torch.eye(3)),
         r"interaction must have shape \(2, 2\), the columns of unary, got \(3, 3\)"),
        (lambda: PairwiseMRF(EDGES, UNARY, torch.ones(1), torch.eye(2).float()),
         r"interaction must be torch\.float64"),
        (lambda: ising(grid_edges(30, 30), 0.4, torch.zeros(900)).log_normalizer(),
         "log_potential, .*annealed_log_normalizer of .*, or for marginals .*fit_mixture"),
        (lambda: BATCH.sample(), "sample needs a field without batch"),
        (lambda: FIELD.expected_potential(mixture(Neighborhood.grid(1, 2))),
         "mixture must have 4 nodes"),
        (lambda: FIELD.expected_potential(mixture(Neighborhood.grid(2, 2))),
         r"mixture must be torch\.float64"),
        (lambda: mean_field(FIELD, EVEN), r"starts must have shape \(S, "),
        (lambda: mean_field(BATCH), "must be a PairwiseMRF without batch"),
        *((lambda field=field: annealed_log_normalizer(field, EVEN),
           "must be a PairwiseMRF without batch")
          for field in (BATCH, MarginalField(FIELD))),
    ],
)  # fmt: skip
def test_refusals(run, match):
    with pytest.raises(ValueError, match=match):
        run()
