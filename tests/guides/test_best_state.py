# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The best state of a fit, and fits that never end above the mean field."""

import pyro
import pytest
import torch
from torch import nn

from pyro_nmm import Neighborhood, NeighborMixture
from pyro_nmm.guides import BestState, fit_mixture, mean_field
from pyro_nmm.models import (
    ConvolutionalNMM,
    FreeNMM,
    MarginalField,
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
    draws = -mix.entropy_bound(1000, "reward_to_go", order) - energy
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


def test_parameters_of_the_store_and_of_a_loaded_state():
    pyro.param("p", torch.ones(()), constraint=torch.distributions.constraints.positive)
    best, again = BestState(), BestState()
    best.update([1.0, 1.0])
    again.load_state_dict(best.state_dict())
    dict(pyro.get_param_store().named_parameters())["p"].data.fill_(3.0)
    again.restore()
    assert pyro.param("p") == 1.0


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


def test_half_of_a_field_starts_at_its_mean_field():
    field = field_of(0.6)
    half = MarginalField(field)
    found = mean_field(half)
    torch.testing.assert_close(found.marginals, mean_field(field).marginals[half.nodes])
    mix, _ = fit_mixture(half, HOOD.subgraph(half.nodes), num_steps=80, lr=0.1)
    error = (mix.marginals() - field.marginals()[half.nodes]).abs().mean()
    assert error < (found.marginals - field.marginals()[half.nodes]).abs().mean()


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


def test_a_fit_continues_from_the_answer_of_a_correction():
    """Not from another mean field than the one in its answer: here of one sweep."""
    field = field_of(0.35)
    network = MeanFieldCorrection(
        ConvolutionalNMM(1, channels=4, kernel=3), num_random=0, num_rises=0, num_sweeps=1
    )
    start = bound(NeighborMixture(HOOD, *network(HOOD, field)), field)[0]
    assert start > mean_field(field).losses[0] + 0.5
    _, losses = fit_mixture(field, HOOD, network, num_steps=1, num_samples=1000, lr=1e-9)
    assert losses[0] == pytest.approx(start.item(), abs=0.3)


def test_a_correction_takes_given_marginals():
    field, given = field_of(0.3), torch.full((40, 2), 0.5)
    alpha, _ = MeanFieldCorrection(ConvolutionalNMM(1, channels=4, kernel=3))(HOOD, field, given)
    torch.testing.assert_close(alpha, torch.full_like(alpha, 0.5))


def test_the_better_start_is_continued(monkeypatch):
    """A mean field with labels exchanged, said to be the best, is no start to continue from."""
    field = field_of(0.2)
    found = mean_field(field)
    wrong = found._replace(marginals=found.marginals.flip(1), losses=found.losses + 1e3)
    monkeypatch.setattr("pyro_nmm.guides.field.mean_field", lambda field: wrong)
    torch.manual_seed(0)
    mix, _ = fit_mixture(field, HOOD, num_steps=40, lr=0.01)
    chosen = (mix.marginals().argmax(1) == found.marginals.argmax(1)).float().mean()
    assert chosen > 0.8
