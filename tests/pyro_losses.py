# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Rows of docs/pyro.md: losses."""

import itertools
from functools import partial

import pyro
import pyro.contrib.gp.kernels as kernels
import pyro.distributions as dist
import torch
from bounds import PATH, all_choices, check_against, expected_bound, gradients, near
from pyro import infer
from pyro_rows import Pair, Y, losses, row, vectorized

from pyro_nmm import NeighborChoice, NeighborMixture
from pyro_nmm.guides import ordered_guide
from pyro_nmm.models import nmm


@row("TraceGraph_ELBO", "Trace_ELBO")
def unbiased(name):
    pair = Pair()
    sampled = gradients(
        vectorized(getattr(infer, name), 200), pair.model, pair.guide, [pair.log_alpha], 40
    )
    check_against(-pair.bound(), [pair.log_alpha], *sampled)


@row("TraceEnum_ELBO")
def enumerated_parent():
    pair, (prior, q) = Pair(), (torch.tensor(0.3), torch.tensor(0.6))

    def program(field, probs, *y):
        k = pyro.sample("k", dist.Bernoulli(probs), infer={"enumerate": "parallel"})
        alpha = pair.alpha * (1 + 3 * k[..., None, None])
        field(PATH, alpha, pair.logits, Y, collapsed=True)

    found = losses(
        lambda: program(nmm, prior),
        lambda: program(ordered_guide, q),
        kind=infer.TraceEnum_ELBO,
    )
    bounds = [expected_bound(PATH, pair.alpha * (1 + 3 * k), pair.logits, Y) for k in (0, 1)]
    parts = [torch.stack([1 - p, p]) for p in (prior, q)]
    near(-found, (parts[1] * (torch.stack(bounds) + (parts[0] / parts[1]).log())).sum())


@row("TraceMeanField_ELBO")
def reparameterised_alone():
    pair = Pair()
    vectorized(infer.TraceMeanField_ELBO).loss_and_grads(pair.model, pair.guide)


@row("TraceMeanField_ELBO, no validation")
def no_score():
    pyro.enable_validation(False)
    pair = Pair()
    elbo = vectorized(infer.TraceMeanField_ELBO, 500)
    found, grads = gradients(elbo, pair.model, pair.guide, [pair.log_alpha], 160)
    near(-found, pair.bound().detach())
    bias = grads.mean(0) - pair.gradient(-pair.bound()).flatten()
    assert bias.norm() > 3 * (grads.std(0) / 160**0.5).norm()


def self_normalised(pair, elbo):
    elbo.loss_and_grads(pair.model, pair.guide)
    wanted = pair.gradient(-pair.log_prob())
    torch.testing.assert_close(pair.log_alpha.grad, wanted, atol=0.03, rtol=0.1)


@row("RenyiELBO")
def importance_weighted():
    pair = Pair("reinforce")
    near(losses(pair.model, pair.guide, kind=infer.RenyiELBO, size=4000), -pair.log_prob().item())
    self_normalised(pair, vectorized(infer.RenyiELBO, 20_000, alpha=0.0))


@row("RenyiELBO, two particles")
def few_particles():
    """Pyro has the weighted gradient of log p(y, c), and not the gradient of the bound."""
    pair = Pair("reinforce")
    c, wanted = all_choices(PATH), 0.0
    mix = NeighborMixture(PATH, 0.1 * pair.log_alpha.exp(), pair.logits)
    log_joint = NeighborChoice(PATH, pair.logits).log_prob(c) + mix.given(c).log_prob(Y)
    for order in itertools.permutations(range(3)):
        log_q = mix.choices(Y, order=torch.tensor(order)).log_prob(c)
        weights = (log_joint - log_q).detach()
        share = torch.sigmoid(weights[:, None] - weights)  # of the first of two
        both = (log_q[:, None] + log_q).exp().detach()
        wanted = wanted + pair.gradient((both * 2 * share * log_joint[:, None]).sum()) / 6
    exact = pair.gradient(mix.log_prob(Y))
    assert (wanted - exact).abs().max() > 0.02 * exact.abs().max()

    def program(field, **options):
        alpha = 0.1 * pyro.param("log_alpha", pair.log_alpha).exp()
        field(PATH, alpha, pair.logits, Y, collapsed=True, **options)

    guide = partial(program, ordered_guide, estimator="reinforce")
    elbo = vectorized(infer.RenyiELBO, 2, alpha=0.0)
    _, grads = gradients(elbo, partial(program, nmm), guide, [pair.log_alpha], 200)
    error = grads.std(0) / len(grads) ** 0.5
    assert ((grads.mean(0) + wanted.flatten()).abs() < 4.5 * error + 1e-9).all()


@row("RenyiELBO, other estimators")
def control_variate():
    pair = Pair()
    vectorized(infer.RenyiELBO).loss_and_grads(pair.model, pair.guide)


@row("ReweightedWakeSleep")
def wake_theta():
    pair = Pair("reinforce", torch.Tensor.detach)
    pyro.param("unused", torch.zeros(()))
    self_normalised(pair, vectorized(infer.ReweightedWakeSleep, 20_000, insomnia=1.0))


@row("TraceTMC_ELBO")
def one_draw():
    pair = Pair()
    elbo = infer.TraceTMC_ELBO(max_plate_nesting=0)
    found = [elbo.loss(pair.model, pair.guide) for _ in range(200)]
    near(-torch.tensor(found), pair.bound().detach())


@row("TraceTailAdaptive_ELBO")
def tail():
    pair = Pair()
    vectorized(infer.TraceTailAdaptive_ELBO).loss_and_grads(pair.model, pair.guide)


@row("Trace_MMD")
def discrepancy():
    pair, kernel = Pair(), kernels.RBF(3)
    vectorized(infer.Trace_MMD, 10, kernel=kernel).loss_and_grads(pair.model, pair.guide)


@row("JitTraceGraph_ELBO", "JitTrace_ELBO")
def jit(name):
    pair = Pair()
    vectorized(getattr(infer, name), 2).loss_and_grads(pair.model, pair.guide)
