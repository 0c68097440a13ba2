# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Chains and EM of a hidden field on five nodes, against sums over all labellings."""

import itertools

import pytest
import torch
from emissions import EMISSIONS, emission_case, field_prior, sampled
from graphs import house, labellings, parameters
from pyro import poutine
from torch.autograd import grad
from torch.nn.functional import one_hot

from pyro_nmm import NeighborMixture
from pyro_nmm.guides import AutoNMM, check_program
from pyro_nmm.models import (
    Annotators,
    fit_field,
    hidden_field,
    leave_one_out,
)


def log_joint(emission, log_labels, data, values):
    """``(2^N,)``: log p(u, w | theta), plus the prior of theta, given log p(u)."""
    evidence = emission.log_prob(values, data)
    found = evidence[torch.arange(len(evidence)), labellings(len(evidence))].sum(-1)
    return log_labels + found + emission.log_prior(values, data)


@pytest.mark.parametrize("name", EMISSIONS)
def test_em_raises_the_likelihood(name):
    """With the exact E-step, until it stands still at a zero of the gradient."""
    emission, hood, data, values = emission_case(name)
    every, bounds = labellings(hood.num_nodes), []
    log_labels = NeighborMixture(hood, *parameters(hood, 2)).log_prob(every)
    for _ in range(400):
        joint = log_joint(emission, log_labels, data, values)
        bounds.append(joint.logsumexp(0).item())
        weights = joint.softmax(0)
        probs = torch.stack([weights @ (every == k).to(weights) for k in range(2)], -1)
        values = emission.maximise(data, probs, values)
    steps = torch.tensor(bounds).diff()
    assert (steps > -1e-9).all()
    assert bounds[-1] > bounds[0] + 0.01
    assert steps[-1] < 1e-6
    # Towards log-odds, logarithms and means: the optimum does not depend on what is a label's name.
    free = {key: value.requires_grad_() for key, value in unconstrained(values).items()}
    bound = log_joint(emission, log_labels, data, constrained(emission, free)).logsumexp(0)
    for found in grad(bound, list(free.values())):
        assert found.abs().max() < 2e-3


def unconstrained(values):
    """Means as they are, logarithms of all other parameters."""
    return {key: value if key == "mean" else value.log() for key, value in values.items()}


def constrained(emission, free):
    return {
        key: value if key == "mean" else
        value.softmax(-1) if key in simplices(emission) else value.exp()
        for key, value in free.items()
    }  # fmt: skip


def simplices(emission):
    return {key for key, kind in emission.support.items() if "simplex" in str(kind).lower()}


@pytest.mark.parametrize("name", EMISSIONS)
def test_parameters_are_drawn_from_their_posterior_given_labels(name):
    """
    By Stein's identity: slopes of the log-posterior are zero on average. 600 draws notice a Gamma
    or Dirichlet count that is off by a half. Slopes towards types are zero by symmetry alone, so
    that they are multiplied by the share too, whose derivative is then their mean with its sign
    changed.
    """
    emission, _, data, values = emission_case(name)
    labels, draws = torch.tensor([0, 1, 1, 1, 0]), []
    for _ in range(600):
        values = emission.draw(data, labels, values)
        draws.append(unconstrained(values))
    free = {key: torch.stack([each[key] for each in draws]).requires_grad_() for key in values}
    total = 0.0
    for each in range(600):
        drawn = constrained(emission, {key: value[each] for key, value in free.items()})
        total = total + emission.log_prob(drawn, data)[torch.arange(5), labels].sum()
        total = total + emission.log_prior(drawn, data)
    zeros = []
    for (key, value), slope in zip(free.items(), grad(total, list(free.values())), strict=True):
        zeros.append(slope.flatten(1))
        if key == "types":
            share = value.detach().softmax(-1)
            zeros.append((slope * share + share * (1 - share)).flatten(1))
    parts = torch.cat(zeros, 1).unflatten(0, (60, 10)).mean(1)  # with types the draws are a chain
    error = parts.std(0) / len(parts) ** 0.5
    assert (parts.mean(0).abs() < 5 * error + 1e-9).all()


def probs_by_enumeration(emission, mix, data):
    """``(N, 2)``: every label's probability with the emission's parameters integrated out."""
    every = labellings(mix.hood.num_nodes)
    weights = (mix.log_prob(every) + log_evidence(emission, data)).softmax(0)
    return torch.stack([weights @ (every == k).to(weights) for k in range(2)], -1)


def log_evidence(emission, data):
    """``(2^N,)``: log p(w | u) of every labelling u, up to a constant."""
    labels = labellings(len(data))
    if not isinstance(emission, Annotators):
        return of_features(data, one_hot(labels, 2).double())
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
    prior = torch.full((labels.shape[-1], columns), 1 / 2)
    if emission.named:
        right = 2 / 3 if columns == 2 else 1 / 2
        prior = torch.full((2, columns), (1 - right) / (columns - 1)).fill_diagonal_(right)
    prior = prior * (4 if isinstance(emission, Firm) else 1)
    answers = one_hot(data + 1, columns + 1)[..., 1:].double()  # a missing one counts nowhere
    counts = torch.einsum("qnk,nma->qmka", labels, answers)
    return dirichlet_multinomial(counts, prior.double()).sum((1, 2))


def of_features(data, labels):
    """``(Q,)``: of all features, given labels ``(Q, N, C)`` as indicators."""
    centre, spread = data.nanmean(0), (data - data.nanmean(0)).square().nanmean(0)
    off = (data - centre).nan_to_num()

    def total(part):
        return torch.einsum("qnk,nd->qkd", labels, part)

    # A Normal with the prior of mean and variance: the density of a multivariate t.
    size, sums = total((~data.isnan()).double()), total(off)
    squares = total(off.square()) - sums.square() / (size + 1)
    found = torch.lgamma(1 + size / 2) - 0.5 * (1 + size).log() + spread.log()
    return (found - (1 + size / 2) * (spread + squares / 2).log()).sum((1, 2))


@pytest.mark.parametrize("name", EMISSIONS)
def test_samples_are_the_joint_posterior(name):
    """
    Chains of labels and parameters against labels with the parameters integrated out, in standard
    errors between 32 chains. A probability that is off by .1 is noticed.
    """
    emission, hood, data, values = emission_case(name)
    prior = field_prior()
    torch.nn.init.normal_(prior.share_scores)
    field = sampled(emission, hood, data, prior, values, num_chains=32, num_draws=60)
    exact = probs_by_enumeration(emission, NeighborMixture(hood, *field.prior(hood)), data)
    assert field.samples.shape == (1920, 5)
    seen = one_hot(field.samples.long(), 2).double().view(60, 32, 5, 2).mean(0)
    error = seen.std(0) / 32**0.5
    for found in (field.probs, seen.mean(0)):
        assert ((found - exact).abs() < 4.5 * error).all(), (found, exact)
    assert error.max() < 0.06
    assert field.chains.effective_size().min() > 100
    for key, value in field.draws.items():
        assert value.shape == (1920, *values[key].shape)
        assert emission.support[key].check(value).all()


@pytest.mark.parametrize("name", ["types", "features"])
def test_queries_of_a_field(name):
    emission, hood, _, _ = emission_case(name, house)
    data, options = EMISSIONS[name][1], {"num_starts": 1, "num_steps": 5, "num_draws": 8}
    field = fit_field(emission, hood, data, **options)
    assert (field.probs > 0).all()
    torch.testing.assert_close(field.probs.sum(-1), torch.ones(5))
    assert field.predict().equal(field.probs.argmax(-1))
    torch.testing.assert_close(field.entropy(), -(field.probs * field.probs.log()).sum(-1))
    evidence = emission.log_prob(field.values, emission.check(hood, data))
    exact = NeighborMixture(hood, *field.prior(hood)).log_prob(labellings(5))
    exact = exact + evidence[torch.arange(5), labellings(5)].sum(-1)
    marginals = exact.softmax(0) @ one_hot(labellings(5), 2).double().flatten(1)
    found = field.latents(data).posterior(None, num_sweeps=0).marginals()
    torch.testing.assert_close(found, marginals.view(5, 2))
    assert repr(field).startswith("HiddenField(hood=Neigh")
    assert "kappa=" in repr(field)


class Firm(Annotators):
    """Annotators whose priors count for four times as much: weaker ones need far more sweeps."""

    def _pseudo_counts(self, like):
        return 4 * super()._pseudo_counts(like)


@pytest.mark.parametrize("name", ["answers", "types"])
def test_leave_one_out(name):
    """
    p(w) / p(w without what is observed of a node), parameters integrated out. Within .08 nats: an
    arithmetic mean of the predictions is off by .2, and fitted parameters, which have seen the
    node's answers, by .4.
    """
    emission, hood, data, values = emission_case(name)
    emission = Firm(2, num_types=emission.num_types)
    prior = field_prior()
    field = sampled(emission, hood, data, prior, values, num_chains=64, num_draws=4)
    log_prior = NeighborMixture(hood, *field.prior(hood)).log_prob(labellings(5))

    def evidence(table):
        return (log_prior + log_evidence(emission, table)).logsumexp(0)

    found = leave_one_out(field, data)
    for node in (0, 1, 3):
        missing = data.clone()
        missing[node] = -1
        exact = evidence(data) - evidence(missing)
        assert found[node].item() == pytest.approx(exact.item(), abs=0.08)


@pytest.mark.parametrize("name", EMISSIONS)
def test_the_program_is_the_model(name):
    """Summed over choices and labels. AutoNMM finds the evidence of each node in it."""
    emission, hood, data, values = emission_case(name)
    program = hood, field_prior(), emission, values, data
    places = (hood.source[a:b].tolist() for a, b in itertools.pairwise(hood.ptr.tolist()))
    terms = []
    for c in map(torch.tensor, itertools.product(*places)):
        y = labellings(5)
        given = poutine.condition(hidden_field, {"c": c.expand(len(y), -1), "y": y})
        trace = poutine.trace(given).get_trace(*program)
        trace.compute_log_prob()
        parts = [trace.nodes[site]["log_prob"] for site in ("c", "y", "data", "prior")]
        terms.append(sum(parts).logsumexp(0))
    mix, prior = NeighborMixture(hood, *program[1](hood)), program[1].log_prior()
    exact = log_joint(emission, mix.log_prob(labellings(5)), data, values).logsumexp(0) + prior
    torch.testing.assert_close(torch.stack(terms).logsumexp(0), exact)
    guide = AutoNMM(lambda: hidden_field(*program))
    check_program(lambda: hidden_field(*program), guide)
    expected = mix.latents(emission.log_prob(values, data)).posterior(None, num_sweeps=0)
    found = guide.posterior(num_samples=None, num_sweeps=0)["c"]
    torch.testing.assert_close(found.marginals(), expected.marginals())
