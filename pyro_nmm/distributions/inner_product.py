# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Random graphs from inner products of the nodes' vectors."""

from collections.abc import Sequence

import torch
from pyro.ops.provenance import track_provenance
from torch import Size, Tensor
from torch.autograd.function import once_differentiable
from torch.distributions import constraints
from torch.nn import functional as F
from torch_geometric.utils import coalesce, remove_self_loops

from pyro_nmm.arguments import (
    as_expected,
    as_shape,
    check_integers,
    check_positive,
    check_range,
    expect,
    expect_all,
)
from pyro_nmm.blocks import rows_at
from pyro_nmm.distributions.base import GraphDistribution, flatten
from pyro_nmm.provenance import untracked

#: Numbers of a block of the matrix of all pairs: it stays in the cache.
BLOCK = 2**20


class InnerProductGraph(GraphDistribution):
    r"""A random undirected graph whose edges are independent given a vector of every node.

    .. math::

        A_{ij} \sim \mathrm{Bernoulli}\big(\sigma(f_i^\top f_j)\big), \qquad i < j, \qquad
        \log p(A) = \sum_{i < j} w A_{ij} \log \sigma(f_i^\top f_j)
                    + (1 - A_{ij}) \log \sigma(-f_i^\top f_j)

    A sample is an ``edge_index`` ``(2, num_edges)`` with both directions of every edge. With
    :math:`w = 1` the density is exact. Kipf and Welling (2016, "Variational Graph Auto-Encoders")
    use the weight of :meth:`balance`, and ``loops``: each node's pair with itself as half an edge.

    >>> graph = InnerProductGraph(torch.ones(3, 2))
    >>> edge_index = torch.tensor([[0, 1], [1, 0]])
    >>> graph.log_prob(edge_index)  # log s(2) + 2 log s(-2)
    tensor(-4.3808)
    >>> graph.sample().shape[0]
    2

    Cost: :math:`O(N^2 D)` time and :math:`O(N D)` memory, also for the gradient.

    :param Tensor factors: ``(..., N, D)``, :math:`f`.
    :param float weight: :math:`w`, of edges.
    :param Tensor held_out: ``(2, P)`` pairs, edges or not, that the density leaves out.
    """

    shown = "num_nodes", "num_factors", "weight", "loops"

    def __init__(
        self, factors: Tensor, weight: float = 1.0, held_out: Tensor | None = None, *,
        loops: bool = False, validate_args=None,
    ) -> None:  # fmt: skip
        expect("factors", factors, ("...", ("N", 1), "D"), kind="float")
        check_positive(weight=weight)
        self.factors, self.weight, self.loops = factors, weight, loops
        self.num_nodes, self.num_factors = factors.shape[-2:]
        self.held_out = None
        if held_out is not None:
            self.held_out = _undirected_pairs(held_out, self.num_nodes, "held_out")
        # Graphs differ in their number of edges: there is no event shape.
        super().__init__(factors.shape[:-2], Size([2, 0]), validate_args=validate_args)
        if self._validate_args:
            (plain,), _ = untracked(factors)
            expect_all("factors", plain, plain.isfinite(), "be finite")

    @constraints.dependent_property(is_discrete=True, event_dim=2)
    def support(self):
        return constraints.independent(constraints.integer_interval(0, self.num_nodes - 1), 2)

    @staticmethod
    def balance(
        edge_index: Tensor, num_nodes: int, held_out: Tensor | None = None, loops: bool = False
    ) -> float:
        """The weight with which edges weigh as much as all other pairs, held-out ones too."""
        check_integers(1, num_nodes=num_nodes)
        edges = 2 * observed_edges(edge_index, num_nodes, held_out).shape[1] + loops * num_nodes
        size = num_nodes * (num_nodes - (not loops))
        if not 0 < edges < size:
            raise ValueError(f"edge_index must hold some but not all pairs, got {edges} entries")
        return (size - edges) / edges

    def pair_logits(self, pairs: Tensor) -> Tensor:
        """``(..., P)``: log-odds of an edge for every pair of node ids ``(2, P)``."""
        pairs = as_expected("pairs", pairs, (2, "P"), kind="integers", like=self.factors)
        return _inner(self.factors, pairs)

    @torch.no_grad()
    def sample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """One graph; graphs differ in their number of edges, so several are no tensor."""
        if self._extended_shape(as_shape(sample_shape))[:-2].numel() != 1:
            raise NotImplementedError("graphs differ in their number of edges: sample one by one")
        (factors,), provenance = untracked(self.factors)
        factors = factors.reshape(-1, *factors.shape[-2:])[0]
        edges = []
        for start, rows, columns in _blocks(factors):
            edges.append(torch.bernoulli((rows @ columns.T).sigmoid()).triu(1).nonzero().T + start)
        pairs = torch.cat(edges, 1)
        return track_provenance(torch.cat([pairs, pairs.flip(0)], 1), provenance)

    def log_prob(self, value: Tensor) -> Tensor:
        """Self-loops and repetitions of edges are ignored."""
        (factors, value), provenance = untracked(self.factors, value)
        x = _inner(factors, observed_edges(value, self.num_nodes, self.held_out))
        flat = flatten(factors, factors.shape[:-2], 2)
        pairs = torch.stack([_AllPairs.apply(f) for f in flat]).view(factors.shape[:-2])
        norms = factors.square().sum(-1)
        loops = F.softplus(norms)
        if self.loops:
            loops = loops + self.weight * F.logsigmoid(norms)
        log_prob = (self.weight * F.logsigmoid(x) + F.softplus(x)).sum(-1) - pairs
        if self.held_out is not None:
            log_prob = log_prob + F.softplus(_inner(factors, self.held_out)).sum(-1)
        log_prob = log_prob + 0.5 * loops.sum(-1)
        return track_provenance(log_prob.expand(self.batch_shape), provenance)

    @torch.no_grad()
    def swaps(self, value: Tensor, others: Tensor, num_columns: int | None = None) -> Tensor:
        """``(N,)``: the change of ``log_prob(value)`` if node ``i`` alone had the vector
        :math:`g_i` of ``others`` ``(N, D)``. ``num_columns`` gives an unbiased estimate from all
        edges and the pairs of so many random nodes, at :math:`O(N D)` each.
        """
        expect("others", others, kind="float")
        if num_columns is not None:
            check_integers(1, num_columns=num_columns)
        (factors, others), _ = untracked(self.factors, others)
        if factors.dim() > 2 or others.shape != factors.shape:
            got = f"{tuple(others.shape)} and {tuple(factors.shape)}"
            raise ValueError(f"others must have the shape (N, D) of factors, got {got}")
        columns, scale = torch.arange(self.num_nodes, device=factors.device), 1.0
        if num_columns is not None and num_columns < self.num_nodes:
            columns = torch.randperm(self.num_nodes, device=factors.device)[:num_columns]
            scale = self.num_nodes / num_columns
        edges = observed_edges(value, self.num_nodes, self.held_out)
        hidden = edges[:, :0] if self.held_out is None else self.held_out
        both, hidden = (torch.cat([pairs, pairs.flip(0)], 1) for pairs in (edges, hidden))
        chosen, size = factors[columns], max(1, BLOCK // len(columns))

        def score(vectors: Tensor) -> Tensor:
            rows = vectors.split(size)
            total = -scale * torch.cat([F.softplus(row @ chosen.T).sum(1) for row in rows])
            total[columns] += scale * F.softplus((vectors[columns] * chosen).sum(1))
            x, y = ((vectors[i] * factors[j]).sum(1) for i, j in (both, hidden))
            total.index_add_(0, both[0], self.weight * F.logsigmoid(x) + F.softplus(x))
            total.index_add_(0, hidden[0], F.softplus(y))
            if self.loops:
                total += 0.5 * self.weight * F.logsigmoid(vectors.square().sum(1))
            return total

        return score(others) - score(factors)


def _undirected_pairs(pairs: Tensor, num_nodes: int, name: str) -> Tensor:
    """``(2, P)`` with the smaller node first, each pair once, without self-loops; sorted."""
    expect(name, pairs, (2, "P"), kind="integers")
    check_range(name, pairs, num_nodes)
    return _distinct(pairs.long().sort(0).values, num_nodes)


def observed_edges(edge_index: Tensor, num_nodes: int, held_out: Tensor | None) -> Tensor:
    """``(2, E)``: as :func:`_undirected_pairs`, the edges that are not held out."""
    edges = _undirected_pairs(edge_index, num_nodes, "edge_index")
    if 2 * edges.shape[1] != _distinct(edge_index.long(), num_nodes).shape[1]:
        raise ValueError("edge_index needs both directions of every edge: use PyG's to_undirected")
    if held_out is None:
        return edges
    hidden = _undirected_pairs(held_out, num_nodes, "held_out")
    return edges[:, ~torch.isin(*(pairs[0] * num_nodes + pairs[1] for pairs in (edges, hidden)))]


def _distinct(pairs: Tensor, num_nodes: int) -> Tensor:
    return coalesce(remove_self_loops(pairs)[0], num_nodes=num_nodes)


def _inner(factors: Tensor, pairs: Tensor) -> Tensor:
    """``(..., P)``: inner products of pairs of rows."""
    return torch.mul(*(rows_at(factors, nodes) for nodes in pairs)).sum(-1)


def _blocks(factors: Tensor):
    """Blocks of all pairs i <= j: the first node, its block's rows, and the columns from it on."""
    size = max(1, BLOCK // len(factors))
    for start in range(0, len(factors), size):
        yield start, factors[start : start + size], factors[start:]


class _AllPairs(torch.autograd.Function):
    r""":math:`\sum_{i < j} \log(1 + e^{f_i^\top f_j}) + \frac12 \sum_i` of the same with i = j."""

    @staticmethod
    def forward(ctx, factors: Tensor) -> Tensor:
        total = torch.zeros((), dtype=torch.double, device=factors.device)
        grad = torch.zeros_like(factors)
        for start, rows, columns in _blocks(factors):
            x = rows @ columns.T
            p = x.sigmoid()
            # Pairs within the block stand there twice.
            x_within, p_within = x[:, : len(rows)], p[:, : len(rows)]
            total += _softplus_sum(x, p) - 0.5 * _softplus_sum(x_within, p_within)
            p_within *= 0.5
            grad[start : start + len(rows)] += p @ columns
            grad[start:] += p.T @ rows
        ctx.save_for_backward(grad)
        return total.to(factors)

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream: Tensor):
        (grad,) = ctx.saved_tensors
        return upstream * grad


def _softplus_sum(x: Tensor, p: Tensor) -> Tensor:
    r"""Sum of :math:`\log(1 + e^x) = \max(x, 0) - \log \max(p, 1 - p)`, :math:`p = \sigma(x)`."""
    factors = (p - 0.5).abs_().add_(0.5)
    # Few logarithms: products of 64 factors that are at least a half do not underflow.
    logs = [part.prod(0).log().sum(dtype=torch.double) for part in factors.split(64)]
    return x.relu().sum(1).sum(dtype=torch.double) - torch.stack(logs).sum()
