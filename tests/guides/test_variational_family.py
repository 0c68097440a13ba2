# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The NMM as a variational family: bounds and gradients, Pyro programs, and fits to fields."""

import math
from contextlib import nullcontext

import pyro
import pyro.distributions as dist
import pytest
import torch
from bounds import check_against, exact_field_loss, expected_family_loss, gradients
from graphs import labellings
from oracle import of_hood
from pyro import poutine
from pyro.infer import SVI, TraceGraph_ELBO
from pyro.optim import Adam
from pyro_rows import inside, vectorized

from pyro_nmm import Neighborhood, NeighborMixture
from pyro_nmm.guides import FieldGuide, MixtureGuide, density, fit_mixture, mean_field
from pyro_nmm.models import (
    FreeNMM,
    MarginalField,
    coarse_to_fine,
    grid_edges,
    ising,
    potts,
)


def free(hood, num_classes=2, scale=1.0):
    network = FreeNMM(hood, num_classes)
    with torch.no_grad():
        network.log_alpha.copy_(scale * torch.randn_like(network.log_alpha))
        network.logits.copy_(scale * torch.randn_like(network.logits))
    return network


def test_bound_is_above_the_divergence():
    hood, everything = Neighborhood.grid(2, 2), labellings(4)
    for draw in range(10):
        torch.manual_seed(draw)
        field = ising(grid_edges(2, 2), torch.randn(()), torch.randn(4))
        with torch.no_grad():
            mix = NeighborMixture(hood, *free(hood, scale=1.5)(hood))
        log_q, order = (
            torch.tensor(of_hood(hood, mix.alpha, mix.logits).log_prob),
            torch.randperm(4),
        )
        bound = exact_field_loss(mix, field, order)
        divergence = (log_q.exp() * (log_q - field.log_potential(everything))).sum().item()
        assert divergence + field.log_normalizer() >= -1e-9
        assert bound >= divergence - 1e-9
        # The estimate has the bound for its mean.
        samples = mix.entropy_bound(4000, order)
        noisy = -samples.mean() - field.expected_potential(mix)
        assert abs(noisy - bound) < 4 * samples.std() / 4000**0.5


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


@pytest.mark.parametrize("way", ["black box", "closed form"])
def test_gradients(way):
    """
    On a path of four nodes, from 40 batches of 2,000 draws. The black box notices an error of a
    quarter of the gradient's length. The closed form is biased, by less than 3 %.
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
        family = FieldGuide(hood, network, field, order=order, num_samples=2000)
        elbo = TraceGraph_ELBO()
    losses, draws = gradients(elbo, family.model, family.guide, leaves, 40)
    if way == "black box":
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


@pytest.mark.parametrize("around", ["subsample", "large scale"])
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
        "subsample": lambda: pyro.plate("images", 1000, subsample_size=10, dim=-1),
        "large scale": lambda: poutine.scale(scale=100.0),
    }[around]

    nesting = int("scale" not in around)
    spread = spread_of_gradients(family, 20, context, nesting)
    family._baseline = lambda *args: torch.zeros(())
    assert spread < 0.5 * spread_of_gradients(family, 20, context, nesting)


HOOD, FIELD = (
    Neighborhood.grid(2, 2),
    ising(grid_edges(2, 2), 0.3, torch.zeros(4, dtype=torch.double)),
)


def family(kind, target, **options):
    return kind(HOOD, FreeNMM(HOOD, 2), target, **options)


def test_discrete_latent_beside_the_closed_form(kernels):
    """
    The entropy's factor is charged to a sample that the network reads. The sample takes both of its
    values in turn, so that 50 steps each notice an error of 1 %; the entropy is most of the truth.
    """
    if kernels == "blocks":
        pytest.skip("the entropy has no blocks")
    hood, field = Neighborhood.grid(1, 2), ising(grid_edges(1, 2), 0.5, torch.zeros(2))
    logit = torch.tensor(0.3, requires_grad=True)

    class Switch(torch.nn.Module):
        def forward(self, hood, k):
            alpha = torch.tensor([[1.0, 1.0], [1.0, 2.0]])
            return alpha + k * torch.tensor([9.0, 0.0]), torch.zeros(hood.num_edges)

    family = FieldGuide(hood, Switch(), lambda k: field, num_samples=10)

    def guide():
        k = pyro.sample("k", dist.Bernoulli(logits=logit))
        family.guide(k)

    def model():
        k = pyro.sample("k", dist.Bernoulli(0.5))
        return family.model(k)

    def at(k):
        """The guide with that value of its sample."""
        drawn = poutine.trace(lambda: pyro.sample("k", dist.Delta(k))).get_trace()
        return poutine.replay(guide, trace=drawn)

    p = logit.detach().sigmoid()
    losses, mean, variance = [], 0.0, 0.0
    for k, share in ((torch.tensor(0.0), 1 - p), (torch.tensor(1.0), p)):
        mix = NeighborMixture(hood, *Switch()(hood, k))
        losses.append(exact_field_loss(mix, field, family.order))
        draws = gradients(TraceGraph_ELBO(), model, at(k), [logit], 50)[1]
        mean, variance = mean + share * draws.mean(), variance + share**2 * draws.var() / 50
    truth = p * (1 - p) * (losses[1] - losses[0] + logit.detach())
    assert abs(mean - truth) < 4 * variance.sqrt()
    assert variance.sqrt() < 0.01 * abs(truth)


NOISY = torch.tensor([-1.2, -0.4, 0.3, -0.9, -0.8, 0.6], dtype=torch.double)
LEVELS = torch.tensor([-1.0, 0.0, 1.0], dtype=torch.double)


def seen():
    """``(6, 3)``: log-density of what is seen of each pixel, given its label."""
    return dist.Normal(LEVELS, 0.7).log_prob(NOISY[:, None])


def larger_program(edges, closed_form):
    """A Potts image with unknown coupling, seen through noise."""

    def program():
        coupling = pyro.sample("coupling", dist.LogNormal(-0.5, 0.5))
        prior = potts(edges, coupling[..., None], torch.zeros(6, 3))
        if closed_form:
            pyro.factor("normalizer", -prior.log_normalizer())
            return potts(edges, coupling[..., None], seen())
        y = pyro.sample("y", prior)
        return pyro.sample("x", dist.Normal(LEVELS[y], 0.7).to_event(1), obs=NOISY)

    return program


@pytest.mark.slow
@pytest.mark.parametrize("closed_form", [True, False])
def test_inside_a_larger_program(closed_form):
    """
    60 steps from a coupling and labels that are far off: the location of the coupling's logarithm
    starts one above the posterior's and ends within .25 of it. Marginals start .23 from the true
    ones on average and end within .08.
    """
    edges, hood = grid_edges(2, 3), Neighborhood.grid(2, 3)
    kind, target = FieldGuide if closed_form else MixtureGuide, larger_program(edges, closed_form)
    network = FreeNMM(hood, 3, kappa=3.0, gamma=1.0)
    family = kind(hood, network, target, order=coarse_to_fine(2, 3))

    def guide():
        loc = pyro.param("loc", torch.tensor(0.5))
        scale = pyro.param("scale", torch.tensor(0.3), dist.constraints.positive)
        pyro.sample("coupling", dist.LogNormal(loc, scale))
        family.guide()

    elbo = vectorized(size=50 if closed_form else 400)
    svi = SVI(family.model, guide, Adam({"lr": 0.2}), elbo)
    losses, mean = torch.empty(60), torch.zeros(6, 3)
    for step in range(60):
        losses[step] = svi.step()
        if step >= 40:  # a mean over steps, because the rate stays what it is
            mean += family.mixture().marginals() / 20

    # The truth by quadrature over the coupling and elimination of the labels.
    grid = torch.linspace(-4, 3, 400)
    coupling = grid.exp()[:, None]
    posterior = potts(edges, coupling, seen())
    prior = potts(edges, coupling, torch.zeros(6, 3))
    log_weight = dist.Normal(-0.5, 0.5).log_prob(grid) + math.log(7 / 399)
    log_weight = log_weight + posterior.log_normalizer() - prior.log_normalizer()
    log_evidence = log_weight.logsumexp(0)
    weight = (log_weight - log_evidence).exp()
    gap, error = losses[-20:].mean() + log_evidence, losses[-20:].std() / 20**0.5
    assert losses[:5].mean() + log_evidence > 2
    assert -4 * error < gap < 0.5
    assert abs(pyro.param("loc") - (weight * grid).sum()) < 0.25
    marginals = torch.einsum("g,gnc->nc", weight, posterior.marginals())
    assert (mean - marginals).abs().mean() < 0.08


def loss_of(kind, target):
    pair = family(kind, target)
    vectorized(size=3).loss(pair.model, pair.guide)


@pytest.mark.parametrize(
    ("run", "match"),
    [
        (lambda: vectorized().loss(family(
            MixtureGuide, lambda: pyro.sample("x", dist.Normal(0.0, 1.0))).model, lambda: None),
         r"target must have one site 'y'.*\['x'\]"),
        (lambda: loss_of(FieldGuide, lambda: 3), "must return a PairwiseMRF"),
        (lambda: loss_of(MixtureGuide, density(lambda y: y.sum().double(), 4, 2)),
         "log_density must return shape"),
        (lambda: family(FieldGuide, ising(grid_edges(3, 3), 0.3, torch.zeros(9))),
         "target must have the 4 nodes of hood"),
        (lambda: family(MixtureGuide, FIELD), r"target is a PairwiseMRF.*FieldGuide"),
    ],
)  # fmt: skip
def test_refusals(run, match):
    with pytest.raises((ValueError, TypeError), match=match):
        run()


@pytest.mark.parametrize("kind", ["fit", "guide", "half"])
def test_labels_that_cannot_be(kind):
    """A fit with the cure of the warning is far below the mean field."""
    edges, unary = grid_edges(2, 3), torch.randn(6, 2)
    hood = Neighborhood(torch.cat([edges, edges.flip(0)], 1), 6)
    unary[1, 0] = unary[4, 1] = -1e4
    field = potts(edges, 1.0, unary)
    calls = {
        "fit": lambda: fit_mixture(field, hood, num_steps=2),
        "guide": lambda: FieldGuide(hood, FreeNMM(hood, 2), field),
        "half": lambda: fit_mixture(half, Neighborhood.grid(2, 2), num_steps=2),
    }
    half = MarginalField(field, torch.tensor([True, True, False, False, True, True]))
    with pytest.warns(UserWarning, match=r"terms 10...? nats apart: .* 100 less than the largest"):
        calls[kind]()
    if kind == "fit":
        torch.manual_seed(0)
        field = potts(edges, 1.0, unary.clamp(min=-100))
        mix, _ = fit_mixture(field, hood, num_steps=150, lr=0.1)
        everything = labellings(6)
        log_prob = mix.log_prob(everything)
        divergence = (log_prob.exp() * (log_prob - field.log_prob(everything))).sum()
        assert divergence < 0.5 * (mean_field(field).losses[0] + field.log_normalizer())
