# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Single precision: extreme parameters and a hub."""

from functools import partial

import networkx as nx
import pytest
import torch
from graphs import to_hood
from pyro.infer import TraceGraph_ELBO

from pyro_nmm import ChosenLabels, Neighborhood, NeighborMixture, OrderedConditional
from pyro_nmm.guides import ordered_guide
from pyro_nmm.models import nmm


def extreme(num_nodes=60, num_classes=4):
    """Alpha from 1e-3 to 1e6 and logits of -50 to 50, side by side."""
    hood = to_hood(nx.barabasi_albert_graph(num_nodes, 3, seed=0))
    exponent = torch.randint(-3, 7, (num_nodes, num_classes), dtype=torch.float)
    alpha = 10**exponent
    logits = torch.randint(-50, 51, (hood.num_edges,), dtype=torch.float)
    return hood, alpha, logits, torch.randint(num_classes, (num_nodes,))


@pytest.mark.parametrize("collapsed", [False, True])
@pytest.mark.parametrize("estimator", ["reward_to_go", "one_step_credit", "no_score", "reinforce"])
def test_finite_values_and_gradients(kernels, estimator, collapsed):
    for _ in range(2):
        hood, alpha, logits, y = extreme()
        log_alpha = alpha.log().requires_grad_()
        logits.requires_grad_()
        elbo = TraceGraph_ELBO(4, vectorize_particles=True, max_plate_nesting=0)
        loss = elbo.loss_and_grads(
            partial(nmm, collapsed=collapsed),
            partial(ordered_guide, collapsed=collapsed, estimator=estimator),
            hood, log_alpha.exp().clamp(1e-3, 1e6), logits, y,
        )  # fmt: skip
        assert torch.tensor(loss).isfinite()
        for leaf in (log_alpha, logits):
            assert leaf.grad.dtype == torch.float
            assert leaf.grad.isfinite().all()


def test_close_to_double(kernels):
    hood, alpha, logits, y = extreme()
    q = OrderedConditional(hood, alpha, logits, y)
    wide = OrderedConditional(hood, alpha.double(), logits.double(), y, order=q.order)
    c = q.sample((5,))
    assert q.log_prob(c).dtype == torch.float
    torch.testing.assert_close(q.log_prob(c).double(), wide.log_prob(c), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(q.log_labels(c).double(), wide.log_labels(c), rtol=1e-5, atol=1e-5)
    urn, wide_urn = ChosenLabels(alpha, c), ChosenLabels(alpha.double(), c)
    torch.testing.assert_close(urn.log_prob(y).double(), wide_urn.log_prob(y), rtol=1e-5, atol=1e-4)
    mix = NeighborMixture(hood, alpha, logits)
    wide_mix = NeighborMixture(hood, alpha.double(), logits.double())
    torch.testing.assert_close(mix.marginals().double(), wide_mix.marginals(), rtol=1e-4, atol=1e-6)
    pairs = torch.stack([hood.source, hood.target])
    torch.testing.assert_close(
        mix.pairwise(pairs).double(), wide_mix.pairwise(pairs), rtol=1e-4, atol=1e-6
    )


@pytest.mark.parametrize("alpha", [1e-3, 1e-2, 1.0, 1e6])
def test_shared_labels(alpha):
    """Two labels from one z are equal as often as they should, however small its alpha."""
    parameters = torch.tensor([[alpha, 3 * alpha]])
    y = ChosenLabels(parameters, torch.tensor([0, 0])).sample((50_000,))
    for value, expected in (
        (y[:, 0].float(), 0.75),
        (y.prod(-1).float(), 0.75 * (3 * alpha + 1) / (4 * alpha + 1)),
    ):
        assert abs(value.mean() - expected) < 4 * (expected * (1 - expected) / 50_000) ** 0.5


@pytest.mark.parametrize("kernels", ["loops", "tensors"], indirect=True)
def test_a_hub_of_degree_ten_thousand(kernels):
    leaves = torch.arange(1, 10_001)
    hub = torch.zeros_like(leaves)
    edges = torch.cat([torch.stack([leaves, hub]), torch.stack([hub, leaves])], 1)
    hood = Neighborhood(edges, 10_001)
    assert int(hood.ptr.diff().max()) == 10_001
    log_alpha = torch.zeros(10_001, 3, dtype=torch.float, requires_grad=True)
    logits = torch.zeros(hood.num_edges, dtype=torch.float, requires_grad=True)
    y = torch.randint(3, (10_001,))
    elbo = TraceGraph_ELBO(2, vectorize_particles=True, max_plate_nesting=0)
    args = (hood, log_alpha.exp(), logits, y)
    collapsed = (partial(f, collapsed=True) for f in (nmm, ordered_guide))
    loss = elbo.loss_and_grads(*collapsed, *args)
    assert torch.tensor(loss).isfinite()
    assert log_alpha.grad.isfinite().all()
    assert logits.grad.isfinite().all()
    double = OrderedConditional(
        hood, log_alpha.detach().double().exp(), logits.detach().double(), y
    )
    bound = -double.log_labels(double.sample((2,))).sum(-1).mean()
    assert abs(loss / bound - 1) < 0.02
