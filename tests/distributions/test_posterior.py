# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Conditionals from samples, and prediction node by node."""

import networkx as nx
import numpy as np
import pytest
import torch
from graphs import house, parameters, to_hood
from oracle import of_hood

from pyro_nmm import NeighborMixture, OrderedConditional, blocks
from pyro_nmm.distributions.sequential import predict_in_turn
from pyro_nmm.ops.counts import posterior_alpha


def setting(seed=0):
    torch.manual_seed(seed)
    hood = house()
    alpha, logits = parameters(hood, 3, scale=1.0)
    y = torch.randint(3, (5,))
    observed = torch.tensor([True, True, False, True, False])
    return NeighborMixture(hood, alpha, logits), y, observed


def test_given_choices_everything_is_conjugate():
    """One sample: the table of p(y_rest | c, y) from the oracle's joint, to 1e-10."""
    mix, y, observed = setting()
    oracle = of_hood(mix.hood, mix.alpha, mix.logits)
    torch.manual_seed(7)
    post = mix.condition(y, observed, num_samples=1)
    torch.manual_seed(7)
    q = OrderedConditional(mix.hood, mix.alpha, mix.logits, y, observed)
    c = q.sample((1,))[0].numpy()
    same = (oracle.choices[:, [0, 1, 3]] == c).all(1)
    rows = (oracle.labels[:, [0, 1, 3]] == y[observed].numpy()).all(1)
    table = np.exp(oracle.log_joint[np.ix_(rows, same)]).sum(1)
    table /= table.sum()
    rest = oracle.labels[rows][:, [2, 4]]
    nodes = torch.tensor([2, 4])
    prob = post.log_marginal(nodes, torch.from_numpy(rest)).exp()
    torch.testing.assert_close(prob, torch.from_numpy(table), rtol=0, atol=1e-10)
    pair = post.pairwise(torch.tensor([[2], [4]]))[0].flatten()
    torch.testing.assert_close(pair, torch.from_numpy(table), rtol=0, atol=1e-10)


def test_weighted_samples_converge_to_the_exact_conditional():
    mix, y, observed = setting()
    exact = mix.condition(y, observed).marginals()
    weighted = mix.condition(y, observed, 20_000, weighted=True)
    torch.testing.assert_close(weighted.log_weights.exp().sum(), torch.tensor(1.0))
    assert (weighted.marginals() - exact).abs().max() < 0.02
    equal = mix.condition(y, observed, 500)
    assert equal.log_weights.unique().numel() == 1


def test_posterior_is_detached():
    mix, y, observed = setting()
    logits = mix.logits.requires_grad_()
    for num_samples in (None, 4):
        post = NeighborMixture(mix.hood, mix.alpha, logits).condition(y, observed, num_samples)
        assert not post.marginals().requires_grad


def test_counts_of_choices():
    alpha = torch.rand(2, 1, 4, 3)
    c, y = torch.randint(4, (5, 7)), torch.randint(3, (7,))
    post = posterior_alpha(alpha, c, y.expand_as(c))
    assert post.shape == (2, 5, 4, 3)
    for b in range(5):
        counts = torch.zeros(4, 3)
        for j, k in zip(c[b], y, strict=True):
            counts[j, k] += 1
        torch.testing.assert_close(post[:, b], alpha[:, 0] + counts)


def one_by_one(post, order, uniforms):
    """The sequential rule as a plain loop over nodes."""
    hood, weights = post.hood, post.log_weights.exp()
    alpha = post.components.concentrations(torch.arange(hood.num_nodes))
    attention = hood.softmax(post.logits)
    labels = []
    for place, i in enumerate(order.tolist()):
        row = slice(hood.ptr[i], hood.ptr[i + 1])
        share = alpha[:, hood.source[row]] / alpha[:, hood.source[row]].sum(-1, keepdim=True)
        score = attention[row, None] * share  # (T, deg, C)
        label = int(torch.einsum("t,tdc->c", weights, score).argmax())
        labels.append(label)
        cumulative = score[..., label].cumsum(-1)
        for t in range(len(alpha)):
            threshold = uniforms[t, place] * cumulative[t, -1]
            pick = int((cumulative[t] <= threshold).sum())
            alpha[t, hood.source[row][pick], label] += 1
    return labels


@pytest.mark.parametrize("seed", range(10))
def test_sequential_prediction_is_the_loop_over_nodes(kernels, seed):
    torch.manual_seed(seed)
    hood = to_hood(nx.barabasi_albert_graph(25, 2, seed=seed))
    mix = NeighborMixture(hood, *parameters(hood, 3, scale=2.0))
    y, observed = mix.sample(), torch.rand(25) < 0.3
    observed[0] = True
    post = mix.condition(y, observed, num_samples=4)
    order = (~observed).nonzero()[:, 0]
    order = order[torch.randperm(len(order))]
    generator = torch.Generator().manual_seed(seed)
    labels = predict_in_turn(post.hood, post.logits, post.components, order, generator)
    generator = torch.Generator().manual_seed(seed)
    uniforms = torch.rand(4, len(order), generator=generator, dtype=torch.double)
    assert labels.tolist() == one_by_one(post, order, uniforms)


def test_predictions_keep_what_is_known():
    mix, y, observed = setting()
    y[~observed] = -1
    post = mix.condition(y, observed, 16)
    for method in ("marginal", "joint", "sequential"):
        labels = post.predict(method=method)
        assert (labels[observed] == y[observed]).all()
        assert (labels >= 0).all()
        assert (labels < 3).all()
    some = torch.tensor([4, 0])
    assert post.predict(some).tolist() == post.predict()[some].tolist()
    first = post.predict(method="sequential", generator=torch.Generator().manual_seed(1))
    again = post.predict(method="sequential", generator=torch.Generator().manual_seed(1))
    assert torch.equal(first, again)
    everything = mix.condition(y.clamp(min=0), None, 4)
    assert torch.equal(everything.predict(method="joint"), y.clamp(min=0))
    assert everything.log_marginal(torch.tensor([0, 1]), y[:2]) == 0
    assert everything.log_marginal(torch.tensor([0]), (y[:1] + 1) % 3) == -torch.inf


def test_sequential_prediction_uses_earlier_ones():
    """Two unknown nodes that share a confident but symmetric component agree."""
    hood = to_hood(nx.star_graph(2))
    alpha = torch.tensor([[0.01, 0.01], [1.0, 1.0], [1.0, 1.0]])
    logits = 20.0 * (hood.source == 0)
    mix = NeighborMixture(hood, alpha, logits)
    table = mix.pairwise(torch.tensor([[1], [2]]))[0]
    assert table.diagonal().sum() > 0.95
    y = torch.tensor([1, -1, -1])
    labels = mix.condition(y, torch.tensor([True, False, False]), 8).predict(method="sequential")
    assert labels.tolist() == [1, 1, 1]


def test_pairs_in_blocks(monkeypatch):
    """Some components, pairs and edges at a time give what all at once give."""
    mix, y, observed = setting()
    torch.manual_seed(3)
    post = mix.condition(y, observed, 7, weighted=True)
    pairs = torch.tensor([[2, 0, 4], [4, 2, 4]])
    queries = (
        lambda: post.pairwise(pairs),
        post.marginals,
        lambda: post.log_marginal(torch.tensor([2, 4]), y[[2, 4]]),
        lambda: mix.pairwise(pairs),
        mix.marginals,
    )
    whole = [query() for query in queries]
    monkeypatch.setattr(blocks, "NUMBERS", 8)
    for query, expected in zip(queries, whole, strict=True):
        torch.testing.assert_close(query(), expected)
    torch.manual_seed(3)
    again = mix.condition(y, observed, 7, weighted=True)
    assert torch.equal(again.components.choices, post.components.choices)


def test_gradients_in_blocks(monkeypatch):
    """Of closed forms, through what blocks write in place."""
    mix, _, _ = setting()
    monkeypatch.setattr(blocks, "NUMBERS", 8)
    pairs = torch.tensor([[2, 0, 4], [4, 2, 4]])

    def query(alpha, logits):
        mixture = NeighborMixture(mix.hood, alpha.exp(), logits)
        return mixture.pairwise(pairs), mixture.marginals()

    inputs = [t.detach().requires_grad_() for t in (mix.alpha.log(), mix.logits)]
    torch.autograd.gradcheck(query, inputs)


def test_what_a_posterior_keeps():
    """Concentrations of some nodes, in their order, are the prior's and the choices' counts."""
    mix, y, observed = setting()
    post = mix.condition(y, observed, 6)
    nodes = torch.tensor([3, 0, 4])
    parts = post.components
    dense = posterior_alpha(mix.alpha, parts.choices, parts.labels.expand_as(parts.choices))
    torch.testing.assert_close(parts.concentrations(nodes), dense[:, nodes])
    torch.testing.assert_close(parts.concentrations(nodes, slice(2, 4)), dense[2:4, nodes])
    mean = (dense / dense.sum(-1, keepdim=True)).mean(0)
    torch.testing.assert_close(parts.mean(), mean)


def test_means_where_everybody_chose():
    """In float32, with hardly any concentration: no weight is left over for the prior."""
    hood = to_hood(nx.star_graph(30))
    logits = 30.0 * (hood.source == 0).float()
    mix = NeighborMixture(hood, torch.full((31, 3), 1e-4).float(), logits)
    y = torch.arange(31) % 2
    post = mix.condition(y, torch.arange(31) > 0, 50)
    assert (post.components.choices == 0).all()
    exact = (1e-4 + torch.tensor([15.0, 15.0, 0.0])) / (30 + 3e-4)
    torch.testing.assert_close(post.components.mean()[0], exact.float(), rtol=1e-5, atol=0)
