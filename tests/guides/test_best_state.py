# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The best state of a fit, and fits that never end above the mean field."""

import pytest
import torch
from torch import nn

from pyro_nmm import Neighborhood, NeighborMixture
from pyro_nmm.guides import BestState, fit_mixture, mean_field
from pyro_nmm.models import (
    ConvolutionalNMM,
    FreeNMM,
    MeanFieldCorrection,
    grid_edges,
    ising,
)

HOOD = Neighborhood.grid(5, 8)


def field_of(coupling):
    torch.manual_seed(1)
    return ising(grid_edges(5, 8), coupling, 0.3 * torch.randn(40))


@torch.no_grad()
def bound(mix, field):
    """The loss and its standard error."""
    order = torch.cat(field.colors())
    energy = field.expected_potential(mix)
    draws = -mix.entropy_bound(1000, order) - energy
    return draws.mean(), draws.std() / 1000**0.5


def test_the_last_state_within_two_standard_errors_of_the_least():
    best, x = BestState(), torch.zeros(2)
    kept = []
    for value, losses in enumerate(([5.0, 5.2], [3.0, 3.2], [3.15, 3.25], [3.6, 3.7])):
        x.fill_(value)
        kept.append(best.update(losses, {"x": x}))
    best.restore({"x": x, "new": torch.ones(1)})
    assert kept == [True, True, True, False]
    assert x.tolist() == [2.0, 2.0]
    assert best.least == pytest.approx(3.1)


@pytest.mark.parametrize("losses", [[], [1.0], [1.0, float("nan")]])
def test_losses_are_two_numbers(losses):
    with pytest.raises(ValueError, match="losses must hold two finite numbers"):
        BestState().update(losses)


class Rough(nn.Module):
    """Starts anywhere, and cannot be the mean field."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(2))

    def forward(self, hood, field):
        return (field.unary + self.bias).exp(), torch.zeros(hood.num_edges)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("make", [None, lambda: FreeNMM(HOOD, 2), Rough])
def test_no_fit_ends_above_the_mean_field(make, seed):
    """At a rate that carries the free parameters away, and with a network too simple for it."""
    field = field_of(0.6)
    torch.manual_seed(seed)
    mix, _ = fit_mixture(field, HOOD, make and make(), num_steps=30, lr=2.0)
    loss, error = bound(mix, field)
    assert loss <= mean_field(field).losses[0] + 2 * error + 0.001  # rounding


def test_the_best_state_is_returned():
    """The rate destroys a start that is good."""
    field = field_of(0.6)
    network = FreeNMM(HOOD, 2, mean_field(field).marginals)
    start = bound(NeighborMixture(HOOD, *network(HOOD)), field)[0]
    torch.manual_seed(0)
    _, losses = fit_mixture(field, HOOD, network, num_steps=40, lr=20.0)
    assert max(losses) > start + 10
    assert bound(NeighborMixture(HOOD, *network(HOOD)), field)[0] < start + 0.5


def test_corrections_start_at_the_mean_field_and_improve_it():
    field = field_of(0.4)
    found = mean_field(field)
    network = MeanFieldCorrection(ConvolutionalNMM(1, channels=16, kernel=5))
    network.gamma = 40.0
    start = NeighborMixture(HOOD, *network(HOOD, field))
    torch.testing.assert_close(start.marginals(), found.marginals, atol=0.001, rtol=0.0)
    network.gamma = 4.0
    torch.manual_seed(0)
    mix, _ = fit_mixture(field, HOOD, network, num_steps=150, lr=0.01)
    log_z = field.log_normalizer()
    loss, error = bound(mix, field)
    assert loss + log_z + 2 * error < 0.7 * (found.losses[0] + log_z)


def test_corrections_read_every_field_anew():
    network = MeanFieldCorrection(ConvolutionalNMM(1, channels=4, kernel=3), num_rises=0)
    for coupling in (0.2, 0.6, 0.2):
        field = field_of(coupling)
        alpha, _ = network(HOOD, field)
        found = mean_field(field, num_rises=0).marginals
        torch.testing.assert_close(alpha / alpha.sum(1, keepdim=True), found, atol=0.001, rtol=0.0)
