# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Edges that relabel, against sums over choices and label distributions' moments in NumPy."""

import itertools
from functools import partial

import networkx as nx
import numpy as np
import pytest
import torch
from cases import KINDS, matrices
from graphs import house, labellings, parameters, shared_sources, star, to_hood
from oracle import edge_lists
from scipy.special import gammaln
from scipy.stats import chi2
from torch.nn.functional import one_hot

from pyro_nmm import NeighborMixture, OrderedConditional
from pyro_nmm.relabel import as_channel

GRAPHS = {"star": partial(star, 3), "house": house, "shared": shared_sources}
GRAPHS |= {"path": lambda: to_hood(nx.path_graph(4))}


class Truth:
    """
    p(y) over all labellings of some nodes, as the model reads: a sum over choices and borrowed
    labels of attention, moments of the label distributions, and what edges make of a label.
    """

    def __init__(self, hood, alpha, logits, relabel):
        alpha, size = alpha.numpy(), alpha.shape[1]
        table = relabel if relabel.is_floating_point() else one_hot(relabel, size).double()
        neighbors, attention = edge_lists(hood, logits)
        first, table = hood.ptr.numpy(), table.numpy()
        num_nodes = len(neighbors)
        self.labels = np.array(list(itertools.product(range(size), repeat=num_nodes)))
        self.probs = np.zeros(len(self.labels))
        for places in itertools.product(*(range(len(row)) for row in neighbors)):
            weight = np.prod([attention[i][place] for i, place in enumerate(places)])
            chosen = [neighbors[i][place] for i, place in enumerate(places)]
            edges = [first[i] + place for i, place in enumerate(places)]
            for borrowed in itertools.product(range(size), repeat=num_nodes):
                counts = np.zeros_like(alpha)
                np.add.at(counts, (chosen, borrowed), 1)
                moment = gammaln(alpha + counts).sum(1) - gammaln((alpha + counts).sum(1))
                moment -= gammaln(alpha).sum(1) - gammaln(alpha.sum(1))
                shown = np.ones(len(self.labels))
                for i in range(num_nodes):
                    shown *= table[edges[i], borrowed[i], self.labels[:, i]]
                self.probs += weight * np.exp(moment.sum()) * shown

    def table(self, *nodes):
        size = self.labels.max() + 1
        found = np.zeros((size,) * len(nodes))
        np.add.at(found, tuple(self.labels[:, n] for n in nodes), self.probs)
        return torch.tensor(found)


def case(name, kind, size=2):
    hood = GRAPHS[name]()
    alpha, logits = parameters(hood, size, scale=1.0)
    relabel = KINDS[kind](hood, size)
    return NeighborMixture(hood, alpha, logits, relabel), Truth(hood, alpha, logits, relabel)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("name", "size"), [("star", 2), ("shared", 2), ("path", 2), ("path", 3)])
def test_distribution(name, size, kind):
    """Likelihood, marginals, pairs and small sets."""
    mix, truth = case(name, kind, size)
    num_nodes, labels = mix.hood.num_nodes, torch.tensor(truth.labels)
    torch.testing.assert_close(mix.log_prob(labels).exp(), torch.tensor(truth.probs))
    marginals = torch.stack([truth.table(i) for i in range(num_nodes)])
    torch.testing.assert_close(mix.marginals(), marginals)
    torch.testing.assert_close(
        mix.node_log_probs(labels[1]), marginals[torch.arange(num_nodes), labels[1]].log()
    )
    pairs = torch.tensor([[0, 1, 2, 3, 3], [1, 2, 3, 0, 3]])
    tables = torch.stack([truth.table(i, j) for i, j in pairs.T[:4].tolist()])
    torch.testing.assert_close(mix.pairwise(pairs)[:4], tables)
    torch.testing.assert_close(mix.pairwise(pairs)[4], marginals[3].diag())
    some = labellings(2, size)
    found = mix.log_marginal(torch.tensor([2, 0]), some).exp()
    torch.testing.assert_close(found, truth.table(2, 0).flatten())


#: Every way to make a posterior, with permutations and with matrices.
WAYS = [
    ("loops", "permutations", "exact"),
    ("loops", "matrices", "exact"),
    ("tensors", "permutations", "weighted"),
    ("loops", "matrices", "weighted"),
    ("loops", "permutations", "equal"),
    ("blocks", "matrices", "equal"),
]


@pytest.mark.parametrize(("kernels", "kind", "way"), WAYS, indirect=["kernels"])
def test_posterior(kernels, kind, way):
    """
    Marginals, pairs and draws of the others, given two labels; then a third. Draws with weights
    are exact but for noise, which is below .01 here; equal weights have the guide's bias.
    """
    mix, truth = case("shared", kind)
    y, mask = torch.tensor([1, -1, 0, -1, 1]), torch.tensor([True, False, True, False, False])
    options = {} if way == "exact" else {"num_samples": 10_000, "weighted": way == "weighted"}
    posterior = mix.condition(y, mask, **options)
    match = (truth.labels[:, [0, 2]] == [1, 0]).all(1)
    error = {"exact": 1e-9, "weighted": 0.03, "equal": 0.1}[way]
    for step in range(2):
        probs = torch.tensor(truth.probs * match / truth.probs[match].sum())
        labels = torch.tensor(truth.labels)
        marginals = torch.stack(
            [torch.stack([probs[labels[:, i] == k].sum() for k in range(2)]) for i in range(5)]
        )
        torch.testing.assert_close(posterior.marginals(), marginals, rtol=0, atol=error)
        pairs = torch.tensor([[1, 0, 3], [3, 4, 1]])
        tables = torch.zeros(3, 2, 2)
        for place, (i, j) in enumerate(pairs.T.tolist()):
            tables[place].index_put_((labels[:, i], labels[:, j]), probs, accumulate=True)
        torch.testing.assert_close(posterior.pairwise(pairs), tables, rtol=0, atol=error)
        free = torch.tensor([1, 3])
        log_probs = posterior.log_marginal(free, labellings(2))
        torch.testing.assert_close(log_probs.exp(), tables[0].flatten(), rtol=0, atol=error)
        draws = posterior.sample((10_000,))
        assert (draws[:, [0, 2]] == torch.tensor([1, 0])).all()
        counts = torch.stack([(draws == row).all(1).sum() for row in labels[probs > 0]])
        if way == "exact":
            expected = 10_000 * probs[probs > 0]
            statistic = ((counts - expected) ** 2 / expected).sum()
            assert chi2.sf(statistic, len(counts) - 1) > 1e-4
        assert posterior.predict()[[0, 2]].tolist() == [1, 0]
        if step == 0:
            posterior = posterior.condition(y, torch.tensor([False] * 4 + [True]))
            match &= truth.labels[:, 4] == 1
    assert posterior.predict(torch.tensor([1, 3]), method="joint").tolist() == list(
        labellings(2)[posterior.log_marginal(free, labellings(2)).argmax()]
    )


@pytest.mark.parametrize("kind", KINDS)
def test_samples(kind):
    """With a batch of matrices too, and per draw."""
    mix, truth = case("path", kind)
    draws = mix.sample((40_000,))
    counts = torch.stack([(draws == torch.tensor(row)).all(1).sum() for row in truth.labels])
    expected = 40_000 * torch.tensor(truth.probs)
    assert chi2.sf(((counts - expected) ** 2 / expected).sum(), len(counts) - 1) > 1e-4
    if kind == "permutations":
        c = torch.tensor([[1, 0, 2, 2], [0, 1, 1, 3]])
        q = mix.given(c)
        total = q.log_prob(labellings(4)[:, None]).exp().sum(0)
        torch.testing.assert_close(total, torch.ones(2))
        draws = q.sample((30_000,))
        for b in range(2):
            probs = q.log_prob(labellings(4)[:, None]).exp()[:, b]
            counts = torch.stack([(draws[:, b] == row).all(1).sum() for row in labellings(4)])
            statistic = ((counts - 30_000 * probs) ** 2 / (30_000 * probs)).sum()
            assert chi2.sf(statistic, 15) > 1e-4


def test_a_permutation_and_its_inverse():
    """Of three labels in a circle, which is not its own inverse."""
    circle = as_channel(torch.tensor([[1, 2, 0]]))
    borrowed, shown = torch.tensor([[0], [1], [2]]), torch.tensor([[1], [2], [0]])
    assert torch.equal(circle.show(borrowed), shown)
    assert torch.equal(circle.borrow(shown), borrowed)
    probs = torch.tensor([[0.5, 0.3, 0.2]])
    torch.testing.assert_close(circle.push(probs), torch.tensor([[0.2, 0.5, 0.3]]))


def test_batch_of_matrices():
    hood = GRAPHS["path"]()
    alpha, logits = parameters(hood, 2, (3,))
    relabel = matrices(hood, 2, (3,))
    mix = NeighborMixture(hood, alpha, logits, relabel)
    pairs, y = torch.tensor([[0, 1], [2, 2]]), labellings(4)
    single = [NeighborMixture(hood, *part) for part in zip(alpha, logits, relabel, strict=True)]
    for b, one in enumerate(single):
        torch.testing.assert_close(mix.marginals()[b], one.marginals())
        torch.testing.assert_close(mix.pairwise(pairs)[b], one.pairwise(pairs))
        torch.testing.assert_close(mix.log_prob(y[:, None])[:, b], one.log_prob(y))
    assert mix.sample((4,)).shape == (4, 3, 4)
    means = mix.sample((20_000,)).double().mean(0)
    assert (means - mix.marginals()[..., 1]).abs().max() < 0.02
    assert mix.elbo(y[5], num_samples=7).shape == (7, 3)


def test_posterior_has_no_gradient():
    """Neither to parameters of sources and attention, nor to matrices of edges."""
    hood, observed = GRAPHS["path"](), torch.tensor([True, False, True, False])
    parts = *parameters(hood, 2), matrices(hood, 2)
    mix = NeighborMixture(hood, *(part.requires_grad_() for part in parts))
    assert mix.marginals().requires_grad
    post = mix.condition(torch.tensor([0, -1, 1, -1]), observed)
    assert not post.marginals().requires_grad
    assert not post.pairwise(torch.tensor([[1], [3]])).requires_grad


def test_edges_that_keep_labels_change_nothing():
    """The identity, as a permutation bit for bit."""
    hood = house()
    alpha, logits = parameters(hood, 3)
    y, order = torch.randint(3, (5,)), torch.randperm(5)
    keep = torch.arange(3).expand(hood.num_edges, -1)
    values = []
    for relabel in (None, keep):
        torch.manual_seed(1)
        q = OrderedConditional(hood, alpha, logits, y, order=order, relabel=relabel)
        c = q.sample((20,))
        values.append([c, q.log_prob(c), q.log_labels(c), q.borrowed(c)])
    assert all(map(torch.equal, *values))
    plain = NeighborMixture(hood, alpha, logits)
    for relabel in (keep, torch.eye(3).expand(hood.num_edges, -1, -1)):
        mix = NeighborMixture(hood, alpha, logits, relabel)
        torch.testing.assert_close(mix.log_prob(y), plain.log_prob(y))
        torch.testing.assert_close(mix.marginals(), plain.marginals())


@pytest.mark.parametrize("kind", KINDS)
def test_likelihood_estimates(kind):
    """The bound below, and sequential Monte Carlo at, the exact value; conditional too."""
    mix, _ = case("house", kind)
    y = torch.tensor([0, 1, 1, 0, 1])
    exact = mix.log_prob(y)
    bound = mix.elbo(y, num_samples=4000)
    assert bound.mean() < exact + 4 * bound.std() / 4000**0.5
    weights = (bound - exact).exp()
    assert abs(weights.mean() - 1) < 4 * weights.std() / 4000**0.5
    assert abs(mix.log_likelihood(y, num_particles=20_000, num_stages=3) - exact) < 0.03
    given, first = torch.tensor([True, False, True, False, False]), torch.tensor([0, 2])
    rest = mix.log_likelihood(y, given=given, num_particles=20_000, num_stages=2)
    assert abs(rest - (exact - mix.log_marginal(first, y[first]))) < 0.03
    unseen = y.where(given, -1)  # never read
    assert mix.elbo(unseen, given).isfinite().all()
