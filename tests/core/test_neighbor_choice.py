# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Choices of neighbours by their attention: densities, draws and batches."""

import torch
from graphs import house, parameters, star
from scipy.stats import chi2

from pyro_nmm import NeighborChoice, Neighborhood
from pyro_nmm.ops.enumeration import enumerate_choices
from pyro_nmm.ops.sampling import pick


def test_sums_to_one_and_factorises(kernels):
    hood = star(3)
    _, logits = parameters(hood, 2)
    choice = NeighborChoice(hood, logits)
    everything = hood.source[enumerate_choices(hood)]
    torch.testing.assert_close(choice.log_prob(everything).exp().sum(), torch.tensor(1.0))
    c = torch.tensor([2, 0, 2, 3])
    rows = [logits[hood.ptr[i] : hood.ptr[i + 1]].log_softmax(0) for i in range(4)]
    expected = rows[0][2] + rows[1][0] + rows[2][1] + rows[3][1]
    torch.testing.assert_close(choice.log_prob(c), expected)


def test_samples_follow_attention():
    """40,000 draws notice a probability of a half that is off by .015, and any draw at -inf."""
    hood = house()
    _, logits = parameters(hood, 2)
    logits[2] = -torch.inf
    draws = NeighborChoice(hood, logits).sample((40_000,))
    attention = hood.softmax(logits)
    edges = hood.find(draws)
    counts = torch.bincount(edges.flatten(), minlength=hood.num_edges)
    expected = attention * len(draws)
    assert counts[2] == 0
    keep = expected > 0
    statistic = ((counts - expected)[keep] ** 2 / expected[keep]).sum()
    assert chi2.sf(statistic, keep.sum() - hood.num_rows) > 1e-4


def test_batches():
    hood = house()
    logits = torch.randn(2, 1, hood.num_edges)
    choice = NeighborChoice(hood, logits).expand((2, 3))
    c = choice.sample((4,))
    assert c.shape == (4, 2, 3, 5)
    for b in range(2):
        torch.testing.assert_close(
            choice.log_prob(c)[:, b], NeighborChoice(hood, logits[b, 0]).log_prob(c[:, b])
        )
    flat = NeighborChoice(hood, logits[0, 0])
    torch.testing.assert_close(flat.log_prob(c), flat.expand((4, 2, 3)).log_prob(c))


def test_pick_never_takes_an_edge_of_weight_zero():
    hood = Neighborhood(torch.tensor([[1, 2, 0, 2], [0, 0, 1, 1]]), 3)
    weights = torch.tensor([[0.0, 1.0, 0.0, 1e-300, 0.0, 1e-300, 5.0]])
    for u in (0.0, 0.5, 1 - 2.0**-53):
        edges = pick(hood, weights, torch.full((1, 3), u))
        assert (weights[0, edges] > 0).all()
