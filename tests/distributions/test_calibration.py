# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
Posteriors of latent labels by simulation-based calibration [1]: where truth and observations come
from the model, the rank of any quantity of the truth among posterior draws is uniform.

[1] Sean Talts et al. (2018) "Validating Bayesian Inference Algorithms with Simulation-Based
Calibration", https://arxiv.org/abs/1804.06788.
"""

from typing import NamedTuple

import pytest
import torch
from graphs import random_sources
from pyro.distributions import Normal
from scipy.stats import chi2, norm
from torch import Tensor

from pyro_nmm import ChosenLabels, EvidenceConditional, NeighborChoice, Neighborhood

DRAWS, CLASSES = 15, 3


class Simulation(NamedTuple):
    """Graphs joined into one, their parameters, and a truth with what is observed of it."""

    hood: Neighborhood
    graph: Tensor  #: of every node
    alpha: Tensor
    logits: Tensor
    evidence: Tensor
    choices: Tensor
    labels: Tensor


def simulate(num_graphs, max_nodes, each_edge):
    """
    Graphs of three nodes or more, every one with parameters of its own. Half of them have fewer
    sources than nodes. Of every fifth node nothing is observed.
    """
    edges, sizes, num_sources = [], torch.randint(3, max_nodes + 1, (num_graphs,)), 0
    starts = sizes.cumsum(0) - sizes
    for number, (size, start) in enumerate(zip(sizes.tolist(), starts.tolist(), strict=True)):
        few = size if number % 2 else int(torch.randint(1, 1 + size // 2, ()))
        part = random_sources(size, few)
        edges.append(torch.stack([part.source + num_sources, part.target + start]))
        num_sources += few
    hood = Neighborhood(torch.cat(edges, 1), int(sizes.sum()), num_sources)
    alpha = 0.3 * torch.randn(hood.num_sources, CLASSES).exp()
    logits = torch.randn(hood.num_edges)
    choices = NeighborChoice(hood, logits).sample()
    labels = ChosenLabels(alpha, choices).sample()
    # Whoever borrows a label sees a Normal variable, whose mean depends on the edge or not.
    means = torch.randn(hood.num_edges if each_edge else hood.num_nodes, CLASSES)
    of_edge = hood.row if not each_edge else torch.arange(hood.num_edges)
    own = of_edge[hood.find(choices[None])[0]]
    w = Normal(means[own, labels], 0.7).sample()
    evidence = Normal(means, 0.7).log_prob(w[hood.row if each_edge else ...][:, None])
    silent = torch.arange(hood.num_nodes) % 5 == 4
    evidence[silent[hood.row] if each_edge else silent] = 0
    graph = torch.arange(num_graphs).repeat_interleave(sizes)
    return Simulation(hood, graph, alpha, logits, evidence, choices, labels)


def quantities(case, choices, labels):
    """
    Of choices and labels ``(T, N)``, each ``(T, num_graphs)``: how many nodes have the first label,
    how many pairs have the same one, and the parts of log p(w, u, c).
    """
    hood, edges = case.hood, case.hood.find(choices)
    place = edges if len(case.evidence) != hood.num_nodes else torch.arange(hood.num_nodes)
    of_source = torch.empty(hood.num_sources, dtype=torch.long)
    of_source[hood.source] = case.graph[hood.row]

    def sums(values, graph=case.graph):
        total = torch.zeros(len(choices), int(case.graph[-1]) + 1)
        return total.index_add(1, graph, values.double())

    # Dirichlet-multinomial: the labels that each source has given.
    counts = torch.zeros(len(choices), hood.num_sources * CLASSES)
    counts.scatter_add_(1, choices * CLASSES + labels, torch.ones(choices.shape))
    after = case.alpha + counts.view(-1, *case.alpha.shape)
    urns = after.lgamma().sum(-1) - after.sum(-1).lgamma()
    used = of_source[hood.source.unique()]
    return {
        "first label": sums(labels == 0),
        "alike": sum(sums(labels == k).square() for k in range(CLASSES)),
        "log p(w | u)": sums(case.evidence[place, labels]),
        "log p(u | c)": sums(urns[:, hood.source.unique()], used),
        "log p(c)": sums(hood.log_softmax(case.logits)[edges]),
    }


def check(case, choices, labels):
    """
    Ranks of the truth against the uniform distribution, by their histogram and their mean: of 1,000
    graphs they notice a quantity that is off by .12 of its posterior standard deviation, of 300 by
    .2.
    """
    truth = quantities(case, case.choices[None], case.labels[None])
    for name, drawn in quantities(case, choices, labels).items():
        # What is equal may differ by the order of a sum.
        below, level = drawn < truth[name] - 1e-9, (drawn - truth[name]).abs() <= 1e-9
        middle = (below + level / 2).mean(0) - 0.5
        z = middle.mean() / middle.std() * len(middle) ** 0.5
        ties = level.sum(0)
        rank = below.sum(0) + (torch.rand(len(ties)) * (ties + 1)).long()
        counts = torch.bincount(rank, minlength=len(choices) + 1)
        expected = len(rank) / len(counts)
        statistic = ((counts - expected) ** 2 / expected).sum()
        p = min(chi2.sf(statistic, len(counts) - 1), 2 * norm.sf(abs(z)))
        assert p > 1e-3, f"{name}: p = {p:.1e}, mean rank off by {z:.1f} s.e., {counts.tolist()}"


@pytest.mark.parametrize("each_edge", [False, True], ids=["nodes", "edges"])
def test_sweeps(each_edge):
    """All graphs in one call: a chain for every draw."""
    case = simulate(1000, 10, each_edge)
    q = EvidenceConditional(case.hood, case.alpha, case.logits, case.evidence)
    found = q.posterior(DRAWS, num_sweeps=30).components
    order = found.nodes.argsort()
    check(case, found.choices[:, order], found.labels[:, order])


@pytest.mark.slow
@pytest.mark.parametrize("weighted", [False, True], ids=["exact", "weighted"])
def test_sums_and_weighted_draws(weighted):
    """Graph after graph: weights are those of a whole graph."""
    num_graphs = 300
    case = simulate(num_graphs, 4, each_edge=False)
    first_source, parts = 0, []
    for number in range(num_graphs):
        nodes = (case.graph == number).nonzero()[:, 0]
        rows = case.hood.take(nodes)
        num_sources = int(rows.source.max()) + 1 - first_source
        sources = slice(first_source, first_source + num_sources)
        edges = torch.stack([rows.source - first_source, rows.row])
        hood = Neighborhood(edges, len(nodes), num_sources)
        arguments = case.alpha[sources], case.logits[rows.edge], case.evidence[nodes]
        q = EvidenceConditional(hood, *arguments)
        found = q.posterior(1000 if weighted else None, weighted=weighted).components
        some, order = found.drawn(DRAWS), found.nodes.argsort()
        choices, labels = (t[some][:, order] for t in (found.choices, found.labels))
        parts.append((choices + first_source, labels))
        first_source += num_sources
    check(case, *(torch.cat(part, 1) for part in zip(*parts, strict=True)))
