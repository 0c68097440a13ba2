# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Rows of docs/pyro.md: losses."""

import itertools
from functools import partial

import pyro
import pyro.contrib.gp.kernels as kernels
import pyro.distributions as dist
import torch
from bounds import PATH, all_choices, check_against, gradients, near
from pyro import infer
from pyro_rows import Measured, Pair, Y, losses, row, vectorized

from pyro_nmm import NeighborChoice


@row("TraceGraph_ELBO", "Trace_ELBO")
def unbiased(name):
    for collapsed in (True, False):
        pair, elbo = Pair(collapsed=collapsed), vectorized(getattr(infer, name), 200)
        sampled = gradients(elbo, pair.model, pair.guide, [pair.log_alpha], 40)
        check_against(-pair.bound(), [pair.log_alpha], *sampled)


@row("TraceEnum_ELBO")
def enumerated_parent():
    pair, prior, q = Pair(), torch.tensor(0.3), torch.tensor(0.6)

    def alpha(probs):
        k = pyro.sample("k", dist.Bernoulli(probs), infer={"enumerate": "parallel"})
        return pair.alpha * (1 + 3 * k[..., None, None])

    model, guide = pair.at(partial(alpha, prior))[0], pair.at(partial(alpha, q))[1]
    sampled = losses(model, guide, kind=infer.TraceEnum_ELBO)
    bounds = torch.stack([pair.bound(alpha=pair.alpha * (1 + 3 * k)) for k in (0, 1)])
    prior, q = (torch.stack([1 - p, p]) for p in (prior, q))
    near(-sampled, (q * (bounds + (prior / q).log())).sum())


@row("TraceMeanField_ELBO, no validation")
def no_score():
    pyro.enable_validation(False)
    pair = Pair()
    elbo = vectorized(infer.TraceMeanField_ELBO, 500)
    sampled, grads = gradients(elbo, pair.model, pair.guide, [pair.log_alpha], 160)
    near(-sampled, pair.bound().detach())
    bias = grads.mean(0) - pair.gradient(-pair.bound()).flatten()
    assert bias.norm() > 3 * (grads.std(0) / 160**0.5).norm()


def self_normalised(pair, elbo):
    elbo.loss_and_grads(pair.model, pair.guide)
    exact = pair.gradient(-pair.log_prob())
    torch.testing.assert_close(pair.log_alpha.grad, exact, atol=0.03, rtol=0.1)


@row("RenyiELBO")
def importance_weighted():
    pair = Pair("reinforce")
    near(losses(pair.model, pair.guide, kind=infer.RenyiELBO, size=4000), -pair.log_prob().item())
    self_normalised(pair, vectorized(infer.RenyiELBO, 20_000, alpha=0.0))


@row("RenyiELBO, evidence_guide")
def importance_weighted_evidence():
    program = Measured()
    guide = partial(program.guide, estimator="reinforce")
    leaves = [program.loc, program.log_alpha]
    elbo = vectorized(infer.RenyiELBO, 4000, alpha=0.0)
    sampled, grads = gradients(elbo, program.model, guide, leaves, 40)
    near(sampled, -program.log_prob().item())
    exact = torch.cat([g.flatten() for g in torch.autograd.grad(-program.log_prob(), leaves)])
    error = grads.std(0) / len(grads) ** 0.5
    assert ((grads.mean(0) - exact).abs() < 4.5 * error + 1e-3).all()  # biased by 1 / 4000


@row("RenyiELBO, two particles")
def few_particles():
    """Pyro has the weighted gradient of log p(y, c), and not the gradient of the bound."""
    pair, c, weighted = Pair("reinforce"), all_choices(PATH), 0.0
    mix = pair.mixture(0.1 * pair.log_alpha.exp())
    log_joint = NeighborChoice(PATH, pair.logits).log_prob(c) + mix.given(c).log_prob(Y)
    for order in itertools.permutations(range(3)):
        log_q = mix.choices(Y, order=torch.tensor(order)).log_prob(c)
        weights = (log_joint - log_q).detach()
        share = torch.sigmoid(weights[:, None] - weights)  # of the first of two
        both = (log_q[:, None] + log_q).exp().detach()
        weighted = weighted + pair.gradient((both * 2 * share * log_joint[:, None]).sum()) / 6
    exact = pair.gradient(mix.log_prob(Y))
    assert (weighted - exact).abs().max() > 0.02 * exact.abs().max()

    model, guide = pair.at(lambda: 0.1 * pyro.param("log_alpha", pair.log_alpha).exp())
    guide = partial(guide, estimator="reinforce")
    elbo = vectorized(infer.RenyiELBO, 2, alpha=0.0)
    _, grads = gradients(elbo, model, guide, [pair.log_alpha], 200)
    error = grads.std(0) / len(grads) ** 0.5
    assert ((grads.mean(0) + weighted.flatten()).abs() < 4.5 * error + 1e-9).all()


@row("ReweightedWakeSleep")
def wake_theta():
    pair = Pair("reinforce", torch.Tensor.detach)
    pyro.param("unused", torch.zeros(()))
    self_normalised(pair, vectorized(infer.ReweightedWakeSleep, 20_000, insomnia=1.0))


@row("TraceTMC_ELBO")
def one_draw():
    pair, elbo = Pair(), infer.TraceTMC_ELBO(max_plate_nesting=0)
    sampled = [elbo.loss(pair.model, pair.guide) for _ in range(200)]
    near(-torch.tensor(sampled), pair.bound().detach())


@row("TraceMeanField_ELBO", "TraceTailAdaptive_ELBO", "Trace_MMD", "JitTraceGraph_ELBO",
     "JitTrace_ELBO", "RenyiELBO, other estimators")  # fmt: skip
def refused(name):
    pair, options = Pair(), {"kernel": kernels.RBF(3)} if name == "Trace_MMD" else {}
    elbo = vectorized(getattr(infer, name.partition(",")[0]), 2, **options)
    elbo.loss_and_grads(pair.model, pair.guide)
