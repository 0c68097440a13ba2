# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

import torch
from pyro.ops.provenance import track_provenance
from torch import Tensor

from pyro_nmm.caching import derived
from pyro_nmm.concentrations import Concentrations, written_out
from pyro_nmm.distributions.base import GraphDistribution
from pyro_nmm.graph_arguments import check_label_range, check_labels, check_pairs
from pyro_nmm.neighborhood import Neighborhood
from pyro_nmm.ops.intervals import Intervals, label_intervals
from pyro_nmm.ops.marginals import node_log_probs, node_marginals, pair_marginals
from pyro_nmm.provenance import untracked
from pyro_nmm.relabel import Channel, taken


class ClosedForms(GraphDistribution):
    """Exact queries of a :class:`~pyro_nmm.NeighborMixture`, linear in the graph."""

    hood: Neighborhood
    alpha: Concentrations
    logits: Tensor
    channel: Channel
    num_classes: int

    @derived
    def attention(self) -> Tensor:
        r"""``(..., num_edges)``: :math:`L_{ij}`."""
        return self.hood.softmax(self.logits)

    @derived
    def table(self) -> Tensor:
        """``(..., N, C)``: :math:`\\alpha`, written out."""
        return written_out(self.alpha)

    def marginals(self) -> Tensor:
        """``(..., N, C)``: the exact distribution of every node's label. Cost: :math:`O(E C)`."""
        marginals = node_marginals(self.hood, self.table, self.attention, self.channel)
        return marginals.expand(*self.batch_shape, -1, -1)

    def node_log_probs(self, y: Tensor) -> Tensor:
        r"""
        ``(..., N)``: :math:`\log p(y_i)` of every node alone, for labels ``(..., N)``, in nats.
        Cost: :math:`O(E)` and, for the sums of ``alpha``, :math:`O(N C)`.
        """
        y = check_labels(self.hood, y, self.hood.num_nodes)
        check_label_range(self.hood, y, self.num_classes)
        if not self.channel.keeps:
            marginals = self.marginals()
            shape = torch.broadcast_shapes(marginals.shape[:-1], y.shape)
            return taken(marginals.expand(*shape, -1), y.expand(shape)).log()
        (alpha, logits), provenance = untracked(self.alpha, self.logits)
        log_probs = node_log_probs(self.hood, alpha, self.hood.softmax(logits), y)
        # A sum over a plate has a term for each element of the batch.
        batch = torch.broadcast_shapes(self.batch_shape, y.shape[:-1])
        return track_provenance(log_probs.expand(*batch, -1), provenance)

    def intervals(self, level: float = 0.9) -> Intervals:
        r"""
        Every node's mean label and an interval of ordered labels, such as grey levels, with half of
        ``1 - level`` beyond each end. A label ``k`` is spread over ``k - 0.5`` to ``k + 0.5``,
        because whole numbers would cover more than ``level``.

        >>> from pyro_nmm import LogisticConcentrations, NeighborMixture
        >>> hood = Neighborhood.grid(1, 2)
        >>> alpha = LogisticConcentrations(torch.tensor([50.0, 60.0]), width=5.0)
        >>> found = NeighborMixture(hood, alpha, torch.zeros(4)).intervals()
        >>> found.low, found.high
        (tensor([38.2154, 38.2154]), tensor([71.9486, 71.9486]))

        :return: ``mean``, ``low`` and ``high``, each ``(..., N)``. Cost: :math:`O(E C)`.
        """
        self._check_keeps("intervals")
        found = label_intervals(self.hood, self.alpha, self.attention, level)
        return Intervals(*(part.expand(*self.batch_shape, -1) for part in found))

    def pairwise(self, pairs: Tensor) -> Tensor:
        """
        ``(..., P, C, C)``: exact joint distributions of the labels of pairs of node ids ``(2, P)``,
        the first node's label first. Cost: :math:`O(E C)` for the edges into these nodes, and
        :math:`O(C^2)` for each common neighbour of a pair.
        """
        check_pairs(self.hood, pairs)
        tables = pair_marginals(self.hood, self.table, self.logits, pairs, self.channel)
        return tables.expand(*self.batch_shape, -1, -1, -1)

    def _check_keeps(self, query: str) -> None:
        if not self.channel.keeps:
            raise ValueError(f"{query} is for edges that keep labels: leave out relabel")
