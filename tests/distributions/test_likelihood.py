# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Estimates of the likelihood by importance weights, against enumeration."""

import networkx as nx
import pytest
import torch
from cases import everything, sharing_house
from documents import ROOT
from graphs import house, parameters, to_hood
from torch.nn.functional import one_hot

from pyro_nmm import NeighborMixture
from pyro_nmm.ops.diagnostics import effective_size

ORDER = torch.tensor([4, 1, 0, 3, 2])
GIVEN = torch.tensor([True, False, True, False, False])
OBSERVED = torch.tensor([False, False, False, True, True])
#: Names of :func:`queries`.
QUERIES = "labels", "order", "given", "all others", "subset"
LATENT = "evidence", "evidence of edges", "evidence given"


def queries():
    """A function that estimates a likelihood with so many particles, and the exact value."""
    mix, y = sharing_house(share=0.2)

    def exact(mask):
        nodes = mask.nonzero()[:, 0]
        return mix.log_marginal(nodes, y[nodes])

    given, both = exact(GIVEN), exact(GIVEN | OBSERVED)
    whole = mix.log_prob(y)
    found = {
        "labels": (lambda size: mix.log_likelihood(y, num_particles=size), whole),
        "order": (lambda size: mix.log_likelihood(y, None, None, size, ORDER), whole),
        "given": (lambda size: mix.log_likelihood(y, OBSERVED, GIVEN, size), both - given),
        "all others": (lambda size: mix.log_likelihood(y, None, GIVEN, size), whole - given),
        "subset": (lambda size: mix.log_likelihood(y, GIVEN, num_particles=size), given),
    }
    hints = 3.0 * one_hot(y, 2)  # against what the nodes share
    of_edges = hints[mix.hood.row] + torch.linspace(-0.5, 0.5, 2 * mix.hood.num_edges).view(-1, 2)
    for name, evidence in (("evidence", hints), ("evidence of edges", of_edges)):
        q = mix.latents(evidence, torch.arange(5) != 2)
        value = everything(q.observed_rows, 2)
        total = (q.log_prob(value) + q.log_terms(value).sum(-1)).logsumexp(0)
        found[name] = q.log_likelihood, total
    certain = one_hot(y, 2).double().log()
    nodes = torch.cat([GIVEN.nonzero()[:, 0], OBSERVED.nonzero()[:, 0]])
    q = mix.latents(certain, GIVEN | OBSERVED, nodes)
    found["evidence given"] = lambda size: q.log_likelihood(size, num_given=2), both - given
    return found


@pytest.mark.parametrize("name", [*QUERIES, *LATENT])
def test_converges_to_the_exact_likelihood(kernels, name):
    estimate, exact = queries()[name]
    assert abs(estimate(20_000) - exact) < 0.03


@pytest.mark.parametrize("name", ["labels", "evidence", "evidence of edges"])
def test_few_particles_are_unbiased(name):
    """The mean of 400 estimates of p(y) by three particles, in standard errors."""
    estimate, exact = queries()[name]
    ratios = torch.stack([estimate(3) for _ in range(400)]).sub(exact).exp()
    error = ratios.std() / len(ratios) ** 0.5
    assert 0.008 < error < 0.025  # a test of something
    assert (ratios.mean() - 1).abs() < 5 * error, (ratios.mean(), error)


@pytest.mark.parametrize("kind", ["labels", "matrices", "evidence"])
def test_elements_of_a_batch(kind):
    hood = to_hood(nx.cycle_graph(4))
    alpha, logits = parameters(hood, 2, (2,), scale=0.5)
    relabel = torch.rand(hood.num_edges, 2, 2).softmax(-1) if kind == "matrices" else None
    mix = NeighborMixture(hood, alpha[:, None], logits[:, None], relabel)
    y = torch.tensor([[0, 1, 1, 0], [1, 1, 0, 0], [0, 0, 0, 0]])
    if kind == "evidence":
        found = mix.latents(one_hot(y, 2).double().log()).log_likelihood(num_particles=4000)
    else:
        found = mix.log_likelihood(y, num_particles=4000)
    assert found.shape == (2, 3)
    assert (found - mix.log_prob(y)).abs().max() < 0.05


@pytest.mark.slow
def test_pseudo_marginal_metropolis_hastings():
    """The chain of docs/pyro.md against an enumerated posterior."""
    text = (ROOT / "docs" / "pyro.md").read_text().partition("## Pseudo-marginal")[2]
    code = text.partition("```python")[2].partition("```")[0]
    hood = house()
    alpha, logits, truth = torch.ones(5, 2), torch.zeros(hood.num_edges), torch.zeros(5).long()
    found = globals() | {"hood": hood, "alpha": alpha, "logits": logits, "truth": truth}
    exec(code.replace("range(200)", "range(2000)"), found)
    draws = torch.stack(found["draws"])
    grid = torch.linspace(-5, 5, 81)
    mix = NeighborMixture(hood, grid.exp()[:, None, None] * alpha, logits)
    weights = (mix.log_prob(truth) - grid**2 / 2).softmax(0)
    mean = weights @ grid
    deviation = (weights @ (grid - mean) ** 2).sqrt()
    size = effective_size(draws[None])
    assert size > 150
    assert abs(draws.mean() - mean) < 4.5 * deviation / size**0.5
    assert abs(mean) > 3 * deviation / size**0.5  # unlike the prior's
