# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The NMM as a variational family inside Pyro programs with latent variables of their own."""

import math
from functools import partial

import pyro
import pyro.distributions as dist
import pytest
import torch
from bounds import exact_field_loss, gradients
from pyro import poutine
from pyro.contrib.autoname import scope
from pyro.infer import SVI, TraceGraph_ELBO
from pyro.optim import Adam
from pyro_rows import vectorized

from pyro_nmm import Neighborhood, NeighborMixture
from pyro_nmm.guides import FieldGuide, MixtureGuide, density
from pyro_nmm.models import FreeNMM, coarse_to_fine, grid_edges, ising, potts

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


def test_scoped_and_frozen():
    first = family(MixtureGuide, density(FIELD.log_potential, 4, 2))
    second = family(FieldGuide, FIELD, name="second")
    first.network.logits.requires_grad_(False)
    one, other = scope(prefix="a"), scope(prefix="b")

    def both(part):
        one(getattr(first, part))()
        other(getattr(second, part))()

    elbo = vectorized(size=4)
    assert elbo.loss_and_grads(first.model, first.guide) < 10
    assert first.network.log_alpha.grad.abs().sum() > 0
    assert elbo.loss_and_grads(partial(both, "model"), partial(both, "guide")) < 20


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
        (lambda: family(FieldGuide, FIELD, estimator="no_score"), "estimator must be one of"),
        (lambda: family(FieldGuide, ising(grid_edges(3, 3), 0.3, torch.zeros(9))),
         "target must have the 4 nodes of hood"),
        (lambda: family(MixtureGuide, FIELD), r"target is a PairwiseMRF.*FieldGuide"),
    ],
)  # fmt: skip
def test_refusals(run, match):
    with pytest.raises((ValueError, TypeError), match=match):
        run()
