# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Communities and links of a graph: the latent feature model, as a Pyro program."""

import pyro
import torch
from pyro import poutine
from pyro.distributions import Bernoulli, Normal
from torch import Tensor, nn
from torch.nn import functional as F

from pyro_nmm import InnerProductGraph
from pyro_nmm.arguments import check_integers, check_positive, expect
from pyro_nmm.caching import LastCall
from pyro_nmm.distributions.memberships import StickShares, relaxed_logits, stick_logits
from pyro_nmm.models.networks import register


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
    features as much as the graph: the bound is the authors' objective times :math:`-N^2`.
    ``balanced=False`` gives the model's own density. Cost: :math:`O(N^2)` time,
    :math:`O(N (K + F))` memory.

    :param int num_nodes: ``N``.
    :param int num_communities: ``K``, at most; the sticks switch off the others.
    :param int num_features: ``F``, or 0 for a model without features.
    :param tuple hidden: widths of the MLP's hidden layer and of :math:`f`.
    :param float concentration: :math:`a`, of the order of a node's number of communities.
    :param float temperature: of the relaxed prior of ``s``.
    """

    def __init__(
        self, num_nodes: int, num_communities: int = 50, num_features: int = 0, *,
        hidden: tuple[int, int] = (32, 16), concentration: float = 10.0, temperature: float = 0.5,
        balanced: bool = True, name: str = "dglfrm",
    ) -> None:  # fmt: skip
        super().__init__()
        check_integers(1, num_nodes=num_nodes, num_communities=num_communities)
        check_integers(0, num_features=num_features)
        check_positive(concentration=concentration, temperature=temperature)
        self.num_nodes, self.num_communities = self.shape = num_nodes, num_communities
        self.num_features, self.balanced, self.name = num_features, balanced, name
        self.concentration, self.temperature = concentration, temperature
        first, second = nn.Linear(num_communities, hidden[0]), nn.Linear(*hidden)
        self._last_ones = LastCall()
        self.decoder = nn.Sequential(first, nn.LeakyReLU(0.2), second)
        self.features = nn.Linear(num_communities, num_features) if num_features else None
        for layer in filter(None, (first, second, self.features)):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)

    def model(
        self, edge_index: Tensor | None = None, x: Tensor | None = None,
        held_out: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """The edges, ``(2, num_edges)``.

        :param Tensor edge_index: both directions of every edge.
        :param Tensor x: ``(N, F)`` zeros and ones, dense or ``torch.sparse_csr``.
        :param Tensor held_out: ``(2, P)`` pairs that are left out, in any direction.
        """
        register(self.name, self)
        return self.given(self.sticks(), edge_index, x, held_out)

    def sticks(self) -> Tensor:
        """Site ``v``."""
        # Beta(a, 1), whose density here has no Gamma function to compute.
        zero = next(self.parameters()).new_zeros(())
        prior = StickShares(zero + self.concentration, zero + 1.0)
        return pyro.sample("v", prior.expand(self.shape).to_event(2))

    def given(
        self, v: Tensor, edge_index: Tensor | None = None, x: Tensor | None = None,
        held_out: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """What depends on the sticks: sites ``s``, ``r``, ``x`` and ``edges``."""
        self._check_features(x)
        s = pyro.sample("s", relaxed_logits(stick_logits(v), self.temperature).to_event(2))
        zero = next(self.parameters()).new_zeros(())
        r = pyro.sample("r", Normal(zero, zero + 1.0).expand(self.shape).to_event(2))
        members = s.sigmoid() * r
        if self.features is not None and x is not None and self.balanced:
            pyro.factor("x", self._log_features(members, x).sum(-1))
        elif self.features is not None:
            obs = None if x is None else x.to_dense()
            pyro.sample("x", Bernoulli(logits=self.features(members)).to_event(2), obs=obs)
        graph, scale = self._graph(members, edge_index, held_out)
        with poutine.scale(scale=scale):
            return pyro.sample("edges", graph, obs=edge_index)

    @torch.no_grad()
    def swaps(
        self, v: Tensor, s: Tensor, r: Tensor, others: Tensor, edge_index: Tensor,
        x: Tensor | None = None, held_out: Tensor | None = None, num_columns: int | None = None,
    ) -> Tensor:  # fmt: skip
        """``(N,)``: the change of the log-density of :meth:`given` if one node has its row of
        ``others`` in place of ``s``; ``num_columns`` as for
        :meth:`~pyro_nmm.InnerProductGraph.swaps`.
        """
        prior = relaxed_logits(stick_logits(v), self.temperature)
        members, swapped = s.sigmoid() * r, others.sigmoid() * r
        graph, scale = self._graph(members, edge_index, held_out)
        change = scale * graph.swaps(edge_index, self.decoder(swapped), num_columns)
        change = change + (prior.log_prob(others) - prior.log_prob(s)).sum(-1)
        if self.features is not None and x is not None:
            columns = None
            if num_columns is not None and num_columns < self.num_features:
                columns = torch.randperm(self.num_features, device=x.device)[:num_columns]
            both = self._log_features(torch.stack([members, swapped]), x, columns)
            change = change + both[1] - both[0]
        return change

    def link_logits(self, members: Tensor, pairs: Tensor) -> Tensor:
        """``(..., P)``: log-odds of pairs ``(2, P)`` for ``members``, :math:`b \\odot r`."""
        return InnerProductGraph(self.decoder(members)).pair_logits(pairs)

    def _graph(
        self, members: Tensor, edge_index: Tensor | None, held_out: Tensor | None
    ) -> tuple[InnerProductGraph, float]:
        """The distribution of the edges, and the scale of its density."""
        weight = scale = 1.0
        if self.balanced and edge_index is not None:
            size, hidden = self.num_nodes, 0 if held_out is None else held_out.shape[1]
            weight = InnerProductGraph.balance(edge_index, size, held_out, loops=True)
            # N^2 / (N^2 - entries of edges), and N^2 / entries that are read. The authors count a
            # held-out pair as one entry, although both of its entries are left out here.
            scale = (1 + 1 / weight) * size**2 / (size**2 - hidden)
        factors = self.decoder(members)
        return InnerProductGraph(factors, weight, held_out, loops=self.balanced), scale

    def _check_features(self, x: Tensor | None) -> None:
        if x is None:
            return
        expect("x", x, (self.num_nodes, self.num_features), note="(num_nodes, num_features)")
        if pyro.settings.get("validate_distributions_pyro"):
            values = x if x.layout == torch.strided else x.values()
            if not ((values == 0) | (values == 1)).all() or not values.any():
                raise ValueError("x must hold zeros and ones, not only zeros: for counts, (x > 0)")

    def _log_features(self, members: Tensor, x: Tensor, columns: Tensor | None = None) -> Tensor:
        """``(..., N)``: of every node's features, weighted if ``balanced``; or of some of them."""
        assert self.features is not None
        rows, features = self._last_ones.get((x,), lambda: _ones(x))
        weight, scale = 1.0, 1.0
        if self.balanced:
            weight, scale = (x.numel() - len(rows)) / len(rows), self.num_nodes / self.num_features
        layer, width = self.features, self.num_features
        if columns is None:
            logits = layer(members)
        else:
            logits = F.linear(members, layer.weight[columns], layer.bias[columns])
            place = features.new_full((width,), -1)
            place[columns] = torch.arange(len(columns), device=columns.device)
            rows, features = rows[place[features] >= 0], place[features]
            features = features[features >= 0]
            scale, width = scale * width / len(columns), len(columns)
        ones = logits.flatten(-2).index_select(-1, rows * width + features)
        gain = weight * F.logsigmoid(ones) + F.softplus(ones)
        return scale * (-F.softplus(logits).sum(-1)).index_add(-1, rows, gain)


def _ones(x: Tensor) -> Tensor:
    """``(2, number)``: rows and columns of the ones."""
    entries = x.to_sparse_coo()
    return entries.indices()[:, entries.values() != 0]
