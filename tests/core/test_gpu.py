# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Distributions on a device: exactness, draws and gradients against the CPU."""

from functools import partial

import networkx as nx
import pyro
import pytest
import torch
from cases import random_case
from graphs import connected_graphs, parameters, random_sources, shared_sources, to_hood
from oracle import of_hood
from pyro.distributions import Normal
from pyro.infer import TraceGraph_ELBO

from pyro_nmm import (
    EvidenceConditional,
    NeighborMixture,
    OrderedConditional,
    sources,
)
from pyro_nmm.guides import (
    evidence_guide,
    ordered_guide,
)
from pyro_nmm.models import (
    nmm,
)
from pyro_nmm.ops.entries import evidence_entries
from pyro_nmm.ops.gibbs import sweep
from pyro_nmm.ops.sampling import draw_entries


@pytest.mark.parametrize("graph", list(connected_graphs(4)))
def test_exactness(device, graph):
    hood = to_hood(graph)
    alpha, logits = parameters(hood, 2)
    oracle = of_hood(hood, alpha, logits)
    mix = NeighborMixture(hood.to(device), alpha.to(device), logits.to(device))
    labels = torch.from_numpy(oracle.labels).to(device)
    close = partial(torch.testing.assert_close, rtol=0, atol=1e-10)
    close(mix.log_prob(labels).cpu(), torch.from_numpy(oracle.log_prob))
    cpu = NeighborMixture(hood, alpha, logits)
    close(mix.marginals().cpu(), cpu.marginals())
    pairs = torch.combinations(torch.arange(hood.num_nodes), with_replacement=True).T
    close(mix.pairwise(pairs.to(device)).cpu(), cpu.pairwise(pairs))
    y, observed = cpu.sample(), torch.arange(hood.num_nodes) < 1
    here, there = cpu.condition(y, observed), mix.condition(y.to(device), observed.to(device))
    close(there.marginals().cpu(), here.marginals())
    for method in ("marginal", "joint", "sequential"):
        assert there.predict(method=method).device.type == device


@pytest.mark.parametrize("kind", ["random", "hubs", "grid"])
def test_same_uniforms_same_choices(device, kind):
    for seed in range(200 if device == "cuda" else 20):
        hood, alpha, logits, y, observed, order, shape, uniforms = random_case(seed, kind)
        here = OrderedConditional(hood, alpha, logits, y, observed, order)._draw(shape, uniforms)
        there = [t.to(device) for t in (alpha, logits, y, observed, order)]
        there = OrderedConditional(hood.to(device), *there)._draw(shape, uniforms.to(device))
        assert all(
            torch.equal(a, b.cpu())
            for a, b in zip((*here[:2], *here.counts), (*there[:2], *there.counts), strict=True)
        )


def latent_case(seed):
    """Nodes that share sources, or windows of a grid; evidence of nodes or of edges."""
    torch.manual_seed(seed)
    hood = random_sources(40, 9) if seed % 2 else sources.grid(6, 7, stride=2)
    alpha, logits = parameters(hood, 3)
    size = hood.num_edges if seed % 4 < 2 else hood.num_nodes
    evidence = torch.randn(size, 3)
    evidence[0] = torch.tensor([0.0, -torch.inf, 0.0])
    return hood, alpha, logits, evidence


def test_same_uniforms_same_latent_draws(device):
    """Sequential draws and Gibbs sweeps."""
    for seed in range(40 if device == "cuda" else 8):
        hood, alpha, logits, evidence = latent_case(seed)
        start, numbers = torch.rand(5, hood.num_rows), torch.rand(3, 5, hood.num_rows)
        found = {}
        for place in ("cpu", device):
            there = hood.to(place)
            log_attention = there.log_softmax(logits.to(place))
            tables = (t.to(place)[None] for t in (alpha, evidence))
            terms = evidence_entries(log_attention[None], *tables)
            draw = draw_entries(there, terms, start.to(place))
            swept = sweep(there, terms, draw, numbers.to(place))
            found[place] = [t.cpu() for t in (*draw[:2], *swept.draw[:2], *swept[1:])]
        assert all(map(torch.equal, *found.values()))


@pytest.mark.parametrize("estimator", ["reward_to_go", "one_step_credit", "no_score", "reinforce"])
def test_gradients_given_evidence(device, estimator):
    for seed in range(4):
        hood, *parts = latent_case(seed)
        order, value, grads = torch.randperm(hood.num_nodes), None, []
        for place in ("cpu", device):
            leaves = [t.detach().to(place).requires_grad_() for t in parts]
            arguments = {"order": order.to(place), "estimator": estimator}
            q = EvidenceConditional(hood.to(place), *leaves, **arguments)
            value = q.sample((4,)) if value is None else value
            found = q.score_parts(value.to(place))
            (found.entropy_term + found.log_prob).sum().backward()
            grads.append([leaf.grad.cpu() for leaf in leaves])
        torch.testing.assert_close(*grads)


def test_posteriors_given_evidence(device):
    """Exact sums, weighted draws and chains, of five nodes with three sources."""
    hood = shared_sources()
    alpha, logits = parameters(hood, 2)
    parts = alpha, logits, torch.randn(5, 2)
    truth = EvidenceConditional(hood, *parts).posterior().marginals()
    q = EvidenceConditional(hood.to(device), *(t.to(device) for t in parts))
    torch.testing.assert_close(q.posterior().marginals().cpu(), truth)
    ways = {"weighted": {"weighted": True}, "swept": {"num_sweeps": 20}}
    for name, way in ways.items():
        found = q.posterior(num_samples=20_000, **way)
        assert found.sample((3,)).device.type == device
        gap = (found.marginals().cpu() - truth).abs().max()
        assert gap < 0.02, name


@pytest.mark.parametrize("collapsed", [False, True])
def test_a_step_given_evidence(device, collapsed):
    hood = sources.grid(12, 12, stride=3, device=device)
    alpha, logits = (t.to(device).requires_grad_() for t in parameters(hood.to("cpu"), 3))
    means = torch.tensor([-1.0, 0.0, 1.0], device=device, requires_grad=True)
    w = torch.randn(144, device=device)

    def model():
        y = nmm(hood, alpha, logits, collapsed=collapsed)
        pyro.sample("w", Normal(means[y], 0.7).to_event(1), obs=w)

    def guide():
        evidence = Normal(means, 0.7).log_prob(w[:, None])
        evidence_guide(hood, alpha, logits, evidence, collapsed=collapsed)

    elbo = TraceGraph_ELBO(4, vectorize_particles=True, max_plate_nesting=0)
    assert torch.tensor(elbo.loss_and_grads(model, guide)).isfinite()
    for leaf in (alpha, logits, means):
        assert leaf.grad.isfinite().all()


def test_sources(device):
    """Constructors on the device give what those on the CPU give."""
    places, edges = torch.rand(50, 2), to_hood(nx.path_graph(50))
    edge_index = torch.stack([edges.source, edges.target])
    membership = torch.randint(6, (2, 50))
    found = {}
    for place in ("cpu", device):
        hoods = (
            sources.grid(9, 7, stride=2, radius=3, device=place),
            sources.points(places.to(place), radius=0.4, spacing=0.3)[0],
            sources.communities(edge_index.to(place), 50, membership.to(place)),
        )
        assert all(hood.device.type == place for hood in hoods)
        found[place] = [t.cpu() for hood in hoods for t in (hood.ptr, hood.source)]
    assert all(map(torch.equal, *found.values()))


@pytest.mark.parametrize("estimator", ["reward_to_go", "one_step_credit", "no_score", "reinforce"])
def test_gradients_of_given_choices(device, estimator):
    hood = to_hood(nx.barabasi_albert_graph(200, 3, seed=0))
    alpha, logits = parameters(hood, 3)
    y, order = torch.randint(3, (200,)), torch.randperm(200)
    c, grads = None, []
    for place in ("cpu", device):
        leaves = [t.detach().to(place).requires_grad_() for t in (alpha, logits)]
        q = OrderedConditional(
            hood.to(place), *leaves, y.to(place), order=order.to(place), estimator=estimator
        )
        c = q.sample((4,)) if c is None else c
        parts = q.score_parts(c.to(place))
        (parts.entropy_term + parts.log_prob).sum().backward()
        grads.append([leaf.grad.cpu() for leaf in leaves])
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("collapsed", [False, True])
def test_a_step(device, collapsed):
    hood = to_hood(nx.barabasi_albert_graph(200, 3, seed=0)).to(device)
    alpha, logits = (t.to(device).requires_grad_() for t in parameters(hood.to("cpu"), 3))
    y = torch.randint(3, (200,), device=device)
    elbo = TraceGraph_ELBO(4, vectorize_particles=True, max_plate_nesting=0)
    model, guide = (partial(f, collapsed=collapsed) for f in (nmm, ordered_guide))
    assert torch.tensor(elbo.loss_and_grads(model, guide, hood, alpha, logits, y)).isfinite()
    assert alpha.grad.isfinite().all()
    assert logits.grad.isfinite().all()


@pytest.mark.parametrize("kind", ["permutations", "matrices"])
def test_edges_that_relabel(device, kind):
    """Exact values as on the CPU, and draws, posteriors and estimates on the device."""
    hood = to_hood(nx.house_graph())
    alpha, logits = parameters(hood, 3)
    relabel = torch.rand(hood.num_edges, 3).argsort(-1)
    if kind == "matrices":
        relabel = torch.rand(hood.num_edges, 3, 3).softmax(-1)
    y, mask, pairs = torch.randint(3, (5,)), torch.arange(5) < 2, torch.tensor([[0, 3], [1, 4]])
    found = []
    for place in ("cpu", device):
        parts = (t.to(place) for t in (alpha, logits, relabel))
        mix = NeighborMixture(hood.to(place), *parts)
        posterior = mix.condition(y.to(place), mask.to(place))
        values = mix.log_prob(y.to(place)), mix.marginals(), mix.pairwise(pairs.to(place))
        found.append([*values, posterior.marginals(), posterior.pairwise(pairs.to(place))])
        assert mix.sample((3,)).device.type == posterior.sample((3,)).device.type == place
        assert mix.elbo(y.to(place)).isfinite().all()
        assert mix.log_likelihood(y.to(place), num_particles=8).isfinite()
    for here, there in zip(*found, strict=True):
        torch.testing.assert_close(there.cpu(), here)
