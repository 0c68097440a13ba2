# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The NMM as a variational family: its bound on the KL divergence, and the bound's gradient."""

from contextlib import nullcontext

import pyro
import pytest
import torch
from bounds import check_against, exact_field_loss, expected_family_loss, gradients
from graphs import labellings
from oracle import edge_lists, entropy_bound, of_hood
from pyro import poutine
from pyro.infer import Trace_ELBO, TraceGraph_ELBO
from pyro_rows import inside, vectorized

from pyro_nmm import Neighborhood, NeighborMixture
from pyro_nmm.guides import FieldGuide, MixtureGuide, density, mean_field
from pyro_nmm.models import FreeNMM, grid_edges, ising


def rows_of(height, width):
    """A grid whose pixels attend within their row alone: small enough to enumerate."""
    edges = grid_edges(height, width)[:, : height * (width - 1)]
    return Neighborhood(torch.cat([edges, edges.flip(0)], 1), height * width)


def free(hood, num_classes=2, scale=1.0):
    network = FreeNMM(hood, num_classes)
    with torch.no_grad():
        network.log_alpha.copy_(scale * torch.randn_like(network.log_alpha))
        network.logits.copy_(scale * torch.randn_like(network.logits))
    return network


@pytest.mark.parametrize(("height", "width"), [(1, 2), (2, 2), (3, 3), (3, 4)])
def test_bound_is_above_the_divergence(height, width):
    size = height * width
    small = size <= 4
    hood = Neighborhood.grid(height, width) if small else rows_of(height, width)
    everything = labellings(size)
    for draw in range(10):
        torch.manual_seed(draw)
        field = ising(grid_edges(height, width), torch.randn(()), torch.randn(size))
        with torch.no_grad():
            mix = NeighborMixture(hood, *free(hood, scale=1.5)(hood))
        if small:
            log_q = torch.tensor(of_hood(hood, mix.alpha, mix.logits).log_prob)
            bound = exact_field_loss(mix, field, torch.randperm(size))
        else:  # rows are independent of each other
            rows = torch.arange(size).view(height, width)
            log_q = sum(mix.log_marginal(row, everything[:, row]) for row in rows)
            bound = -field.expected_potential(mix).item()
            for row in rows:
                bound -= row_entropy(mix, row)
        divergence = (log_q.exp() * (log_q - field.log_potential(everything))).sum().item()
        assert divergence + field.log_normalizer() >= -1e-9
        assert bound >= divergence - 1e-9
        # The estimate has the bound for its mean; orders within small rows are all bounds.
        if small:
            samples = mix.entropy_bound(4000, "reward_to_go", torch.randperm(size))
            noisy = -samples.mean() - field.expected_potential(mix)
            assert noisy > divergence - 4 * samples.std() / 4000**0.5


def row_entropy(mix, row):
    neighbors, attention = edge_lists(mix.hood, mix.logits)
    first = int(row[0])
    part = [neighbors[i] - first for i in row.tolist()]
    alpha = mix.alpha[row].numpy()
    order = torch.randperm(len(row)).tolist()
    return entropy_bound(alpha, part, [attention[i] for i in row.tolist()], order)


def test_identity_attention_is_mean_field():
    field = ising(grid_edges(3, 3), 0.4, torch.randn(9))
    alone = Neighborhood(torch.empty(2, 0, dtype=torch.long), 9)
    marginals, losses = mean_field(field)
    network = FreeNMM(alone, 2, marginals, epsilon=1e-9)
    family = FieldGuide(alone, network, field)
    elbo = TraceGraph_ELBO()
    assert abs(elbo.loss(family.model, family.guide) - losses[0].item()) < 1e-5
    # And it has nothing left to gain.
    elbo.loss_and_grads(family.model, family.guide)
    assert network.log_alpha.grad.abs().max() < 1e-4


@pytest.mark.parametrize("way", ["black box", "reward_to_go", "one_step_credit"])
def test_gradients(way):
    """
    On a path of four nodes, from 40 batches of 2,000 draws. The black box notices an error of a
    quarter of the gradient's length, the unbiased closed form an error of 1 %. The one-step credit
    is biased, by less than 3 %.
    """
    hood, order = Neighborhood.grid(1, 4), torch.tensor([2, 0, 3, 1])
    field = ising(grid_edges(1, 4), 0.5, torch.randn(4))
    network = free(hood, scale=0.7)
    leaves = [network.log_alpha, network.logits]
    mix = NeighborMixture(hood, *network(hood))
    truth = expected_family_loss(mix, order, field.log_potential)
    assert truth.item() == pytest.approx(exact_field_loss(mix, field, order))
    if way == "black box":
        family = MixtureGuide(hood, network, density(field.log_potential, 4, 2), order=order)
        elbo = vectorized(size=2000)
    else:
        family = FieldGuide(hood, network, field, order=order, estimator=way, num_samples=2000)
        elbo = TraceGraph_ELBO()
    losses, draws = gradients(elbo, family.model, family.guide, leaves, 40)
    if way != "one_step_credit":
        check_against(truth, leaves, losses, draws)
        return
    assert abs(losses.mean() - truth) < 4 * losses.std() / 40**0.5
    wanted = torch.cat([grad.flatten() for grad in torch.autograd.grad(truth, leaves)])
    assert (draws.mean(0) - wanted).norm() < 0.03 * wanted.norm()


def test_model_draws_choices_in_the_order_of_the_family():
    hood, order = Neighborhood.grid(2, 2), torch.tensor([2, 0, 3, 1])
    flat = density(lambda y: 0.0 * y.sum(-1), 4, 2)
    family = MixtureGuide(hood, FreeNMM(hood, 2), flat, order=order)
    drawn = poutine.trace(family.guide).get_trace()
    model = poutine.trace(poutine.replay(family.model, trace=drawn)).get_trace()
    assert torch.equal(model.nodes["c"]["fn"].order, order)


def spread_of_gradients(family, steps, context=nullcontext, nesting=0):
    programs = (inside(context, program) for program in (family.model, family.guide))
    elbo = vectorized(size=8, nesting=nesting)
    return gradients(elbo, *programs, [family.network.logits], steps)[1].std(0).norm()


def test_particles_are_baselines():
    """A constant in log p* changes no gradient, but without a baseline a hundredfold noise."""
    hood = Neighborhood.grid(2, 3)
    field = ising(grid_edges(2, 3), 0.5, torch.full((6,), 1.0))
    spreads = []
    for offset in (0.0, 1e3):
        target = density(lambda y, offset=offset: field.log_potential(y) + offset, 6, 2)
        torch.manual_seed(0)
        family = MixtureGuide(hood, free(hood), target, name=f"offset {offset}")
        spreads.append(spread_of_gradients(family, 30))
    assert 0.5 < spreads[1] / spreads[0] < 2


@pytest.mark.parametrize("around", ["plate", "subsample", "large scale", "small scale"])
def test_baselines_inside_plates_and_scales(around):
    """
    A baseline of the wrong size has no bias, but a hundredfold noise. The right one has less noise
    than half of a gradient without.
    """
    hood = Neighborhood.grid(1, 3)
    field = ising(grid_edges(1, 3), 0.5, torch.full((3,), 1.0))
    target = density(lambda y: field.log_potential(y) + 10, 3, 2)
    torch.manual_seed(0)
    family = MixtureGuide(hood, free(hood), target)
    context = {
        "plate": lambda: pyro.plate("images", 20, dim=-1),
        "subsample": lambda: pyro.plate("images", 1000, subsample_size=10, dim=-1),
        "large scale": lambda: poutine.scale(scale=100.0),
        "small scale": lambda: poutine.scale(scale=0.01),
    }[around]

    nesting = int("scale" not in around)
    spread = spread_of_gradients(family, 20, context, nesting)
    family._baseline = lambda *args: torch.zeros(())
    assert spread < 0.5 * spread_of_gradients(family, 20, context, nesting)


def test_closed_form_in_trace_elbo():
    """10,000 draws of the entropy notice a loss that is off by a thousandth of a nat."""
    field = ising(grid_edges(2, 2), 0.3, torch.zeros(4))
    hood = Neighborhood.grid(2, 2)
    family = FieldGuide(hood, FreeNMM(hood, 2), field, num_samples=500)
    losses = torch.tensor([Trace_ELBO().loss(family.model, family.guide) for _ in range(20)])
    bound = exact_field_loss(family.mixture(), field, family.order)
    assert abs(losses.mean() - bound) < 4 * losses.std() / 20**0.5
