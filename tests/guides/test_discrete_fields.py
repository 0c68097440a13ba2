# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Discrete sites beside fields in MCMC, beside all labels and values enumerated."""

from itertools import product

import pyro
import pyro.distributions as dist
import pytest
import torch
from oracle import of_hood
from pyro.infer import MCMC
from pyro.infer.mcmc import RandomWalkKernel

from pyro_nmm import Neighborhood
from pyro_nmm.guides import FieldGibbs
from pyro_nmm.models import nmm
from pyro_nmm.ops.diagnostics import effective_size

HOOD = Neighborhood(torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]]), 3)
ALPHA = torch.tensor([[0.4, 0.8], [0.9, 0.3], [0.3, 0.3]]).double()
LOGITS = torch.linspace(-1.0, 1.0, HOOD.num_edges).double()
Y, X = torch.tensor([[0, 0, 1], [1, 1, 1]]), torch.tensor([0.9, -0.8, 0.3]).double()
CHANCES = torch.tensor([0.3, 0.6]).double()
LABELS = torch.tensor(list(product(range(2), repeat=3)))


def log_probs(alpha, logits=LOGITS):
    """Log p(y) of all labellings."""
    found = of_hood(HOOD, alpha, logits)
    return torch.as_tensor(found.log_prob[[found.index(y) for y in LABELS]])


def log_prob(y, alpha):
    return log_probs(alpha)[LABELS.tolist().index(y.tolist())]


def in_a_plate(**options):
    """Each labelling has a parent of its own."""
    with pyro.plate("labellings", 2):
        d = pyro.sample("d", dist.Bernoulli(CHANCES))
        nmm(HOOD, (0.1 + 8 * d)[:, None, None] * ALPHA, LOGITS, Y, **options)


def exact_in_a_plate():
    pairs = [torch.stack([log_prob(y, size * ALPHA) for size in (0.1, 8.1)]) for y in Y]
    prior = torch.stack([1 - CHANCES, CHANCES], -1).log()
    return {"d": (torch.stack(pairs) + prior).softmax(-1)[:, 1]}


CASES = {
    "in a plate": (lambda: in_a_plate(collapsed=True), exact_in_a_plate, 2),
    "in a plate, dice": (in_a_plate, exact_in_a_plate, 2),
}


def draws_of(model, num_moves, number, names, **options):
    gibbs = FieldGibbs(model, RandomWalkKernel, num_sweeps=2, num_moves=num_moves)
    mcmc = MCMC(gibbs, number, 10, disable_progbar=True, save_params=names, **options)
    mcmc.run()
    return mcmc


@pytest.mark.parametrize("name", CASES)
def test_posterior(name):
    model, truth, num_moves = CASES[name]
    pyro.set_rng_seed(5)
    exact = truth()
    draws = draws_of(model, num_moves, 150, [*exact]).get_samples()
    for key, value in exact.items():
        for found, mean in zip(draws[key].double().T, value, strict=True):
            error = found.std() / effective_size(found[None]) ** 0.5
            assert (found.mean() - mean).abs() < 4.5 * error
            assert error < 0.25
