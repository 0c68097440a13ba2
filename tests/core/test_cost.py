# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Every query is linear in the edges that it needs: numbers written are counted, not seconds."""

import pytest
import torch
from cases import KINDS
from cost import Work
from graphs import parameters

from pyro_nmm import EvidenceConditional, Neighborhood, NeighborMixture, backend, blocks, sources

SIZES = 1000, 4000


def ring(num_nodes, reach=3):
    """Every node and the next few: degrees do not depend on the size."""
    node = torch.arange(num_nodes)
    ends = torch.cat([torch.stack([node, (node + k) % num_nodes]) for k in range(1, reach + 1)], 1)
    return Neighborhood(torch.cat([ends, ends.flip(0)], 1), num_nodes)


def problem(num_nodes, num_classes=5):
    hood = ring(num_nodes)
    return NeighborMixture(hood, *parameters(hood, num_classes)), torch.arange(num_nodes) < 50


def growth(query, prepare):
    """What three thousand nodes more add, per node."""
    work = []
    for num_nodes in SIZES:
        torch.manual_seed(0)
        mix, observed = problem(num_nodes)
        mix.attention  # noqa: B018 kept by the mixture
        argument = prepare(mix, observed)
        with Work() as done:
            query(argument)
        work.append(done.total)
    return (work[1] - work[0]) / (SIZES[1] - SIZES[0])


PAIRS = torch.tensor([[49, 60, 70, 70], [52, 61, 70, 500]])


def labels(mix):
    return torch.zeros(mix.hood.num_nodes, dtype=torch.long)


@pytest.mark.parametrize("num_samples", [1, 16])
def test_pairs_do_not_see_other_edges(num_samples):
    """Next to nothing for a node more: a row's size, and whether it is observed."""

    def posterior(mix, observed):
        return mix.condition(labels(mix), observed, num_samples)

    assert growth(lambda mix: mix.pairwise(PAIRS), lambda mix, _: mix) < 6
    assert growth(lambda post: post.pairwise(PAIRS), posterior) < 6


def test_condition_and_sets_of_nodes_do_not_see_other_edges():
    def condition(pair):
        mix, observed = pair
        mix.condition(labels(mix), observed, num_samples=8)

    def more(pair):
        post, after = pair
        post.condition(torch.zeros_like(post.labels), after)

    def posterior(mix, observed):
        return mix.condition(labels(mix), observed, num_samples=8)

    # Masks and labels of all nodes, but neither edges nor classes.
    assert growth(condition, lambda *pair: pair) < 40
    assert growth(more, lambda mix, seen: (posterior(mix, seen), seen.roll(60))) < 40
    some = torch.tensor([52, 53])
    assert growth(lambda post: post.log_marginal(some, torch.tensor([0, 1])), posterior) < 10


def test_draws_of_some_nodes_do_not_see_other_edges(monkeypatch):
    monkeypatch.setattr(backend, "compiled", None)
    nodes = torch.arange(40, 60)

    def posterior(mix, observed):
        return mix.condition(labels(mix), observed, 4)

    assert growth(lambda post: post.sample((8,), nodes), posterior) < 6


def test_marginals_do_not_see_nodes_once_for_each_component():
    work = []
    mix, observed = problem(4000)
    for num_samples in (4, 64):
        post = mix.condition(labels(mix), observed, num_samples)
        with Work() as done:
            post.marginals()
        work.append(done.total)
        assert done.largest <= mix.hood.num_edges * 5
    assert work[1] < 1.3 * work[0]


def test_exact_posteriors_hold_no_table_of_all_nodes():
    """Two observed nodes have 49 joint choices."""
    mix, _ = problem(4000)
    with Work() as done:
        post = mix.condition(labels(mix), torch.arange(4000) < 2)
        post.pairwise(PAIRS)
    assert len(post.components) == 49
    assert done.largest < 49 * 4000


def test_predictions_in_turn_are_linear(monkeypatch):
    """By sweeps over blocks, which hold less than the counts of all labels do."""
    monkeypatch.setattr(backend, "compiled", None)
    monkeypatch.setattr(blocks, "NUMBERS", 2**12)
    work = []
    for num_nodes in (200, 800):
        mix, _ = problem(num_nodes)
        post = mix.condition(labels(mix), torch.arange(num_nodes) < num_nodes // 10, 4)
        with Work() as done:
            post.predict(method="sequential")
        work.append(done.total)
        assert done.largest <= num_nodes * 4 * 6
    assert work[1] / work[0] < 5


DRAWS, LABELS = 4, 3


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
def test_evidence_is_linear_in_the_edges(monkeypatch, graph, each_edge, query):
    """Of nodes that are sources and of pixels that share some; of labels alike."""
    monkeypatch.setattr(backend, "compiled", None)  # which no operation of PyTorch shows
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
        assert done.largest <= 2 * DRAWS * hood.num_edges * num_classes
    # The fixed point of a draw takes some rounds more on a larger graph.
    assert work[1] < 1.5 * work[0]
    assert work[2] < 6 * work[0]


@pytest.mark.parametrize("kind", KINDS)
def test_edges_that_relabel_are_linear(monkeypatch, kind):
    """Every query, of a graph whose edges have permutations or matrices."""
    monkeypatch.setattr(backend, "compiled", None)
    work = []
    for num_nodes in (250, 1000):
        torch.manual_seed(0)
        hood = ring(num_nodes)
        mix = NeighborMixture(hood, *parameters(hood, LABELS), KINDS[kind](hood, LABELS))
        y, observed = mix.sample(), torch.arange(num_nodes) < num_nodes // 4
        with Work() as done:
            mix.elbo(y)
            mix.marginals()
            mix.log_likelihood(y, num_particles=DRAWS, num_stages=4)
            mix.condition(y, observed, DRAWS).marginals()
        work.append(done.total)
        assert done.largest <= 2 * DRAWS * hood.num_edges * LABELS**2
    assert work[1] / work[0] < 6


def test_estimates_with_evidence_are_linear(monkeypatch):
    """Of a likelihood, in four stages, and in as many as there are blocks of 64 nodes."""
    monkeypatch.setattr(backend, "compiled", None)
    for stages in (4, None):
        work = []
        for num_nodes in (250, 1000):
            torch.manual_seed(0)
            hood = ring(num_nodes)
            q = EvidenceConditional(hood, *parameters(hood, LABELS), torch.randn(num_nodes, LABELS))
            with Work() as done:
                q.log_likelihood(DRAWS, stages)
            work.append(done.total)
        assert work[1] / work[0] < 6


def test_blocks_cover_everything(monkeypatch):
    monkeypatch.setattr(blocks, "NUMBERS", 10)
    for size, each in ((0, 3), (7, 3), (7, 100), (7, 0)):
        parts = [torch.arange(size)[part] for part in blocks.blocks(size, each)]
        assert torch.cat([torch.empty(0, dtype=torch.long), *parts]).tolist() == [*range(size)]
        assert all(len(part) <= max(1, 10 // max(1, each)) for part in parts)
