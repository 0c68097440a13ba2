# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Emissions of two labels, and what is observed of five nodes."""

import math

import pyro
import torch
from graphs import shared_sources

from pyro_nmm.models import Annotators, FieldPrior, NormalEmission
from pyro_nmm.models.annotators.answers import Answers
from pyro_nmm.models.hidden.em import FieldChains, State
from pyro_nmm.ops.sweeps import sweeps

ANSWERS = torch.tensor([[0, 0, 1], [1, 0, -1], [-1, -1, -1], [1, 1, 1], [0, 1, 1]])
FEATURES = torch.tensor(
    [[0.0, 1.0], [2.0, math.nan], [math.nan, math.nan], [3.0, -1.0], [0.5, 0.0]],
    dtype=torch.double,
)
EMISSIONS = {
    "answers": (Annotators(2), ANSWERS),
    "clusterings": (Annotators(2, aligned=False), ANSWERS),
    "more answers": (Annotators(2, num_answers=3), ANSWERS),
    "types": (Annotators(2, num_types=3), ANSWERS),
    "features": (NormalEmission(2), FEATURES),
}


def field_prior(kappa=0.7):
    """Of two labels, at a concentration that is no start of a fit."""
    prior = FieldPrior(2)
    prior.log_kappa.data.fill_(math.log(kappa))
    return prior


def emission_case(name, graph=shared_sources):
    """Emission, graph, data, and parameters that are no optimum."""
    emission, data = EMISSIONS[name]
    hood = graph()
    data = emission.check(hood, data)
    if isinstance(data, Answers):
        data = data.table()
    pyro.set_rng_seed(1)
    probs = torch.rand(hood.num_nodes, 2).softmax(-1)
    values = emission.maximise(data, probs, emission.start(data, hood))
    return emission, hood, data, values


def sampled(emission, hood, data, prior, values, *, num_chains=4, num_draws=50, num_sweeps=20):
    """A field of a known prior: its labels and the emission's parameters, drawn in turn."""
    chains = FieldChains(emission, hood, emission.check(hood, data), None, num_chains)
    terms = chains.terms(prior, values)
    draw = sweeps(hood, terms, chains.first(terms), num_sweeps).draw
    return chains.sample(State(prior, values, draw, 0.0), num_draws)
