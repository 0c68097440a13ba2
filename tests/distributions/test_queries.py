# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""What a joint distribution can be asked: draws of some nodes, counts, what a label tells."""

import itertools

import networkx as nx
import pytest
import torch
from graphs import house, labellings, to_hood
from pyro.ops.provenance import get_provenance, track_provenance
from scipy.stats import chisquare
from torch.nn.functional import one_hot

from pyro_nmm import Neighborhood, NeighborMixture
from pyro_nmm.graph_arguments import order_to_rows
from pyro_nmm.ops.compact import Places, sharing

EVERY = torch.tensor(list(itertools.product(range(2), repeat=3)))


def given_one_label(relabel=False):
    torch.manual_seed(0)
    hood, more = house(), {}
    if relabel:
        matrices = torch.rand(hood.num_edges, 2, 2)
        more["relabel"] = matrices / matrices.sum(-1, keepdim=True)
    mix = NeighborMixture(hood, 0.5 * torch.rand(5, 2) + 0.1, torch.randn(hood.num_edges), **more)
    y, known = torch.tensor([0, 1, 0, 0, 0]), torch.tensor([0, 1, 0, 0, 0]).bool()
    return mix.condition(y, known)


@pytest.mark.parametrize("relabel", [False, True])
def test_draws_of_some_nodes(relabel):
    """In any order, known ones among them: goodness of fit to the exact joint distribution."""
    posterior, nodes = given_one_label(relabel), torch.tensor([4, 1, 0])
    torch.manual_seed(1)
    draws = posterior.sample((4000,), nodes)
    assert draws.shape == (4000, 3)
    assert (draws[:, 1] == 1).all()
    expected = 4000 * posterior.log_marginal(nodes, EVERY).exp()
    number = (draws * torch.tensor([4, 2, 1])).sum(-1).bincount(minlength=8)
    possible = expected > 0
    assert number[~possible].sum() == 0
    assert chisquare(number[possible], expected[possible]).pvalue > 1e-3


def test_draws_of_all_nodes_are_as_before():
    posterior = given_one_label()
    torch.manual_seed(2)
    all_nodes = posterior.sample((3, 2))
    torch.manual_seed(2)
    assert torch.equal(posterior.sample((3, 2), torch.arange(5)), all_nodes)
    assert all_nodes.shape == (3, 2, 5)


def test_counts_in_sets():
    """Their distribution is that of the enumeration; sets may overlap, and be ids or masks."""
    posterior = given_one_label()
    sets = [torch.tensor([0, 2, 4]), torch.tensor([0, 1, 0, 0, 1]).bool(), torch.tensor([1])]
    torch.manual_seed(0)
    draws = posterior.counts(sets, label=1, num_samples=4000)
    same = [sets[0].tolist(), sets[1].long(), sets[2].numpy()]
    torch.manual_seed(0)
    assert torch.equal(posterior.counts(same, label=1, num_samples=4000), draws)
    assert draws.shape == (4000, 3)
    assert (draws[:, 2] == 1).all()
    exact = posterior.log_marginal(sets[0], EVERY).exp()
    expected = torch.zeros(4).index_add(0, EVERY.sum(-1), exact)
    assert chisquare(draws[:, 0].bincount(minlength=4), 4000 * expected).pvalue > 1e-3
    # Joint, so that labels which are alike make counts wider than independent ones would be.
    zeros = posterior.counts(sets, label=0, num_samples=10)
    assert (zeros[:, 2] == 0).all()


def test_counts_of_sampled_sets():
    """They depend on the sites that the sets depend on."""
    posterior, nodes = given_one_label(), torch.tensor([1, 2])
    sets = [track_provenance(nodes, frozenset({"y"})), [0]]
    torch.manual_seed(0)
    found = posterior.counts(sets, label=1, num_samples=5)
    torch.manual_seed(0)
    assert torch.equal(found, posterior.counts([nodes, [0]], label=1, num_samples=5))
    assert get_provenance(found) == frozenset({"y"})


def test_counts_are_wider_than_independent_labels_make_them():
    hood = to_hood(nx.complete_graph(30))
    posterior = NeighborMixture(hood, torch.full((30, 2), 0.05), torch.zeros(hood.num_edges))
    known = torch.zeros(30, dtype=torch.bool)
    known[0] = True
    posterior = posterior.condition(torch.zeros(30).long(), known, num_samples=8)
    spread = posterior.counts([~known], label=1).double().std()
    p = posterior.marginals()[1:, 1]
    assert spread > 1.25 * (p * (1 - p)).sum().sqrt()


def gain(tables):
    """Entropy of a node's label and its information on others: of tables ``{j: (2, 2)}``."""
    expected = torch.special.entr(next(iter(tables.values())).sum(1)).sum()
    for table in tables.values():
        product = table.sum(1, keepdim=True) * table.sum(0, keepdim=True)
        expected = expected + torch.special.xlogy(table, table / product).nan_to_num().sum()
    return expected


def test_information_gain_is_that_of_the_enumeration():
    posterior, nodes = given_one_label(), torch.tensor([3, 0, 1])
    found = posterior.information_gain(nodes)
    pairs = torch.tensor(list(itertools.product(range(2), repeat=2)))
    for place, i in enumerate(nodes.tolist()):
        others = {0, 1, 2, 3, 4} - {i}
        tables = {j: posterior.log_marginal(torch.tensor([i, j]), pairs).exp() for j in others}
        expected = gain({j: table.view(2, 2) for j, table in tables.items()})
        torch.testing.assert_close(found[place], expected)
    assert found[2] == 0  # its label is known


@pytest.mark.parametrize("mask", [None, torch.tensor([True, False, True, True, False])])
def test_information_gain_given_evidence(mask):
    """
    Labels with evidence are latent, and tell of each other: against the probabilities of all
    labellings. One of them is known, by evidence that rules out the other label.
    """
    torch.manual_seed(0)
    hood = house()
    mix = NeighborMixture(hood, 0.5 * torch.rand(5, 2) + 0.1, torch.randn(hood.num_edges))
    evidence = torch.randn(5, 2)
    evidence[2, 0] = -torch.inf
    labels = labellings(5)
    hints = evidence[torch.arange(5), labels]
    hints = hints if mask is None else hints[:, mask]
    probs = (mix.log_prob(labels) + hints.sum(-1)).softmax(0)
    hot = one_hot(labels, 2).double()
    tables = torch.einsum("q,qia,qjb->ijab", probs, hot, hot)
    found = mix.latents(evidence, mask).posterior().information_gain(torch.arange(5))
    for i in range(5):
        expected = gain({j: tables[i, j] for j in range(5) if j != i})
        torch.testing.assert_close(found[i], expected)


def test_information_of_two_nodes_of_one_source():
    """Without evidence to speak of: the entropy, log 2, and what a Beta moment makes of a pair."""
    hood = Neighborhood(torch.tensor([[0, 0], [0, 1]]), 2, 1)
    mix = NeighborMixture(hood, torch.full((1, 2), 0.2), torch.zeros(2))
    same, log2 = torch.tensor(1.2 / 1.4), torch.tensor(2.0).log()
    entropy = torch.special.entr(same) + torch.special.entr(1 - same)
    found = mix.latents(torch.zeros(2, 2)).posterior().information_gain(torch.tensor([0]))
    torch.testing.assert_close(found, (2 * log2 - entropy)[None])
    torch.testing.assert_close(found, torch.tensor([0.9762]), atol=1e-4, rtol=0)


def test_pairs_that_share_a_source():
    """On a tree, where most pairs share none: against sets of neighbours."""
    tree = nx.random_labeled_tree(12, seed=3)
    near = {i: {i, *tree[i]} for i in tree}
    nodes = torch.tensor([0, 3, 7, 8])
    expected = {(i, j) for i in nodes.tolist() for j in tree if i != j and near[i] & near[j]}
    assert len(expected) < 4 * 11 / 2
    assert set(map(tuple, sharing(to_hood(tree), nodes).T.tolist())) == expected


@pytest.mark.parametrize("batch", [(), (4, 1)])
def test_queries_of_an_expanded_mixture(batch):
    """Every place of a plate has its own numbers: else a sum over it would miss most of them."""
    hood, y = house(), torch.tensor([0, 2, 1, 1, 0])
    mix = NeighborMixture(hood, torch.rand(*batch, 5, 3) + 0.1, torch.randn(hood.num_edges))
    wide = mix.expand((4, 2))
    for labels in (y, torch.stack([y, y.flip(0)]), torch.stack([y] * 3)[:, None, None]):
        shape = (*torch.broadcast_shapes((4, 2), labels.shape[:-1]), 5)
        table = mix.marginals().expand(*shape, 3).log()
        expected = table.gather(-1, labels.expand(shape)[..., None])[..., 0]
        torch.testing.assert_close(wide.node_log_probs(labels), expected)
    for part, one in zip(wide.intervals(0.8), mix.intervals(0.8), strict=True):
        assert part.shape == (4, 2, 5)
        assert torch.equal(part, one.expand(4, 2, 5))


@pytest.mark.parametrize("kind", ["keep", "permutations", "matrices"])
@pytest.mark.parametrize("batch", [(), (2,)])
def test_no_draws_at_all(kernels, batch, kind):
    """They are empty, of the shape that any number of them has, and so are their densities."""
    hood, nodes = house(), torch.tensor([0, 2])
    ways = {"keep": None, "permutations": torch.tensor([[1, 0]]).expand(hood.num_edges, 2)}
    ways["matrices"] = torch.full((hood.num_edges, 2, 2), 0.5)
    alpha = torch.ones(*batch, 5, 2, requires_grad=True)
    mix = NeighborMixture(hood, alpha, torch.zeros(hood.num_edges), ways[kind])
    for shape in ((0,), (3, 0)):
        draws = mix.sample(shape)
        assert draws.shape == (*shape, *batch, 5)
        assert draws.dtype == torch.long
        for found in (mix.log_prob(draws), mix.log_marginal(nodes, draws[..., nodes])):
            assert found.shape == (*shape, *batch)
        found.sum().backward()
        assert torch.equal(alpha.grad, torch.zeros_like(alpha))
        assert mix.node_log_probs(draws).shape == draws.shape
        if kind != "matrices":
            law = mix.given(draws)
            assert law.sample().shape == draws.shape
            assert law.log_prob(draws).shape == (*shape, *batch)
    assert mix.expand((0, *batch)).log_prob(torch.zeros(5)).shape == (0, *batch)


def test_keys_of_another_layout_do_not_warn(recwarn):
    keys = torch.tensor([[3, 1], [4, 7]])
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)  # else torch warns once a process
    try:
        place, found = Places(torch.tensor([1, 3, 7])).find(keys.T)
        order_to_rows(house(), torch.arange(5).expand(2, 5).T.contiguous()[:, 0])
    finally:
        torch.set_warn_always(before)
    assert place[found].tolist() == [1, 0, 2]
    assert not [warning for warning in recwarn if "searchsorted" in str(warning.message)]
