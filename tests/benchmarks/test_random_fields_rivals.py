# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The rivals of the benchmark of random fields, against sums over all labellings."""

import itertools

import pytest
import torch

from benchmarks.random_fields import rivals
from benchmarks.random_fields.fields import grid
from benchmarks.random_fields.run import drawn_bound, drawn_loss
from pyro_nmm import Neighborhood, NeighborMixture
from pyro_nmm.guides import mean_field
from pyro_nmm.models import MarginalField, grid_edges, ising, potts

pytestmark = pytest.mark.usefixtures("double")


def spins(shape, coupling, seed=0):
    noise = torch.randn(shape[0] * shape[1], generator=torch.Generator().manual_seed(seed))
    return ising(grid_edges(*shape), coupling, 0.5 * noise.to(torch.get_default_dtype()))


def colours(shape, coupling, classes=3):
    generator = torch.Generator().manual_seed(1)
    unary = torch.randn(shape[0] * shape[1], classes, generator=generator)
    return potts(grid_edges(*shape), coupling, 0.5 * unary.to(torch.get_default_dtype()))


def every(field):
    """All labellings ``(C^N, N)``."""
    return torch.tensor(list(itertools.product(range(field.num_classes), repeat=field.num_nodes)))


def log_z(field):
    return field.log_potential(every(field)).double().logsumexp(0).item()


CASES = {"ising": (spins, (3, 3), 0.6), "potts": (colours, (2, 4), 0.9)}


@pytest.fixture(params=CASES)
def case(request):
    make, shape, coupling = CASES[request.param]
    return make(shape, coupling), shape


@pytest.mark.parametrize("down", [False, True])
def test_chains_of_a_mean_field(case, down):
    """The loss is that of the product of rows or columns; no worse than single pixels'."""
    field, shape = case
    pixels = torch.arange(field.num_nodes).view(shape)
    pixels = pixels.T if down else pixels
    marginals, found = rivals.chain_mean_field(field, pixels)
    assert -log_z(field) < found < mean_field(field).losses[0].item()
    # At the optimum every chain is exact in the others' mean fields.
    chain, y = pixels.flatten().argsort() // pixels.shape[1], every(field)
    ends, inside = field.edges.T.tolist(), (chain[field.edges].diff(dim=0) == 0)[0].tolist()
    strength, phi = field.strength.expand(field.num_edges).double(), field.interaction.double()
    score = field.unary.double()[torch.arange(field.num_nodes), y]
    for (i, j), within, weight in zip(ends, inside, strength, strict=True):
        if within:
            score[:, i] += weight * phi[y[:, i], y[:, j]]
        else:
            score[:, i] += (weight * phi @ marginals[j])[y[:, i]]
            score[:, j] += (weight * phi @ marginals[i])[y[:, j]]
    log_q = score.sum(1).log_softmax(0)  # chains are independent
    expected = (log_q.exp() * (log_q - field.log_potential(y).double())).sum().item()
    assert found == pytest.approx(expected, abs=1e-5)


def test_messages_on_a_tree():
    """Log Z and the marginals are exact there."""
    edges = torch.tensor([[0, 1, 1, 3, 3], [1, 2, 3, 4, 5]])
    unary = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    field = potts(edges, 0.9, unary.to(torch.get_default_dtype()))
    marginals, found = rivals.loopy(field, 1e-10)
    assert found == pytest.approx(log_z(field), abs=1e-5)
    torch.testing.assert_close(marginals, field.marginals().double(), rtol=0, atol=1e-5)


def test_autoregressive_network(case):
    """Its density sums to one, is that of its draws, and its gradient is the enumerated one."""
    field, _ = case
    network = rivals.Autoregressive(field.unary, 3, hidden=4)
    torch.nn.init.normal_(network.outer)
    torch.nn.init.normal_(network.straight, std=0.3)
    y = every(field)
    log_q = network.log_prob(y)
    assert log_q.logsumexp(0).item() == pytest.approx(0, abs=1e-4)
    draws = network.sample(40_000)
    code = field.num_classes ** torch.arange(field.num_nodes).flip(0)
    found = (draws @ code).bincount(minlength=len(y)) / len(draws)
    error = (log_q.exp() / len(draws)).sqrt() + 1e-4
    assert ((found - log_q.exp()).abs() / error).max() < 6
    exact = (log_q.exp() * (log_q - field.log_potential(y))).sum()
    expected = torch.autograd.grad(exact, network.bias)[0]
    parts = (rivals.surrogate(network, field, part) for part in draws.split(400))
    gradients = torch.stack([torch.autograd.grad(part, network.bias)[0] for part in parts])
    error = gradients.std(0) / len(gradients) ** 0.5
    assert ((gradients.mean(0) - expected).abs() / (error + 1e-6)).max() < 5


def test_autoregressive_network_reaches_the_target():
    """On 3 x 3 pixels at coupling .4, where the mean field stays further away."""
    field = spins((3, 3), 0.4)
    network = rivals.fit_van(field, 4, hidden=16, num_steps=150, lr=0.03)
    y = every(field)
    log_q = network.log_prob(y).detach().double()
    kl = (log_q.exp() * (log_q - field.log_potential(y).double())).sum().item() + log_z(field)
    assert 0 <= kl < 0.02 < 0.2 < mean_field(field).losses[0].item() + log_z(field)


def test_windows(case):
    """Windows that hold everything have the target's conditionals, in any order; less bounds it."""
    field, shape = case
    y, order = every(field), torch.randperm(field.num_nodes)
    family = rivals.Windowed(field, grid(shape, 4)._replace(order=order), neighbors=9)
    expected = field.log_potential(y).double() - log_z(field)
    torch.testing.assert_close(family.log_prob(y), expected, rtol=0, atol=1e-4)
    windows = grid(shape)._replace(order=torch.arange(field.num_nodes))
    family = rivals.Windowed(field, windows, neighbors=2)
    log_q = family.log_prob(y)
    assert log_q.logsumexp(0).item() == pytest.approx(0, abs=1e-6)
    exact = (log_q.exp() * (log_q - field.log_potential(y).double())).sum().item()
    loss, error = drawn_loss(family, field, 4000)
    assert -log_z(field) < exact
    assert abs(loss - exact) < 5 * error + 1e-6
    # The second pixel of the second row: all but the first row's and column's are in its window.
    node = shape[1] + 1
    assert family.given[node] == [1, shape[1]]
    inside = [r * shape[1] + c for r in range(min(3, shape[0])) for c in range(3)]
    number = {pixel: place for place, pixel in enumerate(inside)}
    edges = field.edges[:, torch.isin(field.edges, torch.tensor(inside)).all(0)].T.tolist()
    edges = torch.tensor([[number[pixel] for pixel in ends] for ends in edges]).T
    window = type(field)(edges, field.unary[inside], field.strength, field.interaction)
    small = every(window)
    kept = small[:, [number[1], number[shape[1]], number[node]]]
    joint = torch.zeros([field.num_classes] * 3).double()
    weight = window.log_potential(small).double().exp()
    joint.index_put_(tuple(kept.T), weight, accumulate=True)
    expected = (joint / joint.sum(-1, keepdim=True)).log()
    torch.testing.assert_close(family.tables[node], expected, rtol=0, atol=1e-5)


def test_bound_of_half_of_the_pixels():
    """
    From above on the divergence, which is enumerated; draws of q(c | y) in the place of the
    model's would bound it from below, by five standard errors here.
    """
    target = MarginalField(spins((3, 4), 0.5))
    size = target.num_nodes
    hood = Neighborhood(torch.ones(size, size).nonzero().T, size)
    mix = NeighborMixture(hood, 0.02 * torch.rand(size, 2) + 0.01, torch.zeros(size**2))
    labels = torch.tensor(list(itertools.product(range(2), repeat=size)))
    log_q = mix.log_prob(labels)
    divergence = (log_q.exp() * (log_q - target.log_potential(labels))).sum().item()
    found, error = drawn_bound(mix, target, torch.arange(size), 2**13)
    assert divergence - 4 * error < found < divergence + 0.1
