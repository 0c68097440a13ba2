# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""``nmm(..., choices="summed")``, the paper's equation (2), against brute force."""

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from cases import HOUSE_LABELS, house_and_parameters, matrices
from graphs import star
from oracle import label_probs, of_hood
from pyro import poutine
from pyro.infer import SVI, Trace_ELBO, TraceGraph_ELBO
from pyro.infer.autoguide import AutoNormal
from pyro.infer.inspect import get_dependencies
from pyro.optim import Adam

from pyro_nmm.models import nmm

MASK = torch.tensor([True, True, False, True, False])


def given_z(program, z, *args, **options):
    """The program's sites, given ``z``."""
    conditioned = poutine.condition(program, data={"z": z})
    trace = poutine.trace(conditioned).get_trace(*args, choices="summed", **options)
    trace.compute_log_prob()
    return trace.nodes


@pytest.mark.parametrize("kind", ["labels", "matrices"])
@pytest.mark.parametrize("observed", [None, MASK])
def test_density_given_z(kind, observed):
    hood, alpha, logits = house_and_parameters()
    relabel = matrices(hood, 2) if kind == "matrices" else None
    z = dist.Dirichlet(alpha).sample()
    found = given_z(nmm, z, hood, alpha, logits, HOUSE_LABELS, observed, relabel=relabel)
    total = 0.0
    for i in range(5):
        edges = range(hood.ptr[i], hood.ptr[i + 1])
        weights = logits[list(edges)].softmax(0)
        prob = 0.0
        for weight, e in zip(weights, edges, strict=True):
            shown = torch.eye(2) if relabel is None else relabel[e]
            prob += weight * z[hood.source[e]] @ shown[:, HOUSE_LABELS[i]]
        total += prob.log() if observed is None or observed[i] else 0.0
    torch.testing.assert_close(found["y"]["log_prob_sum"], total)


def test_mean_over_z_is_the_probability():
    """With vectorised particles, for a plate of labellings and one of them."""
    hood, alpha, logits = house_and_parameters()
    y = torch.stack([HOUSE_LABELS, 1 - HOUSE_LABELS, 0 * HOUSE_LABELS])
    oracle = of_hood(hood, alpha, logits)

    def program():
        with pyro.plate("num_particles_vectorized", 20_000, dim=-2), pyro.plate("fields", 3):
            nmm(hood, alpha, logits, y, choices="summed")

    trace = poutine.trace(program).get_trace()
    trace.compute_log_prob()
    assert trace.nodes["z"]["value"].shape == (20_000, 3, 5, 2)
    probs = trace.nodes["y"]["log_prob"].exp()  # (20,000, 3)
    exact = np.exp([oracle.log_prob[oracle.index(labels)] for labels in y.tolist()])
    errors = probs.std(0) / len(probs) ** 0.5
    assert ((probs.mean(0) - torch.as_tensor(exact)).abs() < 4.5 * errors).all()
    assert (errors < 0.1 * torch.as_tensor(exact)).all()


def kappa_program(hood, alpha, logits, observed=None):
    """A prior of the concentration's scale."""
    kappa = pyro.sample("kappa", dist.LogNormal(0.0, 1.0))
    return nmm(
        hood, kappa[..., None, None] * alpha, logits, HOUSE_LABELS, observed, choices="summed"
    )


def posterior_of_kappa(hood, alpha, logits):
    """Mean and standard deviation of log kappa, enumerated."""
    grid = np.linspace(-5, 5, 81)
    scaled = (of_hood(hood, float(np.exp(s)) * alpha, logits) for s in grid)
    log_probs = np.array([one.log_prob[one.index(HOUSE_LABELS.tolist())] for one in scaled])
    weights = np.exp(log_probs - grid**2 / 2)
    weights /= weights.sum()
    mean = weights @ grid
    return mean, (weights @ (grid - mean) ** 2) ** 0.5


def test_posterior_of_a_parent():
    """Draws of the prior, weighed by the density of the labels given ``z``."""
    hood, alpha, logits = house_and_parameters()
    alpha = 0.3 * alpha

    def program():
        with pyro.plate("num_particles_vectorized", 40_000):
            kappa_program(hood, alpha, logits)

    trace = poutine.trace(program).get_trace()
    trace.compute_log_prob()
    weights = trace.nodes["y"]["log_prob"].softmax(0)
    values = trace.nodes["kappa"]["value"].log()
    mean, deviation = posterior_of_kappa(hood, alpha, logits)
    size = 1 / weights.square().sum()
    assert size > 1000
    assert abs(weights @ values - mean) < 4.5 * deviation / size**0.5
    assert abs(mean) > 8 * deviation / size**0.5  # unlike the prior's


def test_provenance():
    hood, alpha, logits = house_and_parameters()
    found = get_dependencies(kappa_program, (hood, alpha, logits))["prior_dependencies"]
    assert set(found["y"]) == {"y", "z"}
    assert set(found["z"]) == {"z", "kappa"}


@pytest.mark.parametrize("loss", [Trace_ELBO, TraceGraph_ELBO])
def test_autoguide(loss):
    """No discrete site is left: a guide of Pyro's needs no help."""
    hood, alpha, logits = house_and_parameters()
    guide = AutoNormal(kappa_program)
    elbo = loss(4, vectorize_particles=True, max_plate_nesting=0)
    svi = SVI(kappa_program, guide, Adam({"lr": 0.05}), elbo)
    losses = [svi.step(hood, alpha, logits, MASK) for _ in range(30)]
    assert np.isfinite(losses).all()
    assert np.mean(losses[-10:]) < np.mean(losses[:5])


def test_single_precision_with_a_hub():
    """Sums of thousands of neighbours are probabilities to all checks."""
    hood = star(20_000)
    alpha, logits = torch.rand(20_001, 3).float() + 0.01, torch.randn(hood.num_edges).float()
    y = nmm(hood, alpha, logits, choices="summed")
    assert y.shape == (20_001,)


def test_labels_are_drawn():
    """From all labels' own distribution."""
    hood, alpha, logits = house_and_parameters()
    with pyro.plate("draws", 4000):
        y = nmm(hood, alpha, logits, choices="summed")
    labels, probs = label_probs(hood, alpha, logits)
    share = y.double().mean(0)
    assert ((share - torch.as_tensor(probs @ labels)).abs() < 4.5 * 0.5 / 4000**0.5).all()
