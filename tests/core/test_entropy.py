# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The bound on the entropy against recursion over everything that can be drawn."""

import networkx as nx
import pytest
import torch
from graphs import house, parameters, shared_sources, star, to_hood, two_triangles
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import edge_lists, entropy_bound, of_hood

from pyro_nmm import Neighborhood, NeighborMixture, compiled

GRAPHS = {
    "pair": lambda: to_hood(nx.path_graph(2)),
    "square": lambda: Neighborhood.grid(2, 2),
    "triangles": two_triangles,
    "star": lambda: star(3),
    "shared": shared_sources,
}


def exact(mix, order):
    neighbors, attention = edge_lists(mix.hood, mix.logits)
    return entropy_bound(mix.alpha.detach().numpy(), neighbors, attention, order)


def numeric_gradient(hood, log_alpha, logits, order, step=1e-5):
    """Central differences of the recursion."""
    flat = torch.cat([log_alpha.flatten(), logits]).detach()
    gradient = torch.zeros_like(flat)

    def value(point):
        size = log_alpha.numel()
        alpha = point[:size].view_as(log_alpha).exp()
        return exact(NeighborMixture(hood, alpha, point[size:]), order)

    for place in range(len(flat)):
        delta = torch.zeros_like(flat)
        delta[place] = step
        gradient[place] = (value(flat + delta) - value(flat - delta)) / (2 * step)
    return gradient


@pytest.mark.parametrize("name", GRAPHS)
def test_value(name):
    """10,000 samples notice a bound that is off by .005 nats, of 1 to 4."""
    hood = GRAPHS[name]()
    mix = NeighborMixture(hood, *parameters(hood, 3 if name == "pair" else 2))
    order = torch.randperm(hood.num_nodes)
    truth, samples = exact(mix, order.tolist()), mix.entropy_bound(10_000, order)
    assert abs(samples.mean() - truth) < 4 * samples.std() / len(samples) ** 0.5 + 1e-9
    table = torch.tensor(of_hood(hood, mix.alpha, mix.logits).log_prob)
    assert truth <= -(table.exp() * table).sum() + 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("name", ["square", "star", "shared"])
def test_gradient(name):
    """It is known to 1 %, and off by at most 5 %; compiled loops equal tensor code below."""
    hood = GRAPHS[name]()
    alpha, logits = parameters(hood, 2, scale=1.0)
    log_alpha = alpha.log().requires_grad_()
    logits.requires_grad_()
    order, draws = torch.randperm(hood.num_nodes), []
    truth = numeric_gradient(hood, log_alpha, logits, order.tolist())
    for _ in range(40):
        bound = NeighborMixture(hood, log_alpha.exp(), logits).entropy_bound(300, order).mean()
        grads = torch.autograd.grad(bound, (log_alpha, logits))
        draws.append(torch.cat([g.flatten() for g in grads]))
    draws = torch.stack(draws)
    assert (draws.mean(0) - truth).norm() < 0.05 * truth.norm()
    assert draws.std(0).norm() / len(draws) ** 0.5 < 0.01 * truth.norm()


@settings(max_examples=60)
@given(st.integers(2, 9), st.integers(2, 4), st.integers(0, 2**31 - 1))
def test_compiled_equals_tensor_code(num_nodes, num_classes, seed):
    torch.manual_seed(seed)
    hood = to_hood(nx.gnp_random_graph(num_nodes, 0.5, seed=seed))
    alpha, logits = parameters(hood, num_classes)
    order, weight = torch.randperm(num_nodes), torch.rand(4)
    results: list = []
    try:
        for compiled.DEVICES in ({"cpu"}, set()):
            torch.manual_seed(seed)
            leaves = alpha.clone().requires_grad_(), logits.clone().requires_grad_()
            bound = NeighborMixture(hood, *leaves).entropy_bound(4, order)
            results.append((bound, *torch.autograd.grad(bound @ weight, leaves)))
            torch.manual_seed(seed)
            with torch.no_grad():  # no gradient is computed then
                alone = NeighborMixture(hood, *leaves).entropy_bound(4, order)
            assert torch.equal(alone, bound)
    finally:
        compiled.DEVICES = {"cpu"}
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)


def test_independent_labels_have_their_entropy():
    hood = Neighborhood(torch.empty(2, 0, dtype=torch.long), num_nodes=5)
    mix = NeighborMixture(hood, *parameters(hood, 3))
    entropy = torch.special.entr(mix.marginals()).sum()
    torch.testing.assert_close(mix.entropy_bound(3), entropy.expand(3))


def test_edges_that_are_switched_off(kernels):
    hood = house()
    alpha, logits = parameters(hood, 2)
    logits[(hood.source != hood.target).nonzero()[::2, 0]] = -torch.inf
    bound = NeighborMixture(hood, alpha.requires_grad_(), logits).entropy_bound(4)
    bound.sum().backward()
    assert bound.isfinite().all()
    assert alpha.grad.isfinite().all()
