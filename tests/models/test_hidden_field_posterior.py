# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Chains and EM of a hidden field on five nodes, against sums over all labellings."""

import math

import pytest
import torch
from emissions import EMISSIONS, emission_case
from graphs import house, labellings, parameters
from torch.autograd import grad
from torch.nn.functional import one_hot

from pyro_nmm import NeighborMixture
from pyro_nmm.models import (
    Annotators,
    FieldPrior,
    PoissonEmission,
    fit_field,
    leave_one_out,
    sample_field,
)


def log_joint(emission, mix, data, values):
    """``(2^N,)``: log p(u, w | theta), plus the prior of theta."""
    every = labellings(mix.hood.num_nodes)
    evidence = emission.log_prob(values, data)
    found = evidence[torch.arange(len(evidence)), every].sum(-1)
    return every, mix.log_prob(every) + found + emission.log_prior(values, data)


@pytest.mark.parametrize("name", EMISSIONS)
def test_em_raises_the_likelihood(name):
    """With the exact E-step, until it stands still at a zero of the gradient."""
    emission, hood, data, values = emission_case(name)
    mix = NeighborMixture(hood, *parameters(hood, 2))
    bounds = []
    for _ in range(400):
        every, joint = log_joint(emission, mix, data, values)
        bounds.append(joint.logsumexp(0).item())
        weights = joint.softmax(0)
        probs = torch.stack([weights @ (every == k).to(weights) for k in range(2)], -1)
        values = emission.maximise(data, probs, values)
    steps = torch.tensor(bounds).diff()
    assert (steps > -1e-9).all()
    assert bounds[-1] > bounds[0] + 0.01
    assert steps[-1] < 1e-6
    # Towards log-odds, logarithms and means: the optimum does not depend on what is a label's name.
    free = {
        key: (value.log() if (value > 0).all() and key != "mean" else value).requires_grad_()
        for key, value in values.items()
    }

    def bound():
        again = {
            key: value if key == "mean" else value.softmax(-1) if "simplex" in
            str(emission.support[key]).lower() else value.exp()
            for key, value in free.items()
        }  # fmt: skip
        return log_joint(emission, mix, data, again)[1].logsumexp(0)

    for found in grad(bound(), list(free.values())):
        assert found.abs().max() < 2e-3


def marginals_by_enumeration(emission, mix, data):
    """``(N, 2)``: every label's probability with the emission's parameters integrated out."""
    every = labellings(mix.hood.num_nodes)
    weights = (mix.log_prob(every) + log_evidence(emission, data)).softmax(0)
    return torch.stack([weights @ (every == k).to(weights) for k in range(2)], -1)


def log_evidence(emission, data):
    """``(2^N,)``: log p(w | u) of every labelling u, up to a constant."""
    labels = labellings(len(data))
    if not isinstance(emission, Annotators):
        return of_columns(emission, data, one_hot(labels, 2).double())
    if emission.num_types is None:
        return of_answers(emission, data, one_hot(labels, 2).double())
    types = one_hot(labellings(len(data), emission.num_types)).double()
    pairs = torch.einsum("unk,tnh->utkh", one_hot(labels, 2).double(), types)
    log_types = dirichlet_multinomial(pairs, torch.tensor(1 / emission.num_types)).sum(-1)
    return (log_types + of_answers(emission, data, types)).logsumexp(1)


def dirichlet_multinomial(counts, prior):
    """``(...)``: of counts ``(..., K)`` of categories in any order."""
    prior = prior.expand_as(counts)
    totals = torch.lgamma(prior.sum(-1)) - torch.lgamma((prior + counts).sum(-1))
    return totals + (torch.lgamma(prior + counts) - torch.lgamma(prior)).sum(-1)


def of_answers(emission, data, labels):
    """``(Q,)``: of all answers, given labels ``(Q, N, C)`` as indicators."""
    columns = emission.num_answers or 2
    strength = emission.strength or (1 if emission.named else columns / 2)
    prior = torch.full((labels.shape[-1], columns), strength / columns)
    if emission.named:
        prior = torch.full((2, columns), strength / 2 / (columns - 1)).fill_diagonal_(strength / 2)
    answers = one_hot(data + 1, columns + 1)[..., 1:].double()  # a missing one counts nowhere
    counts = torch.einsum("qnk,nma->qmka", labels, answers)
    return dirichlet_multinomial(counts, prior.double()).sum((1, 2))


def of_columns(emission, data, labels):
    """``(Q,)``: of all counts or features, given labels ``(Q, N, C)`` as indicators."""
    poisson, a = isinstance(emission, PoissonEmission), emission.strength
    table = data.double().masked_fill(data < 0, math.nan) if poisson else data.double()
    centre, spread = table.nanmean(0), (table - table.nanmean(0)).square().nanmean(0)
    off = (table if poisson else table - centre).nan_to_num()

    def total(part):
        return torch.einsum("qnk,nd->qkd", labels, part)

    size, sums = total((~table.isnan()).double()), total(off)
    if poisson:
        above, below = a + sums, a / centre + size
        found = torch.lgamma(above) - above * below.log() + a * (a / centre).log()
    else:  # a Normal with the prior of mean and variance: the density of a multivariate t
        squares = total(off.square()) - sums.square() / (size + a)
        found = torch.lgamma(a + size / 2) - 0.5 * (1 + size / a).log()
        found = found - (a + size / 2) * (a * spread + squares / 2).log()
        found = found + a * (a * spread).log()
    return found.sum((1, 2))


@pytest.mark.parametrize("name", EMISSIONS)
def test_samples_are_the_joint_posterior(name):
    emission, hood, data, values = emission_case(name)
    prior = FieldPrior(2, kappa=0.7)
    torch.nn.init.normal_(prior.share_scores)
    field = sample_field(
        emission, hood, data, prior, values, num_chains=16, num_draws=500, num_sweeps=50
    )
    exact = marginals_by_enumeration(emission, field.mixture(), data)
    size = field.chains.effective_size()
    print(name, "size", size.tolist())
    error = (exact * (1 - exact) / size.min()).sqrt()
    print(((field.probs - exact).abs() / error).max(), (field.probs - exact).abs().max(), error.max())
    assert ((field.probs - exact).abs() < 4 * error + 5e-3).all(), (field.probs, exact)
    drawn = torch.stack([(field.samples == k).to(exact).mean(0) for k in range(2)], -1)
    print(((drawn - exact).abs() / error).max(), (drawn - exact).abs().max())
    assert ((drawn - exact).abs() < 5 * error + 5e-3).all()
