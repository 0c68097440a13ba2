# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""What edges that flip labels can express, fitted; and networks that give them."""

from functools import partial

import networkx as nx
import pyro
import pytest
import torch
from graphs import labellings, to_hood
from pyro.distributions import Categorical
from pyro.infer import SVI, TraceGraph_ELBO
from pyro.optim import Adam

from pyro_nmm import NeighborMixture, models
from pyro_nmm.guides import AmortizedNMM, FieldGuide, MixtureGuide, density
from pyro_nmm.models import FreeNMM


def fitted(hood, log_target, kind, seed, steps):
    """The KL divergence from a distribution over all labellings that maximum likelihood leaves."""
    torch.manual_seed(seed)
    own = hood.source == hood.target
    alpha = torch.randn(hood.num_nodes, 2).requires_grad_()
    logits = torch.randn(hood.num_edges).requires_grad_()
    weight = torch.where(own, 0.6, -0.6).requires_grad_()
    optimizer = torch.optim.Adam([alpha, logits, weight], lr=0.2)
    for _ in range(steps):
        relabel, scores = None, logits
        if kind == "independent":
            scores = logits + 100 * own
        if kind == "flips":  # keeping and flipping compete on every edge
            keep = weight.sigmoid().view(-1, 1, 1)
            relabel = keep * torch.eye(2) + (1 - keep) * torch.eye(2).flip(0)
        mix = NeighborMixture(hood, alpha.exp() + 1e-3, scores, relabel, validate_args=False)
        log_prob = mix.log_prob(labellings(hood.num_nodes))
        loss = (log_target.exp() * (log_target - log_prob)).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def ising(graph, coupling):
    spins = 2.0 * labellings(len(graph)) - 1
    return sum(coupling * spins[:, a] * spins[:, b] for a, b in graph.edges).log_softmax(0)


@pytest.mark.slow
def test_repelling_labels_need_edges_that_flip():
    """
    An Ising path and a frustrated triangle: independent labels, plain edges, and flips. The
    divergence of flips, from the best of some starts, is a third of that of plain edges.
    """
    path, triangle = nx.path_graph(4), nx.cycle_graph(3)
    of = partial(fitted, to_hood(path), ising(path, -1.0))
    assert min(of("flips", seed, 200) for seed in (1, 2)) < 0.2
    assert 0.62 < of("plain", 1, 100) < 0.63
    assert of("independent", 1, 100) > 0.98
    of = partial(fitted, to_hood(triangle), ising(triangle, -0.5))
    assert min(of("flips", seed, 100) for seed in range(3)) < 1e-3
    assert of("plain", 1, 100) > 0.157 > of("independent", 1, 100) - 1e-3


@pytest.mark.slow
def test_family_with_flips():
    """
    As a black-box guide of two spins that repel: the bound becomes the partition function, within
    .02 nats; without flips it is .68 below.
    """
    hood = to_hood(nx.path_graph(2))
    own = (hood.source == hood.target)[:, None]
    flips = torch.where(own, torch.tensor([0, 1]), torch.tensor([1, 0]))

    def repel(y):
        return -2.0 * (2.0 * y[..., 0] - 1) * (2.0 * y[..., 1] - 1)

    log_z, gaps = repel(labellings(2)).logsumexp(0).item(), {}
    for name, relabel in {"plain": None, "flips": flips}.items():
        pyro.set_rng_seed(0)
        pyro.clear_param_store()
        make = partial(NeighborMixture, relabel=relabel)
        family = MixtureGuide(hood, FreeNMM(hood, 2, kappa=0.5), density(repel, 2, 2), family=make)
        elbo = TraceGraph_ELBO(100, vectorize_particles=True, max_plate_nesting=0)
        svi = SVI(family.model, family.guide, Adam({"lr": 0.2}), elbo)
        losses = [svi.step() for _ in range(60)]
        gaps[name] = sum(losses[-10:]) / 10 + log_z
    assert gaps["flips"] < 0.1 < 0.5 < gaps["plain"]


def test_network_that_relabels():
    """A third output of a network goes through model, guide and queries."""
    hood = to_hood(nx.path_graph(3))

    class Network(FreeNMM):
        def forward(self, hood):
            return *super().forward(hood), torch.eye(2).flip(0).expand(hood.num_edges, 2, 2)

    program = AmortizedNMM(hood, Network(hood, 2))
    y = torch.tensor([0, 1, 0])
    elbo = TraceGraph_ELBO(4, vectorize_particles=True, max_plate_nesting=0)
    assert elbo.loss_and_grads(program.model, program.guide, y=y) > 0
    assert program.mixture().relabel.shape == (7, 2, 2)


def test_families_with_a_network_that_relabels():
    """Permutations are a third output for a guide of sampled labels; a field's guide refuses."""
    hood = to_hood(nx.path_graph(2))
    flips = torch.tensor([[1, 0]]).expand(hood.num_edges, 2)

    class Network(FreeNMM):
        def forward(self, hood):
            return *super().forward(hood), flips

    def target():
        return pyro.sample("y", Categorical(torch.tensor([0.1, 0.9])).expand([2]).to_event(1))

    family = MixtureGuide(hood, Network(hood, 2), target)
    elbo = TraceGraph_ELBO(16, vectorize_particles=True, max_plate_nesting=0)
    svi = SVI(family.model, family.guide, Adam({"lr": 0.1}), elbo)
    for _ in range(40):
        svi.step()
    mixture = family.mixture()
    assert mixture.relabel.equal(flips)
    assert (mixture.marginals()[:, 1] > 0.7).all()
    assert (mixture.alpha.argmax(-1) == 0).all()  # which every edge turns round
    target = models.ising(torch.tensor([[0], [1]]), 0.1, torch.zeros(2))
    family = FieldGuide(hood, Network(hood, 2), target, name="field")
    with pytest.raises(ValueError, match="edges that keep labels"):
        family.guide()
