# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""A mixture fitted to a random field, or to a stream of them."""

import torch

from pyro_nmm import Neighborhood
from pyro_nmm.guides import fit_mixture, mean_field
from pyro_nmm.models import FreeNMM, PairwiseMRF, coarse_to_fine, grid_edges, ising


def test_fitted_in_evaluation_mode():
    hood, field = Neighborhood.grid(2, 2), ising(grid_edges(2, 2), 0.3, torch.zeros(4))
    network = FreeNMM(hood, 2)
    network.dropout = torch.nn.Dropout(0.5)
    plain = network.forward
    network.forward = lambda hood, *inputs: (network.dropout(plain(hood)[0]) + 0.1, plain(hood)[1])
    network.dropout.eval()
    network.dropout.train()
    mix, _ = fit_mixture(field, hood, network, num_steps=2)
    torch.testing.assert_close(mix.alpha, network.log_alpha.exp().detach() + 0.1)
    assert network.dropout.training


def test_fit_beats_mean_field():
    torch.manual_seed(0)
    field = ising(grid_edges(8, 5), 0.4, 0.5 * torch.randn(40))
    hood = Neighborhood.grid(8, 5)
    order = coarse_to_fine(8, 5)
    network = FreeNMM(hood, 2, field.unary.softmax(-1), kappa=1.0, gamma=0.0)
    mix, losses = fit_mixture(field, hood, network, order=order, num_steps=200, lr=0.1)
    with torch.no_grad():
        samples = mix.entropy_bound(500, "reward_to_go", order)
    log_z = field.log_normalizer()
    bound = log_z - samples.mean() - field.expected_potential(mix)
    independent = mean_field(field)
    assert 0 < bound < 0.6 * (independent.losses[0] + log_z)
    truth = field.marginals()
    assert (mix.marginals() - truth).abs().mean() < 0.7 * (
        independent.marginals - truth
    ).abs().mean()
    assert len(losses) == 200


def test_one_network_for_many_fields():
    hood = Neighborhood.grid(3, 3)

    class Linear(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(3))

        def forward(self, hood, field):
            alpha = (self.weight[0] * field.unary + self.weight[1]).exp()
            return alpha, self.weight[2] * (hood.source == hood.target).to(alpha)

    network, fields = Linear(), {}

    def stream(step):
        return fields.setdefault(step, ising(grid_edges(3, 3), 0.3, torch.randn(9)))

    mix, _ = fit_mixture(stream, hood, network, num_steps=60, lr=0.1, warmup=0.0)
    assert len(fields) == 60
    assert network.weight[0] > 0.3
    torch.testing.assert_close(mix.alpha, network(hood, fields[59])[0].detach())


def test_interactions_rise_over_the_warmup(monkeypatch):
    """Over half of eight steps; the field of the fourth is the target itself."""
    shares, scaled = [], PairwiseMRF.scaled
    monkeypatch.setattr(
        PairwiseMRF, "scaled", lambda field, share: shares.append(share) or scaled(field, share)
    )
    hood = Neighborhood.grid(2, 2)
    field = ising(grid_edges(2, 2), 0.3, torch.zeros(4))
    fit_mixture(field, hood, FreeNMM(hood, 2), num_steps=8)
    assert shares == [0.25, 0.5, 0.75]
