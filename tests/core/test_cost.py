# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Every query is linear in the edges that it needs: numbers written are counted, not seconds."""

import pytest
import torch
from cases import matrices
from cost import Work
from graphs import parameters

from pyro_nmm import EvidenceConditional, Neighborhood, NeighborMixture, blocks, compiled, sources

DRAWS, LABELS = 4, 3
PAIRS = torch.tensor([[49, 60, 70, 70], [52, 61, 70, 500]])


@pytest.fixture(autouse=True)
def tensor_code(monkeypatch):
    """No operation of PyTorch shows what compiled loops write."""
    monkeypatch.setattr(compiled, "DEVICES", set())


def ring(num_nodes, reach=3):
    """Every node and the next few: degrees do not depend on the size."""
    node = torch.arange(num_nodes)
    ends = torch.cat([torch.stack([node, (node + k) % num_nodes]) for k in range(1, reach + 1)], 1)
    return Neighborhood(torch.cat([ends, ends.flip(0)], 1), num_nodes)


def mixture(num_nodes, num_classes=5, relabel=None):
    torch.manual_seed(0)
    hood = ring(num_nodes)
    relabel = relabel and relabel(hood, num_classes)
    return NeighborMixture(hood, *parameters(hood, num_classes), relabel)


def labels(mix):
    return torch.zeros(mix.hood.num_nodes, dtype=torch.long)


def first(mix, number=50):
    return torch.arange(mix.hood.num_nodes) < number


def posterior(mix, num_samples=8):
    return mix.condition(labels(mix), first(mix), num_samples)


#: What is there before, a query, and the most numbers that it writes for every node more: masks and
#: labels of all nodes, but neither edges nor classes.
GROWTH = {
    "pairs": (lambda mix: mix, lambda mix: mix.pairwise(PAIRS), 6),
    "pairs of draws": (lambda mix: posterior(mix, 16), lambda post: post.pairwise(PAIRS), 6),
    "condition": (lambda mix: mix, posterior, 40),
    "more labels": (
        lambda mix: (posterior(mix), first(mix).roll(60)),
        lambda pair: pair[0].condition(torch.zeros_like(pair[0].labels), pair[1]),
        40,
    ),
    "a set of nodes": (
        posterior,
        lambda post: post.log_marginal(torch.tensor([52, 53]), torch.tensor([0, 1])),
        10,
    ),
    "draws of some nodes": (
        lambda mix: posterior(mix, 4), lambda post: post.sample((8,), torch.arange(40, 60)), 6
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", GROWTH)
def test_queries_do_not_see_other_edges(name):
    prepare, query, most = GROWTH[name]
    totals = []
    for num_nodes in (1000, 4000):
        mix = mixture(num_nodes)
        mix.attention  # noqa: B018 kept by the mixture
        argument = prepare(mix)
        with Work() as done:
            query(argument)
        totals.append(done.total)
    assert (totals[1] - totals[0]) / 3000 < most


def test_marginals_do_not_see_nodes_once_for_each_component():
    totals = []
    mix = mixture(4000)
    for num_samples in (4, 64):
        post = posterior(mix, num_samples)
        with Work() as done:
            post.marginals()
        totals.append(done.total)
        assert done.largest <= mix.hood.num_edges * 5
    assert totals[1] < 1.3 * totals[0]


def test_exact_posteriors_hold_no_table_of_all_nodes():
    """Two observed nodes have 49 joint choices."""
    mix = mixture(4000)
    with Work() as done:
        post = mix.condition(labels(mix), first(mix, 2))
        post.pairwise(PAIRS)
    assert len(post.components) == 49
    assert done.largest < 49 * 4000


def relabelled(num_nodes):
    """Every query, of a graph whose edges have matrices."""
    mix = mixture(num_nodes, LABELS, matrices)
    y, observed = mix.sample(), first(mix, num_nodes // 4)

    def query():
        mix.elbo(y)
        mix.marginals()
        mix.log_likelihood(y, num_particles=DRAWS)
        mix.condition(y, observed, DRAWS).marginals()

    return query, 2 * DRAWS * mix.hood.num_edges * LABELS**2


def estimate(num_nodes):
    """Of a likelihood given evidence."""
    mix = mixture(num_nodes, LABELS)
    q = mix.latents(torch.randn(num_nodes, LABELS))
    return lambda: q.log_likelihood(DRAWS), 2 * DRAWS * mix.hood.num_edges * LABELS


@pytest.mark.parametrize("make", [relabelled, estimate])
def test_four_times_the_nodes_are_four_times_the_work(make):
    totals = []
    for num_nodes in (250, 1000):
        query, largest = make(num_nodes)
        with Work() as done:
            query()
        totals.append(done.total)
        assert done.largest <= largest
    assert totals[1] / totals[0] < 6


def log_probs(q):
    value = q.sample((DRAWS,)).clone()  # no draw that q remembers
    return lambda: q.log_prob(value).sum().backward()


EVIDENCE = {
    "draw": lambda q: lambda: q.sample((DRAWS,)),
    "log_prob and gradient": log_probs,
    "weighted": lambda q: lambda: q.posterior(DRAWS, weighted=True).marginals(),
    "sweeps": lambda q: lambda: q.posterior(DRAWS, num_sweeps=4).marginals(),
}


@pytest.mark.parametrize("query", EVIDENCE)
@pytest.mark.parametrize(("graph", "each_edge"), [("ring", False), ("grid", True)])
def test_evidence_is_linear_in_the_edges(graph, each_edge, query):
    """On nodes that are sources and on pixels that share some, and linear in the labels."""
    work = []
    for size, num_classes in ((16, LABELS), (32, LABELS), (16, 4 * LABELS)):
        torch.manual_seed(0)
        hood = ring(size**2) if graph == "ring" else sources.grid(size, size, stride=2)
        alpha, logits = parameters(hood, num_classes)
        evidence = torch.randn(hood.num_edges if each_edge else size**2, num_classes)
        leaves = [t.requires_grad_() for t in (alpha, logits, evidence)]
        run = EVIDENCE[query](EvidenceConditional(hood, *leaves))
        with Work() as done:
            run()
        work.append(done.total / hood.num_edges)
        # Two blocks pad rows, and take the noise of two sweeps at once.
        assert done.largest <= 3 * DRAWS * hood.num_edges * num_classes
    # The fixed point of a draw takes some rounds more on a larger graph.
    assert work[1] < 1.5 * work[0]
    assert work[2] < 6 * work[0]


def test_blocks_cover_everything(monkeypatch):
    monkeypatch.setattr(blocks, "NUMBERS", 10)
    for size, each in ((0, 3), (7, 3), (7, 100), (7, 0)):
        parts = [torch.arange(size)[part] for part in blocks.blocks(size, each)]
        assert torch.cat([torch.empty(0, dtype=torch.long), *parts]).tolist() == [*range(size)]
        assert all(len(part) <= max(1, 10 // max(1, each)) for part in parts)
