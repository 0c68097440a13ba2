# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Chains at fixed parameters have the gradient of log p(y) by brute force, and states that last."""

import copy
import io
import pickle
from functools import partial

import numpy as np
import pyro
import pytest
import torch
from oracle import label_probs, of_hood
from pyro import poutine
from pyro.distributions import Bernoulli, Normal
from pyro.infer import Trace_ELBO, TraceGraph_ELBO
from scipy.special import logsumexp

from pyro_nmm import Neighborhood
from pyro_nmm.guides import Chains, evidence_guide, ordered_guide
from pyro_nmm.models import nmm

HOOD = Neighborhood(torch.tensor([[0, 1, 2, 3, 4, 0, 1], [1, 2, 3, 4, 0, 2, 4]]), 5)
RANDOM = np.random.default_rng(0)
BASE = torch.tensor(RANDOM.uniform(0.1, 0.6, (5, 2)))
FEATURE = torch.tensor(RANDOM.normal(size=HOOD.num_edges))
Y = torch.tensor(RANDOM.integers(2, size=(6, 5)))
X = torch.tensor(RANDOM.normal(size=(6, 5))) + Y
NOISE = torch.tensor(RANDOM.dirichlet([1.0, 1.0], (HOOD.num_edges, 2)))
SOME = torch.tensor([True, True, False, True, True])
START = torch.tensor([0.2, -0.7, 0.5], dtype=torch.double)  # log kappa, attention, distance


def of(theta):
    return theta[0].exp() * BASE, theta[1] * FEATURE


def observed(y=Y[0], mask=None, relabel=None, collapsed=True):
    """Programs of theta, the estimator and ``guided``, and log p by brute force."""

    def program(theta, chains, guided):
        arguments = HOOD, *of(theta), y, mask
        options = {"relabel": relabel, "collapsed": collapsed}
        if guided:
            ordered_guide(*arguments, estimator=chains, **options)
        else:
            nmm(*arguments, **options)

    def log_prob(theta):
        alpha, logits = of(theta)
        if relabel is not None:
            labels, probs = label_probs(HOOD, alpha, logits, relabel.numpy())
            return np.log(probs[(labels == y.numpy()).all(1)].item())
        nodes = None if mask is None else mask.nonzero()[:, 0].tolist()
        oracle = of_hood(HOOD, alpha, logits, nodes)
        return oracle.log_prob[oracle.index(y if mask is None else y[mask])]

    return program, log_prob


def plated(size=None):
    """Six labellings in a plate, of which ``size`` are seen in a step."""

    def program(theta, chains, guided):
        with pyro.plate("labellings", 6, subsample_size=size) as index:
            arguments = HOOD, *of(theta), Y[index]
            if guided:
                ordered_guide(*arguments, collapsed=True, estimator=chains)
            else:
                nmm(*arguments, collapsed=True)

    return program, lambda theta: sum(observed(y)[1](theta) for y in Y)


def latent(collapsed=True, plate=False, mask=None):
    """Labels with normal observations."""
    rows, x = slice(None) if mask is None else mask, X if plate else X[0]

    def emit(y, theta):
        return Normal(theta[2] * y, 1.0)

    def fields(theta, chains, guided, x):
        prior, options = (HOOD, *of(theta)), {"collapsed": collapsed}
        if guided:
            scores = emit(torch.arange(2), theta).log_prob(x[..., None])
            evidence_guide(*prior, scores, mask, estimator=chains, **options)
        else:
            y = nmm(*prior, None, mask, **options)
            pyro.sample("x", emit(y, theta).to_event(1), obs=x[..., rows])

    def program(*arguments):
        if not plate:
            return fields(*arguments, x)
        with pyro.plate("images", 6, subsample_size=3) as index:
            return fields(*arguments, x[index])

    def log_prob(theta):
        nodes = None if mask is None else mask.nonzero()[:, 0].tolist()
        oracle = of_hood(HOOD, *of(theta), nodes)
        seen = x.reshape(-1, 5)[:, rows]
        scores = emit(torch.tensor(oracle.labels), theta).log_prob(seen[:, None]).sum(-1)
        return logsumexp(oracle.log_prob + scores.numpy(), 1).sum()

    return program, log_prob


def gradients(program, chains, kind, particles, vectorize, steps):
    theta = START.clone().requires_grad_()
    sides = [partial(program, theta, chains, guided) for guided in (False, True)]
    elbo = kind(particles, vectorize_particles=vectorize, max_plate_nesting=1)
    found = []
    for _ in range(steps):
        loss = elbo.differentiable_loss if kind is Trace_ELBO else elbo.loss_and_grads
        value = loss(*sides)
        if kind is Trace_ELBO:
            value.backward()
        found.append(-theta.grad)
        theta.grad = None
    return torch.stack(found[steps // 5 :]).numpy()


CASES = {
    "observed": (observed(), Trace_ELBO, 200, True),
    "mask": (observed(mask=SOME), TraceGraph_ELBO, 200, True),
    "matrices, z": (observed(relabel=NOISE, collapsed=False), TraceGraph_ELBO, 200, True),
    "latent": (latent(), TraceGraph_ELBO, 200, True),
    "latent, mask": (latent(mask=SOME), Trace_ELBO, 200, True),
    "latent, plate": (latent(plate=True), Trace_ELBO, 100, True),
    "plate": (plated(), Trace_ELBO, 40, True),
    "subsample": (plated(3), TraceGraph_ELBO, 60, True),
    "subsample, one by one": (plated(3), Trace_ELBO, 1, False),
}


@pytest.mark.parametrize("name", CASES)
def test_gradient(way, name):
    """In standard errors of batches of steps, which are longer than the chains remember."""
    (program, log_prob), kind, particles, vectorize = CASES[name]
    pyro.set_rng_seed(0)
    steps = 50 if vectorize else 200
    found = gradients(program, Chains(), kind, particles, vectorize, steps)
    means = found.reshape(10, -1, 3).mean(1)
    size = 3 if "latent" in name else 2  # observed labels have no distance
    step = 1e-5 * torch.eye(3, dtype=torch.double)[:size]
    exact = [(log_prob(START + h) - log_prob(START - h)) / 2e-5 for h in step]
    mean, error = means.mean(0)[:size], means.std(0, ddof=1)[:size] / 10**0.5
    assert (np.abs(mean - exact) <= 5 * error).all(), (mean, exact, error)
    assert (error[:2] < 0.6).all()


def test_batches_of_nodes(way):
    """Two masks in turn: either starts from choices that have seen other labels."""
    program, other = (observed(mask=mask)[0] for mask in (SOME, ~SOME | (torch.arange(5) < 2)))
    chains, theta = Chains(3), START.clone().requires_grad_()
    elbo = Trace_ELBO(400, vectorize_particles=True, max_plate_nesting=1)
    found = []
    for step in range(60):
        part = (program, other)[step % 2]
        sides = [partial(part, theta, chains, guided) for guided in (False, True)]
        elbo.differentiable_loss(*sides).backward()
        found += [] if step % 2 else [-theta.grad]
        theta.grad = None
    found = torch.stack(found[5:]).numpy()[:, :2]
    log_prob, step = observed(mask=SOME)[1], 1e-5 * torch.eye(3, dtype=torch.double)[:2]
    exact = [(log_prob(START + h) - log_prob(START - h)) / 2e-5 for h in step]
    error = found.std(0, ddof=1) / len(found) ** 0.5
    assert (np.abs(found.mean(0) - exact) <= 5 * error).all()
    assert (chains.states >= 0).all()


def run(chains, particles=3, program=None, seed=0):
    """One evaluation of a loss; returns it."""
    pyro.set_rng_seed(seed)
    program = observed()[0] if program is None else program
    elbo = Trace_ELBO(particles, vectorize_particles=particles > 1, max_plate_nesting=1)
    return elbo.loss(*(partial(program, START, chains, guided) for guided in (0, 1)))


def saved(chains):
    file = io.BytesIO()
    torch.save(chains.state_dict(), file)
    file.seek(0)
    again = Chains()
    again.load_state_dict(torch.load(file, weights_only=True))
    return again


@pytest.mark.parametrize("program", [observed()[0], latent()[0], plated(2)[0]])
@pytest.mark.parametrize("copied", [saved, copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))])
def test_states_go_on(way, copied, program):
    chains = Chains()
    saved(chains)  # before there are states
    run(chains, program=program)
    again, before = copied(chains), chains.states.clone()
    assert run(again, program=program, seed=1) == run(chains, program=program, seed=1)
    assert torch.equal(again.states, chains.states)
    assert not torch.equal(chains.states, before)
    assert torch.equal(copied(chains).states, chains.states)


def test_other_numbers_of_particles(way):
    """Chains that a step does not use stay, and new ones start from copies."""
    chains = Chains()
    run(chains, 4)
    before = chains.states
    run(chains, 2)
    assert torch.equal(chains.states[2:], before[2:])
    run(chains, 1)
    run(chains, 7)
    assert chains.states.shape == (7, 1, 5)


def another_graph():
    hood = Neighborhood(torch.tensor([[4, 3, 2, 1, 0], [2, 0, 1, 4, 3]]), 5)
    ordered_guide(hood, BASE, torch.zeros(hood.num_edges), Y[0], collapsed=True, estimator=CHAINS)


def another_size():
    hood, y = Neighborhood.grid(2, 3), torch.zeros(6).long()
    ordered_guide(hood, torch.ones(6, 2), torch.zeros(hood.num_edges), y, estimator=CHAINS)


OTHERS = {
    "graph": another_graph,
    "size": another_size,
    "kind": lambda: latent()[0](START, CHAINS, True),
    "plate": lambda: plated()[0](START, CHAINS, True),
}
CHAINS = Chains()


@pytest.mark.parametrize("name", OTHERS)
def test_another_field(way, name):
    CHAINS.states = None
    run(CHAINS)
    with pytest.raises(ValueError, match="Chains serves one field on one graph"):
        OTHERS[name]()


def test_discrete_sites(way):
    """A site before the field that has a score is refused, whether it is its parent or not."""

    def guide(after):
        chains = Chains()
        for site in (True, False) if after else (False, True):
            if site:
                observed()[0](START, chains, True)
            else:
                pyro.sample("k", Bernoulli(0.5))

    poutine.trace(partial(guide, True)).get_trace()
    with pytest.raises(ValueError, match="site 'k' has no reparameterised draw"):
        poutine.trace(partial(guide, False)).get_trace()


def test_device(device):
    """States move with the module, or else with the first step."""
    hood, chains = HOOD.to(device), Chains(2)
    run(chains, 1)
    arguments = *(part.to(device) for part in of(START)), Y[0].to(device)
    for moved in (chains, copy.deepcopy(chains).to(device)):
        for _ in range(2):
            ordered_guide(hood, *arguments, collapsed=True, estimator=moved)
        assert moved.states.device.type == device


def step(chains, seed, mask=None):
    """One evaluation in which the particles are the only dimension, as a step on a device has."""
    pyro.set_rng_seed(seed)
    elbo = Trace_ELBO(30, vectorize_particles=True, max_plate_nesting=0)
    elbo.loss(*(partial(observed(mask=mask)[0], START, chains, guided) for guided in (0, 1)))


def test_rows_that_are_not_observed_keep_their_choices(way):
    """Of a mask's rows the choices move, and those of the other rows stay."""
    chains = Chains(3)
    step(chains, 0)
    before = chains.states.clone()
    step(chains, 1, SOME)
    moved = (chains.states != before).flatten(0, 1).any(0)
    assert moved.tolist() == SOME.tolist()
