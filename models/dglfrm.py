# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Communities and links of a graph: the latent feature model, as a Pyro program."""

from collections.abc import Iterator, Sequence
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.distributions import Bernoulli, Kumaraswamy, Normal
from pyro.ops.provenance import track_provenance
from torch import Size, Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributions import constraints, register_kl
from torch.nn import functional as F

from pyro_nmm.arguments import check_integers, check_positive, check_range, expect
from pyro_nmm.blocks import rows_at
from pyro_nmm.distributions.base import GraphDistribution, flatten
from pyro_nmm.distributions.memberships import relaxed_logits
from pyro_nmm.models.networks import register
from pyro_nmm.provenance import untracked

#: Numbers of a block of the matrix of all pairs: it stays in the cache.
BLOCK = 2**20
#: Of the relaxed prior of the memberships, by the authors.
TEMPERATURE = 0.5


class DGLFRM(nn.Module):
    r"""The deep generative latent feature relational model (Mehta, Carin and Rai, 2019, "Stochastic
    Blockmodels meet Graph Neural Networks", ICML), a Pyro program for graphs with communities:

    .. math::

        v_{ik} &\sim \mathrm{Beta}(a, 1), \quad \pi_{ik} = \prod_{m \le k} v_{im} \\
        b_{ik} &\sim \mathrm{Bernoulli}(\pi_{ik}), \quad r_{ik} \sim \mathrm{Normal}(0, 1) \\
        f_i &= \mathrm{MLP}(b_i \odot r_i) \\
        A_{ij} &\sim \mathrm{Bernoulli}(\sigma(f_i^\top f_j)) \\
        X_i &\sim \mathrm{Bernoulli}(\sigma(W (b_i \odot r_i) + w))

    Sites are ``v``, ``s``, ``r`` ``(N, K)``, ``x`` ``(N, F)`` and ``edges``, an ``edge_index``. The
    memberships are relaxed: :math:`b = \sigma(s)`. Without data it samples graphs from the prior:

    >>> DGLFRM(num_nodes=6, num_communities=4).model().shape[0]  # an edge_index
    2

    With data, edges weigh as much as other pairs, ones of the features as much as zeros, and the
    features as much as the graph: the bound is the authors' objective times :math:`-N^2`. Cost:
    :math:`O(N^2)` time, :math:`O(N (K + F))` memory.

    :param int num_nodes: ``N``.
    :param int num_communities: ``K``, at most; the sticks switch off the others.
    :param int num_features: ``F``, or 0 for a model without features.
    :param tuple hidden: widths of the MLP's hidden layer and of :math:`f`.
    :param float concentration: :math:`a`, of the order of a node's number of communities.
    :param str name: of the parameters in Pyro's store.
    :raises ValueError: for a number below one; in :meth:`model` for features other than zeros and
        ones, edges in one direction only, and no or all pairs as edges.
    """

    def __init__(
        self,
        num_nodes: int,
        num_communities: int = 50,
        num_features: int = 0,
        *,
        hidden: tuple[int, int] = (32, 16),
        concentration: float = 10.0,
        name: str = "dglfrm",
    ) -> None:
        super().__init__()
        check_integers(1, num_nodes=num_nodes, num_communities=num_communities)
        check_integers(0, num_features=num_features)
        check_positive(concentration=concentration)
        self.num_nodes, self.num_communities = self.shape = num_nodes, num_communities
        self.num_features, self.concentration, self.name = num_features, concentration, name
        first, second = nn.Linear(num_communities, hidden[0]), nn.Linear(*hidden)
        self.decoder = nn.Sequential(first, nn.LeakyReLU(0.2), second)
        self.features = nn.Linear(num_communities, num_features) if num_features else None
        for layer in filter(None, (first, second, self.features)):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)

    def model(
        self,
        edge_index: Tensor | None = None,
        x: Tensor | None = None,
        held_out: Tensor | None = None,
    ) -> Tensor:
        """The edges, ``(2, num_edges)``.

        :param Tensor edge_index: both directions of every edge.
        :param Tensor x: ``(N, F)`` zeros and ones, dense or ``torch.sparse_csr``.
        :param Tensor held_out: ``(2, P)`` pairs that are left out, in any direction.
        """
        register(self.name, self)
        if x is not None:
            self._check_features(x)
        zero = next(self.parameters()).new_zeros(())
        prior = StickShares(zero + self.concentration, zero + 1.0)
        v = pyro.sample("v", prior.expand(self.shape).to_event(2))
        s = pyro.sample("s", relaxed_logits(stick_logits(v), TEMPERATURE).to_event(2))
        r = pyro.sample("r", Normal(zero, zero + 1.0).expand(self.shape).to_event(2))
        members = s.sigmoid() * r
        if self.features is not None and x is not None:
            pyro.factor("x", self._log_features(members, x).sum(-1))
        elif self.features is not None:
            pyro.sample("x", Bernoulli(logits=self.features(members)).to_event(2))
        graph, scale = self._graph(members, edge_index, held_out)
        with poutine.scale(scale=scale):
            return pyro.sample("edges", graph, obs=edge_index)

    @torch.no_grad()
    def swaps(
        self,
        draws: tuple[Tensor, Tensor, Tensor, Tensor],
        data: tuple[Tensor, Tensor | None, Tensor | None],
        num_columns: int,
    ) -> Tensor:
        """``(N,)``: the change of the log-density of :meth:`model` if one node has its row of
        ``others`` in place of ``s``. It is estimated without bias from all edges, and from the
        pairs with so many random nodes and features, at :math:`O(N K)` each.

        :param tuple draws: ``v``, ``s``, ``r`` and ``others``.
        :param tuple data: ``edge_index``, ``x`` and ``held_out``.
        """
        (v, s, r, others), (edge_index, x, held_out) = draws, data
        prior = relaxed_logits(stick_logits(v), TEMPERATURE)
        members, swapped = s.sigmoid() * r, others.sigmoid() * r
        graph, scale = self._graph(members, edge_index, held_out)
        change = scale * graph.swaps(edge_index, self.decoder(swapped), num_columns)
        change = change + (prior.log_prob(others) - prior.log_prob(s)).sum(-1)
        if self.features is not None and x is not None:
            columns: Any = slice(None)
            if num_columns < self.num_features:
                columns = torch.randperm(self.num_features, device=x.device)[:num_columns]
            old, new = (self._log_features(part, x, columns) for part in (members, swapped))
            change = change + new - old
        return change

    def _graph(
        self, members: Tensor, edge_index: Tensor | None, held_out: Tensor | None
    ) -> tuple["InnerProductGraph", float]:
        """The distribution of the edges, and the scale of its density."""
        weight = scale = 1.0
        if edge_index is not None:
            size, hidden = self.num_nodes, 0 if held_out is None else held_out.shape[1]
            # Loops count as edges.
            ones = 2 * observed_edges(edge_index, size, held_out).shape[1] + size
            if not size < ones < size**2:
                raise ValueError("edge_index must hold some but not all pairs that are observed")
            weight = (size**2 - ones) / ones
            # N^2 / (N^2 - entries of edges), and N^2 / entries that are read. The authors count a
            # held-out pair as one entry, although both of its entries are left out here.
            scale = (1 + 1 / weight) * size**2 / (size**2 - hidden)
        return InnerProductGraph(self.decoder(members), weight, held_out), scale

    def _check_features(self, x: Tensor) -> None:
        expect("x", x, (self.num_nodes, self.num_features), note="(num_nodes, num_features)")
        if pyro.settings.get("validate_distributions_pyro"):
            values = x if x.layout == torch.strided else x.values()
            if not ((values == 0) | (values == 1)).all() or not values.any():
                raise ValueError("x must hold zeros and ones, not only zeros: for counts, (x > 0)")

    def _log_features(self, members: Tensor, x: Tensor, columns: Any = slice(None)) -> Tensor:
        """``(..., N)``: the weighted log-density of every node's features, or of some columns."""
        assert self.features is not None
        x = x.to_dense().to(members.dtype)
        weight = (x.numel() - x.sum()) / x.sum()
        logits = F.linear(members, self.features.weight[columns], self.features.bias[columns])
        ones = x[:, columns].expand_as(logits)
        loss = F.binary_cross_entropy_with_logits(logits, ones, pos_weight=weight, reduction="none")
        return -self.num_nodes / ones.shape[-1] * loss.sum(-1)


class StickShares(Kumaraswamy):
    """Kumaraswamy variables with finite densities and derivatives in single precision."""

    def rsample(self, sample_shape=()) -> Tensor:
        shape = self._extended_shape(Size(sample_shape))
        a, b = self.concentration1, self.concentration0
        info = torch.finfo(a.dtype)
        u = torch.rand(shape, dtype=a.dtype, device=a.device).clamp(info.eps, 1 - info.eps)
        # v = (1 - u^(1/b))^(1/a)
        return ((-(u.log() / b).expm1()).log() / a).exp().clamp(info.tiny, 1 - info.eps)

    def log_prob(self, value: Tensor) -> Tensor:
        if self._validate_args:
            self._validate_sample(value)
        a, b = self.concentration1, self.concentration0
        log_v = value.clamp(max=1 - torch.finfo(value.dtype).eps).log()
        return (a * b).log() + (a - 1) * log_v + (b - 1) * (-(a * log_v).expm1()).log()


def stick_logits(v: Tensor) -> Tensor:
    r"""``(..., K)``: finite log-odds of :math:`\pi_k = \prod_{m \le k} v_m`, shares :math:`v`."""
    info = torch.finfo(v.dtype)
    log_pi = v.clamp(info.tiny, 1 - info.eps).log().cumsum(-1)
    return log_pi - (-log_pi.expm1()).log()


@register_kl(StickShares, StickShares)
def _kl_from_beta(p: StickShares, q: StickShares) -> Tensor:
    """Where ``q`` is Beta(alpha, 1), the prior of the sticks (Nalisnick and Smyth, 2017)."""
    a, b, alpha = p.concentration1, p.concentration0, q.concentration1
    share = (a - alpha) / a * (torch.digamma(a.new_ones(())) - torch.digamma(b) - 1 / b)
    return share + (a * b).log() - alpha.log() - (b - 1) / b


class InnerProductGraph(GraphDistribution):
    r"""A random undirected graph whose edges are independent given a vector of every node.

    .. math::

        A_{ij} \sim \mathrm{Bernoulli}\big(\sigma(f_i^\top f_j)\big), \qquad i < j, \qquad
        \log p(A) = \sum_{i < j} w A_{ij} \log \sigma(f_i^\top f_j)
                    + (1 - A_{ij}) \log \sigma(-f_i^\top f_j)
                    + \frac{w}{2} \sum_i \log \sigma(f_i^\top f_i)

    A sample is an ``edge_index`` ``(2, num_edges)`` with both directions of every edge. The weight
    of edges, and each node's pair with itself as half an edge, are from Kipf and Welling (2016,
    "Variational Graph Auto-Encoders").

    Cost: :math:`O(N^2 D)` time and :math:`O(N D)` memory, also for the gradient.

    :param Tensor factors: ``(..., N, D)``, :math:`f`.
    :param float weight: :math:`w`, of edges.
    :param Tensor held_out: ``(2, P)`` pairs, edges or not, that the density leaves out.
    """

    shown = "num_nodes", "weight"

    def __init__(
        self,
        factors: Tensor,
        weight: float,
        held_out: Tensor | None = None,
        *,
        validate_args: bool | None = None,
    ) -> None:
        self.factors, self.weight, self.num_nodes = factors, weight, factors.shape[-2]
        none = torch.empty(2, 0, dtype=torch.long, device=factors.device)
        self.held_out = _pairs("held_out", none if held_out is None else held_out, self.num_nodes)
        # Graphs differ in their number of edges: there is no event shape.
        super().__init__(factors.shape[:-2], Size([2, 0]), validate_args=validate_args)

    @constraints.dependent_property(is_discrete=True, event_dim=2)
    def support(self):
        return constraints.independent(constraints.integer_interval(0, self.num_nodes - 1), 2)

    @torch.no_grad()
    def sample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """One graph; graphs differ in their number of edges, so several are no tensor."""
        if self._extended_shape(Size(sample_shape))[:-2].numel() != 1:
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
        x = inner(factors, observed_edges(value, self.num_nodes, self.held_out))
        flat = flatten(factors, factors.shape[:-2], 2)
        pairs = torch.stack([_AllPairs.apply(f) for f in flat]).view(factors.shape[:-2])
        norms = factors.square().sum(-1)
        loops = F.softplus(norms) + self.weight * F.logsigmoid(norms)
        log_prob = (self.weight * F.logsigmoid(x) + F.softplus(x)).sum(-1) - pairs
        hidden = F.softplus(inner(factors, self.held_out)).sum(-1)
        log_prob = log_prob + hidden + 0.5 * loops.sum(-1)
        return track_provenance(log_prob.expand(self.batch_shape), provenance)

    def swaps(self, value: Tensor, others: Tensor, num_columns: int) -> Tensor:
        """``(N,)``: the change of ``log_prob(value)`` if node ``i`` alone had the vector
        :math:`g_i` of ``others`` ``(N, D)``, estimated from the pairs with random nodes.
        """
        (factors, others), _ = untracked(self.factors, others)
        columns, scale = torch.arange(self.num_nodes, device=factors.device), 1.0
        if num_columns < self.num_nodes:
            columns = torch.randperm(self.num_nodes, device=factors.device)[:num_columns]
            scale = self.num_nodes / num_columns
        edges = observed_edges(value, self.num_nodes, self.held_out)
        both, hidden = (torch.cat([pairs, pairs.flip(0)], 1) for pairs in (edges, self.held_out))
        chosen = factors[columns]

        def score(vectors: Tensor) -> Tensor:
            total = -scale * F.softplus(vectors @ chosen.T).sum(1)
            total[columns] += scale * F.softplus((vectors[columns] * chosen).sum(1))
            x, y = ((vectors[i] * factors[j]).sum(1) for i, j in (both, hidden))
            total.index_add_(0, both[0], self.weight * F.logsigmoid(x) + F.softplus(x))
            total.index_add_(0, hidden[0], F.softplus(y))
            return total + 0.5 * self.weight * F.logsigmoid(vectors.square().sum(1))

        return score(others) - score(factors)


def _pairs(name: str, pairs: Tensor, num_nodes: int) -> Tensor:
    """``(2, P)`` with the smaller node first, each pair once, without self-loops; sorted."""
    from torch_geometric.utils import coalesce, remove_self_loops

    expect(name, pairs, (2, "P"), kind="integers")
    check_range(name, pairs, num_nodes)
    return coalesce(remove_self_loops(pairs.long().sort(0).values)[0], num_nodes=num_nodes)


def observed_edges(edge_index: Tensor, num_nodes: int, held_out: Tensor | None) -> Tensor:
    """``(2, E)``: as :func:`_pairs`, the edges that are not held out."""
    from torch_geometric.utils import coalesce, is_undirected

    edges = _pairs("edge_index", edge_index, num_nodes)
    if not is_undirected(coalesce(edge_index.long(), num_nodes=num_nodes), num_nodes=num_nodes):
        raise ValueError("edge_index needs both directions of every edge: use PyG's to_undirected")
    if held_out is None:
        return edges
    hidden = _pairs("held_out", held_out, num_nodes)
    return edges[:, ~torch.isin(*(pairs[0] * num_nodes + pairs[1] for pairs in (edges, hidden)))]


def inner(factors: Tensor, pairs: Tensor) -> Tensor:
    """``(..., P)``: inner products of pairs of rows."""
    return torch.mul(*(rows_at(factors, nodes) for nodes in pairs)).sum(-1)


def _blocks(factors: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
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
            softplus, within = F.softplus(x), slice(len(rows))
            total += softplus.sum(dtype=torch.double) - 0.5 * softplus[:, within].sum()
            p[:, within] *= 0.5
            grad[start : start + len(rows)] += p @ columns
            grad[start:] += p.T @ rows
        ctx.save_for_backward(grad)
        return total.to(factors)

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream: Tensor):
        (grad,) = ctx.saved_tensors
        return upstream * grad
