# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The sum over all pairs of nodes, against the matrix of all pairs."""

import pytest
import torch
from torch.nn import functional as F
from torch_geometric.utils import to_undirected

from pyro_nmm import InnerProductGraph
from pyro_nmm.distributions import inner_product


@pytest.fixture(params=[2**20, 30])
def blocks(request, monkeypatch):
    """All pairs at once, and in blocks of a few rows."""
    monkeypatch.setattr(inner_product, "BLOCK", request.param)


def problem(batch=()):
    factors = torch.randn(*batch, 11, 3, requires_grad=True)
    edges = torch.tensor([[0, 1, 2, 3, 1, 5, 9], [1, 2, 3, 4, 5, 9, 10]])
    held_out = torch.tensor([[5, 6, 2, 10, 6], [1, 0, 4, 9, 0]])  # two of them are edges
    return factors, to_undirected(edges), held_out


def dense(factors, edge_index, weight, held_out=None, loops=False):
    """The definition, with a matrix."""
    size = factors.shape[-2]
    x = factors @ factors.mT
    edges = torch.zeros(size, size, dtype=torch.bool)
    edges[tuple(edge_index)] = True
    log_prob = torch.where(edges, weight * F.logsigmoid(x), F.logsigmoid(-x))
    mask = torch.ones(size, size).triu(1)
    for i, j in [] if held_out is None else held_out.T:
        mask[min(i, j), max(i, j)] = 0
    total = (log_prob * mask).sum((-2, -1))
    own = F.logsigmoid(x.diagonal(dim1=-2, dim2=-1)).sum(-1)
    return total + 0.5 * weight * own if loops else total


@pytest.mark.parametrize("batch", [(), (2, 3)])
@pytest.mark.parametrize("loops", [False, True])
def test_density_and_gradient(blocks, batch, loops):
    factors, edge_index, held_out = problem(batch)
    graph = InnerProductGraph(factors, 4.0, held_out, loops=loops)
    expected = dense(factors, edge_index, 4.0, held_out, loops)
    log_prob = graph.log_prob(edge_index)
    assert torch.allclose(log_prob, expected, rtol=1e-12)
    expanded = graph.expand([5, *batch]).log_prob(edge_index)
    torch.testing.assert_close(expanded, log_prob.expand(5, *batch), rtol=1e-12, atol=0)
    weights = torch.randn(log_prob.shape)
    gradients = [torch.autograd.grad((v * weights).sum(), factors)[0] for v in (log_prob, expected)]
    assert torch.allclose(*gradients, rtol=1e-10)


def test_samples(blocks):
    """2,000 graphs notice probabilities that are all off by 5 %."""
    factors, _, _ = problem()
    graph, num_draws = InnerProductGraph(factors.detach()), 2000
    counts = torch.zeros(11, 11)
    for _ in range(num_draws):
        edge_index = graph.sample()
        counts[tuple(edge_index)] += 1
    assert torch.equal(counts, counts.T)
    assert not counts.diagonal().any()
    probs = (factors @ factors.T).sigmoid().detach()
    z = (counts / num_draws - probs) / (probs * (1 - probs) / num_draws).sqrt()
    assert z.triu(1).abs().max() < 4.5  # 55 pairs
    assert z.triu(1).square().sum() < 55 + 4 * 110**0.5


def test_single_precision_of_many_pairs():
    torch.manual_seed(1)
    factors, edge_index = 0.3 * torch.randn(700, 16), torch.tensor([[0, 1], [1, 0]])
    values = [InnerProductGraph(f).log_prob(edge_index) for f in (factors, factors.float())]
    assert values[1].dtype == torch.float
    assert values[1].item() == pytest.approx(values[0].item(), rel=1e-6)


@pytest.mark.parametrize(("blocks", "loops"), [(2**20, False), (30, True)], indirect=["blocks"])
def test_swaps(blocks, loops):
    """
    One node at a time, against the density; with random columns, on average: 500 draws of them
    notice a mean that is off by a fifth of their standard deviation.
    """
    factors, edge_index, held_out = problem()
    factors, others = factors.detach(), torch.randn(11, 3)
    graph = InnerProductGraph(factors, 4.0, held_out, loops=loops)
    expected = []
    for node in range(11):
        swapped = factors.clone()
        swapped[node] = others[node]
        swapped = InnerProductGraph(swapped, 4.0, held_out, loops=loops)
        expected.append(swapped.log_prob(edge_index) - graph.log_prob(edge_index))
    expected = torch.stack(expected)
    assert torch.allclose(graph.swaps(edge_index, others), expected)
    draws = torch.stack([graph.swaps(edge_index, others, num_columns=4) for _ in range(500)])
    z = (draws.mean(0) - expected) / (draws.std(0) / len(draws) ** 0.5)
    assert z.abs().max() < 4


def test_balance():
    _, edge_index, held_out = problem()
    balance = InnerProductGraph.balance
    assert balance(edge_index, 11) == pytest.approx((110 - 14) / 14)
    assert balance(edge_index, 11, loops=True) == pytest.approx(96 / 25)
    assert balance(edge_index, 11, held_out) == pytest.approx((110 - 10) / 10)
    assert balance(torch.tensor([[0, 1], [1, 0]]), 3) == 2  # one pair and two others


def test_edges_are_a_set():
    """Repetitions, loops and small integers change nothing; nor do they among held-out pairs."""
    factors, edge_index, held_out = problem()
    loops = torch.tensor([[3, 4], [3, 4]])
    expected = InnerProductGraph(factors, 4.0, held_out).log_prob(edge_index)
    untidy = torch.cat([edge_index, loops, edge_index[:, :4]], 1).int()
    untidy_held_out = torch.cat([held_out.flip(0), loops, held_out], 1).int()
    assert torch.equal(InnerProductGraph(factors, 4.0, untidy_held_out).log_prob(untidy), expected)


def test_edges_that_change_are_read_again():
    graph, edge_index = InnerProductGraph(torch.randn(4, 2)), torch.tensor([[0, 1], [1, 0]])
    before = graph.log_prob(edge_index)
    assert torch.equal(graph.log_prob(edge_index), before)
    edge_index += 1
    after = graph.log_prob(edge_index)
    assert torch.equal(after, graph.log_prob(edge_index.clone()))
    assert not after.equal(before)
    with torch.inference_mode():
        assert torch.equal(graph.log_prob(edge_index.clone()), after)
