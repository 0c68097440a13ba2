# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The kernel of MCMC: posteriors against enumeration on a grid, chains, and what MCMC asks for."""

import numpy as np
import oracle
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.contrib.autoname import scope
from pyro.infer import HMC, MCMC, NUTS
from pyro.infer.mcmc import RandomWalkKernel
from scipy.special import logsumexp
from scipy.stats import norm

from pyro_nmm import EvidenceConditional, Neighborhood, OrderedConditional
from pyro_nmm.guides import FieldGibbs
from pyro_nmm.guides.proposals import Proposals
from pyro_nmm.models import nmm
from pyro_nmm.ops.diagnostics import effective_size

SQUARE = Neighborhood(torch.tensor([[0, 1, 1, 2, 2, 3, 3, 0], [1, 0, 2, 1, 3, 2, 0, 3]]), 4)
LOOKS = torch.linspace(-1.5, 1.5, SQUARE.num_edges, dtype=torch.double)
PROBS = torch.tensor([[0.5, 0.5], [0.3, 0.7], [0.6, 0.4], [0.5, 0.5]], dtype=torch.double)
MOTIONS = torch.tensor([[0, 0, 0, 0], [1, 1, 1, 1], [0, 0, 1, 0], [1, 1, 1, 1], [1, 1, 1, 0]])
X = torch.tensor([2.1, 1.4, -0.9, 1.2], dtype=torch.double)
Y = MOTIONS[2]
TWO_X = torch.stack([X, -X.flip(0)])
KEPT = torch.eye(2, dtype=torch.double) * 0.8 + 0.1
#: The grid of log kappa, a priori normal.
GRID = np.linspace(-4.0, 4.0, 33)


def kappa():
    return pyro.sample("kappa", dist.LogNormal(0.0, 1.0))


def field(y=None, observed=None, **options):
    options = {"collapsed": True} | options
    return nmm(SQUARE, kappa() * PROBS, LOOKS, y, observed, **options)


def attended():
    beta, size = pyro.sample("beta", dist.Normal(0.0, 1.0)), kappa()
    with pyro.plate("motions", len(MOTIONS)):
        nmm(SQUARE, size * PROBS, beta * LOOKS, MOTIONS, collapsed=True)


def uncollapsed():
    size = kappa()
    with pyro.plate("motions", len(MOTIONS)):
        nmm(SQUARE, size * PROBS, LOOKS, MOTIONS)


def matrices():
    field(MOTIONS[2], relabel=KEPT.expand(SQUARE.num_edges, 2, 2))


def latent():
    pyro.sample("x", dist.Normal(2.0 * field() - 1, 1.0).to_event(1), obs=X)


def latent_plate():
    size = kappa()
    with pyro.plate("copies", 2):
        y = nmm(SQUARE, size * PROBS, LOOKS, collapsed=True)
        pyro.sample("x", dist.Normal(2.0 * y - 1, 1.0).to_event(1), obs=TWO_X)


def local_latents():
    h = pyro.sample("h", dist.Normal(2.0 * field() - 1, 0.6).to_event(1))
    pyro.sample("x", dist.Normal(h, 0.8).to_event(1), obs=X)


def two_fields():
    size = kappa()
    with scope(prefix="a"):
        first = nmm(SQUARE, size * PROBS, LOOKS, collapsed=True)
    with scope(prefix="b"):
        second = nmm(SQUARE, PROBS, -LOOKS, collapsed=True)
    pyro.sample("x", dist.Normal(1.0 * first + second - 1, 0.5).to_event(1), obs=X)


def two_observed():
    size = kappa()
    for name in "ab":
        with scope(prefix=name):
            nmm(SQUARE, size * PROBS, LOOKS, Y, collapsed=True)


def table(size, **options):
    """All labellings and their probabilities."""
    return oracle.label_probs(SQUARE, size * PROBS, LOOKS, **options)


def of_labels(y, size, **options):
    labels, probs = table(size, **options)
    return np.log(probs[(labels == y.numpy()).all(1)].item())


def of_motions(size, beta=1.0, nodes=range(4)):
    found = oracle.of_hood(SQUARE, size * PROBS, beta * LOOKS, nodes=list(nodes))
    return sum(found.log_prob[found.index(y[list(nodes)])] for y in MOTIONS)


def joint_of_x(x, size, sd=1.0):
    """Log p(y, x) of every labelling."""
    labels, probs = table(size)
    return labels, np.log(probs) + norm.logpdf(x.numpy(), 2.0 * labels - 1, sd).sum(1)


def of_x(x, size):
    return logsumexp(joint_of_x(x, size)[1])


def of_two_fields(size):
    labels, first = table(size)
    second = oracle.of_hood(SQUARE, PROBS, -LOOKS).log_prob
    seen = norm.logpdf(X.numpy(), labels[:, None] + labels - 1.0, 0.5).sum(-1)
    return logsumexp(np.log(first)[:, None] + second + seen)


MATRICES = KEPT.expand(SQUARE.num_edges, 2, 2)
#: Programs, and log-likelihoods of kappa by brute force.
PROGRAMS = {
    "attended": (attended, None),
    "uncollapsed": (uncollapsed, of_motions),
    "matrices": (matrices, lambda k: of_labels(MOTIONS[2], k, relabel=MATRICES.numpy())),
    "latent": (latent, lambda size: of_x(X, size)),
    "latent plate": (latent_plate, lambda size: sum(of_x(x, size) for x in TWO_X)),
    "local latents": (local_latents, lambda size: of_x(X, size)),
    "two fields": (two_fields, of_two_fields),
    "two observed fields": (two_observed, lambda size: 2 * of_labels(Y, size)),
}


def run(model, num_samples, kernel=RandomWalkKernel, warmup_steps=60, **options):
    # Few sweeps: weights are noisy, so a wrong use of them would show.
    gibbs = FieldGibbs(model, kernel, num_sweeps=4, num_moves=2)
    chains = MCMC(gibbs, num_samples, warmup_steps, disable_progbar=True, **options)
    chains.run()
    return chains


def mean_and_error(draws):
    size = effective_size(draws[None])
    return draws.mean(), (draws.var() / size).sqrt()


def check(draws, exact):
    mean, error = mean_and_error(draws)
    assert abs(mean - exact) < 4.5 * error
    return error


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_posterior_of_the_concentration(name):
    model, likelihood = PROGRAMS[name]
    kernel, number = (NUTS, 120) if name == "local latents" else (RandomWalkKernel, 250)
    draws = run(model, number, kernel).get_samples()
    size = draws["kappa"].log()
    if name == "attended":
        betas = np.linspace(-4.0, 4.0, 17)
        table = np.array([[of_motions(np.exp(k), b) for b in betas] for k in GRID])
        table -= (GRID**2)[:, None] / 2 + betas**2 / 2
        weight = np.exp(table - logsumexp(table))
        check(draws["beta"], (weight.sum(0) * betas).sum())
        weight = weight.sum(1)
    else:
        log = np.array([likelihood(np.exp(k)) for k in GRID]) - GRID**2 / 2
        weight = np.exp(log - logsumexp(log))
    error = check(size, (weight * GRID).sum())
    check(size**2, (weight * GRID**2).sum())
    assert error < 0.4


@pytest.mark.parametrize("kernel", [NUTS, HMC])
def test_kernels_of_pyro(kernel):
    chains = run(attended, 20, kernel, 10)
    chains.summary()
    assert {"acceptance rate", "divergences"} < set(chains.diagnostics())


def ends(kind, data, sizes=(3.0, 0.2)):
    """Conditionals at two concentrations and attentions, in one order."""
    order = torch.tensor([2, 0, 3, 1])
    return [kind(SQUARE, size * PROBS, size * LOOKS, data, order=order) for size in sizes]


@pytest.mark.parametrize("latent", [False, True])
def test_weights_of_annealing(latent):
    """Their mean is a ratio of likelihoods; and the way back is the same from the other end."""
    evidence = torch.stack([-X, X], -1)
    start, end = ends(*((EvidenceConditional, evidence) if latent else (OrderedConditional, Y)))
    labels = np.array([[label >> node & 1 for node in range(4)] for label in range(16)])
    seen, logs = evidence.numpy()[np.arange(4), labels].sum(1), []
    for size in (3.0, 0.2):
        found = oracle.of_hood(SQUARE, size * PROBS, size * LOOKS)
        log = found.log_prob[[found.index(row) for row in labels]]
        logs.append(logsumexp(log + seen) if latent else found.log_prob[found.index(Y)])
    flows = []
    for here, there, ratio in ((start, end, logs[1] - logs[0]), (end, start, logs[0] - logs[1])):
        draws = here.sweep(here.sample((60_000,)), 10)
        first = [q.log_terms(draws).sum(-1) + q.log_prob(draws) for q in (here, there)]
        moved, gain, rise = here.anneal(draws, there, 2)
        last = there.log_terms(moved).sum(-1) + there.log_prob(moved)
        torch.testing.assert_close(rise, last - first[1])
        log_weight = gain + first[1] - first[0] - ratio
        weight = log_weight.exp()
        error = weight.std() / len(weight) ** 0.5
        assert abs(weight.mean() - 1) < 4.5 * error < 0.2
        # How often a node that chooses itself has another that does after an accepted move.
        choices = [states[:, 0] if latent else states for states in (draws, moved)]
        own = [(c == torch.arange(4)).double() for c in choices]
        accepted = log_weight.clamp(max=0).exp()
        flows.append(torch.einsum("bi, bj, b -> bij", *own, accepted))
    there, back = flows[0], flows[1].mT
    error = (there.var(0) / len(there) + back.var(0) / len(back)).sqrt()
    assert ((there.mean(0) - back.mean(0)) / error).square().sum() < 60


def test_fields_that_move_together():
    gibbs = FieldGibbs(two_fields, RandomWalkKernel)
    gibbs.setup(0)
    assert [len(names) for names in gibbs._groups] == [1, 1]
    gibbs = FieldGibbs(two_observed, RandomWalkKernel)
    gibbs.setup(0)
    assert [len(names) for names in gibbs._groups] == [2]


def test_proposals():
    """They keep a normal distribution of three parameters, whatever a warm-up has met."""
    root, mean = torch.tensor([[2.0, 0.0, 0.0], [1.0, 0.5, 0.0], [0.3, -0.2, 1.0]]), torch.ones(3)
    target = dist.MultivariateNormal(mean, scale_tril=root)
    params, proposals, kept = {"a": torch.zeros(2), "b": torch.zeros(())}, Proposals(400), []

    def log_prob(params):
        return target.log_prob(torch.cat([params["a"], params["b"][None]]))

    for step in range(4400):
        new, log_ratio = proposals.propose(params)
        if proposals.decide(params, log_ratio + log_prob(new) - log_prob(params)):
            params = new
        kept += [torch.cat([params["a"], params["b"][None]])] if step >= 400 else []
    draws = torch.stack(kept)
    for part, exact, square in zip(draws.T, mean, (root @ root.T).diagonal(), strict=True):
        assert check(part, exact) < 0.1 * square.sqrt()
        check((part - exact).square(), square)
    assert not proposals.decide(params, torch.tensor(torch.nan))


def thinned():
    size = kappa()
    with pyro.plate("motions", len(MOTIONS), subsample_size=2) as index:
        nmm(SQUARE, size * PROBS, LOOKS, MOTIONS[index], collapsed=True)


def copied():
    with pyro.plate("num_particles_vectorized", 4, dim=-1):
        nmm(SQUARE, kappa()[..., None, None] * PROBS, LOOKS, MOTIONS[0], collapsed=True)


def gated():
    pyro.sample("gate", dist.Poisson(2.0))
    field(MOTIONS[0])


REFUSED = {
    "subsamples": thinned,
    "one copy": copied,
    "'gate' is discrete and its values cannot be enumerated": gated,
    "has no nmm": kappa,
    "poutine.scale": poutine.scale(lambda: field(MOTIONS[0]), scale=2.0),
    "or poutine.mask": poutine.mask(lambda: field(MOTIONS[0]), mask=False),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refused_programs(message):
    with pytest.raises(ValueError, match=message):
        run(REFUSED[message], 1)
