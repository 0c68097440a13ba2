# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The kernel on graphs of three nodes, beside posteriors on a grid: quick, and each part counts."""

import math
from functools import cache

import pyro
import pyro.distributions as dist
import pytest
import torch
from oracle import of_hood
from pyro import poutine
from pyro.infer import HMC, MCMC, NUTS
from pyro.infer.mcmc import RandomWalkKernel

from pyro_nmm import Neighborhood, NeighborMixture
from pyro_nmm.guides import FieldGibbs
from pyro_nmm.models import nmm, node_plate
from pyro_nmm.ops.diagnostics import effective_size

HOOD = Neighborhood(torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]]), 3)
ALPHA = torch.tensor([[0.4, 0.8], [0.9, 0.3], [0.3, 0.3]]).double()
OWN = (HOOD.source == HOOD.target).double()
Y, X = torch.tensor([[0, 0, 1], [1, 1, 1]]), torch.tensor([0.2, 2.6, -0.4]).double()
GRID = torch.linspace(-5.0, 5.0, 41).double()
INDEX, LONG = torch.tensor([2, 0, 2, 2, 0]), torch.tensor([0.9, -0.2, 1.4, 0.3, 0.8]).double()


@cache
def oracle(log_kappa, own=0.0):
    return of_hood(HOOD, ALPHA * math.exp(log_kappa), own * OWN)


def log_prob(y, log_kappa, own=0.0):
    found = oracle(float(log_kappa), own)
    return float(found.log_prob[found.index(y)])


def log_sum(evidence, log_kappa):
    """log p(x) of latent labels."""
    found = oracle(float(log_kappa))
    labels = torch.tensor(found.labels)
    terms = torch.tensor(found.log_prob).flatten() + evidence[torch.arange(3), labels].sum(-1)
    return float(terms.logsumexp(0))


def kappa_of():
    return pyro.sample("kappa", dist.LogNormal(torch.zeros(()).double(), 1.0))


def parent():
    """A discrete parent of the logits, and one of the concentration."""
    kappa = kappa_of()
    own = pyro.sample("own", dist.Categorical(torch.tensor([0.5, 0.2, 0.3]).double()))
    more = pyro.sample("more", dist.Bernoulli(torch.tensor(0.4).double()))
    with pyro.plate("labellings", 2):
        alpha = kappa * (0.5 + 2 * more) * ALPHA
        nmm(HOOD, alpha, (own - 1.0) * 2.0 * OWN, Y, collapsed=True)


def exact_parent():
    table = torch.zeros(3, 2, len(GRID)).double()
    for own, more, at in ((a, b, c) for a in range(3) for b in range(2) for c in range(len(GRID))):
        shift = math.log(0.5 + 2 * more)
        for y in Y:
            table[own, more, at] += log_prob(y, GRID[at] + shift, (own - 1.0) * 2.0)
    table += torch.tensor([0.5, 0.2, 0.3]).double().log()[:, None, None]
    table += torch.tensor([0.6, 0.4]).double().log()[:, None] - GRID**2 / 2
    probs = table.flatten().softmax(0).view_as(table)
    kept = {"own is 2": probs[2].sum(), "more": probs[:, 1].sum()}
    return kept | {"kappa": (probs.sum((0, 1)) * GRID).sum()}


def outliers():
    """A node's measurement may be an outlier, which nothing sums out."""
    kappa = kappa_of()
    y = nmm(HOOD, kappa * ALPHA, 0.0 * OWN, collapsed=True)
    with node_plate(HOOD, y) as (_, y):
        m = pyro.sample("m", dist.Bernoulli(torch.tensor(0.3).double()))
        pyro.sample("x", dist.Normal(1.5 * y + 2.0 * m, 1.0), obs=X)


def exact_outliers():
    of_labels = dist.Normal(1.5 * torch.arange(2)[:, None] + 2.0 * torch.arange(2), 1.0)
    terms = of_labels.log_prob(X[:, None, None]) + torch.tensor([0.7, 0.3]).double().log()
    log = torch.tensor([log_sum(terms.logsumexp(-1), k) for k in GRID]) - GRID**2 / 2
    probs, with_outlier = log.softmax(0), torch.zeros(len(GRID)).double()
    for at, k in enumerate(GRID):
        table = terms.logsumexp(-1)
        table = torch.cat([terms[:1, :, 1], table[1:]])  # node 0 has one
        with_outlier[at] = math.exp(log_sum(table, k) + float(-(k**2)) / 2 - float(log[at]))
    return {"kappa": (probs * GRID).sum(), "m 0": (probs * with_outlier).sum()}


def one_parameter():
    nmm(HOOD, kappa_of() * ALPHA, 0.0 * OWN, Y[0], collapsed=True)


def exact_one():
    log = torch.tensor([log_prob(Y[0], k) for k in GRID]) - GRID**2 / 2
    probs = log.softmax(0)
    mean = (probs * GRID).sum()
    return {"kappa": mean, "square": (probs * (GRID - mean) ** 2).sum()}


def long_format():
    y = nmm(HOOD, kappa_of() * ALPHA, 0.0 * OWN, collapsed=True)
    with node_plate(HOOD, y, index=INDEX) as (rows, y):
        pyro.sample("x", dist.Normal(1.5 * y, 1.0), obs=LONG[rows])


def exact_long():
    terms = dist.Normal(1.5 * torch.arange(2), 1.0).log_prob(LONG[:, None])
    evidence = torch.zeros(3, 2).double().index_add(0, INDEX, terms)
    log = torch.tensor([log_sum(evidence, k) for k in GRID]) - GRID**2 / 2
    return {"kappa": (log.softmax(0) * GRID).sum()}


CASES = {
    "discrete parents": (parent, exact_parent, {"num_moves": 3}, 250),
    "discrete parents, no joint moves": (parent, exact_parent, {"num_moves": 0}, 700),
    "outliers": (outliers, exact_outliers, {"num_moves": 2}, 150),
    "joint moves": (one_parameter, exact_one, {"num_moves": 4}, 350),
    "long format": (long_format, exact_long, {"num_moves": 2}, 200),
    "hmc": (one_parameter, exact_one, {"num_moves": 0, "kernel": HMC, "num_steps": 4}, 500),
}


def draws_of(model, number, warmup=100, **options):
    kernel = FieldGibbs(model, options.pop("kernel", RandomWalkKernel), num_sweeps=2, **options)
    names = set(poutine.trace(model).get_trace().stochastic_nodes) & {"kappa", "own", "more", "m"}
    kernel.save_params = sorted(names)
    mcmc = MCMC(kernel, number, warmup, disable_progbar=True)
    mcmc.run()
    return mcmc


@pytest.mark.parametrize("name", CASES)
def test_posterior(name):
    model, truth, options, number = CASES[name]
    pyro.set_rng_seed(1)
    draws, truth = draws_of(model, number, **options).get_samples(), truth()
    log_kappa = draws["kappa"].log()
    found = {"kappa": log_kappa, "square": (log_kappa - truth["kappa"]) ** 2}
    if "own" in draws:
        assert draws["own"].dtype == draws["more"].long().dtype == torch.long
        found |= {"own is 2": (draws["own"] == 2).double(), "more": draws["more"].double()}
    if "m" in draws:
        found["m 0"] = draws["m"][:, 0].double()
    for key, value in truth.items():
        error = found[key].std() / effective_size(found[key][None]) ** 0.5
        assert (found[key].mean() - value).abs() < 4.5 * error, key
        assert error < 0.3, key


@cache
def labellings():
    """Labellings of a field with ``kappa = 1``, the posterior mean of log kappa, its variance, and
    the standard deviation of squares about the mean."""
    y = NeighborMixture(HOOD, ALPHA, 0.0 * OWN).sample((200,))
    rows, counts = y.unique(dim=0, return_counts=True)
    log = (
        torch.tensor([[log_prob(row, k) for row in rows] for k in GRID]).double() @ counts.double()
    )
    probs = (log - GRID**2 / 2).softmax(0)
    mean = (probs * GRID).sum()
    squares = (GRID - mean) ** 2
    variance = (probs * squares).sum()
    return y, mean, variance, (probs * (squares - variance) ** 2).sum().sqrt()


def many():
    kappa = kappa_of()
    with pyro.plate("labellings", 200):
        nmm(HOOD, kappa * ALPHA, 0.0 * OWN, labellings()[0], collapsed=True)


def test_joint_moves_of_many_labellings():
    # Many labellings make the posterior narrower than a proposal. Without the gain of annealing
    # few proposals are accepted; without its rise too many after the first of a step.
    _, mean, variance, deviation = labellings()
    mcmc = MCMC(FieldGibbs(many, RandomWalkKernel, 10, 4), 100, 40, disable_progbar=True)
    mcmc.run()
    log_kappa = mcmc.get_samples()["kappa"].log()
    size = effective_size(log_kappa[None])
    assert size > 40
    assert (log_kappa.mean() - mean).abs() < 4.5 * (variance / size).sqrt()
    error = deviation / effective_size((log_kappa[None] - mean) ** 2).sqrt()
    assert (((log_kappa - mean) ** 2).mean() - variance).abs() < 4.5 * error


def test_energies_are_of_the_new_choices():
    # At the energy of the choices before, one step in forty is accepted.
    options = {"step_size": 0.1, "num_steps": 3, "adapt_step_size": False}
    mcmc = MCMC(FieldGibbs(many, HMC, 1, 0, **options), 40, 5, disable_progbar=True)
    mcmc.run()
    assert mcmc.diagnostics()["acceptance rate"]["chain 0"] > 0.9


def blocked(kind):
    def model():
        m = pyro.sample("m", kind)
        nmm(HOOD, kappa_of() * (0.5 + m) * ALPHA, 0.0 * OWN, Y[0], collapsed=True)

    return poutine.block(model, hide=["m"])


def with_nan():
    pyro.sample("x", dist.Normal(kappa_of(), 1.0), obs=torch.tensor(math.nan).double())
    nmm(HOOD, ALPHA, 0.0 * OWN, Y[0], collapsed=True)


@pytest.mark.parametrize(
    ("run", "match"),
    [
        (lambda: FieldGibbs(one_parameter, NUTS(one_parameter)), r"FieldGibbs\(model, NUTS\)"),
        (lambda: FieldGibbs(NUTS(one_parameter)), r"FieldGibbs\(model, NUTS\)"),
        (lambda: draws_of(blocked(dist.Bernoulli(0.5)), 2, 2), r"hides random sites \['m'\]"),
        (lambda: draws_of(blocked(dist.LogNormal(0.0, 1.0)), 2, 2), r"hides random sites \['m'\]"),
        (lambda: draws_of(with_nan, 2, 2), "site 'x' has NaN in its data"),
        (lambda: MCMC(FieldGibbs(one_parameter), 2, 2, initial_params={
            "kappa": torch.tensor(0.1), "c": torch.arange(3)}, disable_progbar=True).run(),
         "initial_params must have unconstrained values of all continuous sites and no others"),
    ],
)  # fmt: skip
def test_refusals(run, match):
    with pyro.validation_enabled(False), pytest.raises(ValueError, match=match):
        run()


def test_diagnostics_and_inference_mode():
    mcmc = draws_of(one_parameter, 4, 2)
    assert "divergences" in mcmc.diagnostics()
    with torch.inference_mode():
        draws = draws_of(one_parameter, 4, 2, kernel=NUTS).get_samples()
    assert draws["kappa"].shape == (4,)
