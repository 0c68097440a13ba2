# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Marginals of nodes and of pairs of nodes, linear in the edges."""

import torch
from torch import Tensor

from pyro_nmm.blocks import blocks, for_rows
from pyro_nmm.neighborhood import Neighborhood, compact
from pyro_nmm.relabel import KEEP, Channel


def node_marginals(
    hood: Neighborhood, alpha: Tensor, attention: Tensor, channel: Channel = KEEP
) -> Tensor:
    r"""``(..., num_rows, C)``: :math:`u_i = \sum_{j \in n(i)} L_{ij} \alpha_j / A_j`."""
    return spread(hood, alpha / alpha.sum(-1, keepdim=True), attention, channel)


def spread(hood: Neighborhood, mean: Tensor, attention: Tensor, channel: Channel = KEEP) -> Tensor:
    """:func:`node_marginals` from the sources' means ``(..., N, C)``."""
    batch = torch.broadcast_shapes(mean.shape[:-2], attention.shape[:-1], channel.batch_shape)
    marginals = mean.new_zeros(*batch, hood.num_rows, mean.shape[-1])
    numbers = batch.numel() * mean.shape[-1]
    # With gradients few blocks are better, because each has a whole gradient of its own.
    cached = mean.device.type == "cpu" and not mean.requires_grad
    mean = for_rows(mean)
    for part in blocks(hood.num_edges, numbers, cached):
        messages = channel.of(part).push(mean.index_select(-2, hood.source[part]))
        marginals = marginals.index_add_(-2, hood.row[part], attention[..., part, None] * messages)
    return marginals


class PairRows:
    r"""The rows, sources and common neighbours of pairs ``(2, P)`` of node ids, which give

    .. math::

        p(y_i = a, y_j = b) = u_{ia} u_{jb} + \sum_{m \in n(i) \cap n(j)}
            L_{im} L_{jm} \mathrm{Cov}(z_{ma}, z_{mb})

    with :math:`\mathrm{Cov}(z_{ma}, z_{mb}) = (\delta_{ab} \mu_{ma} - \mu_{ma} \mu_{mb}) /
    (A_m + 1)` and :math:`\mu_m = \alpha_m / A_m`. A node with itself has a diagonal table.
    """

    nodes: Tensor  #: ``(R,)`` node ids of the pairs
    pairs: Tensor  #: ``(2, P)`` the pairs, as places in ``nodes``
    rows: Neighborhood  #: the nodes' rows, whose sources are places in ``sources``
    sources: Tensor  #: ``(M,)`` node ids

    def __init__(self, hood: Neighborhood, pairs: Tensor) -> None:
        self.nodes, self.pairs = pairs.unique(return_inverse=True)
        self.rows, self.sources = compact(hood.take(self.nodes))
        self.common = self.rows.common_neighbors(self.pairs)

    def separate(self, pairs: Tensor) -> None:
        """Leave out the common neighbours of some pairs ``(P,)``."""
        pair, first, second = self.common
        keep = ~pairs[pair]
        self.common = pair[keep], first[keep], second[keep]

    def numbers(self, num_classes: int) -> int:
        """How many numbers :meth:`tables` holds for each batch entry, without edges."""
        sizes = len(self.nodes) + len(self.sources), self.pairs.shape[1] * num_classes
        return sum(sizes) * num_classes

    def tables(self, alpha: Tensor, attention: Tensor, probs: Tensor, channel: Channel) -> Tensor:
        """``(..., P, C, C)``: joint distributions, by ``alpha`` of ``sources``."""
        first, second = (probs.index_select(-2, places) for places in self.pairs)
        table = first.unsqueeze(-1) * second.unsqueeze(-2)
        numbers = table[..., 0, :, :].numel()
        for part in blocks(len(self.common[0]), numbers):
            pair, edge_i, edge_j = (places[part] for places in self.common)
            concentration = alpha.index_select(-2, self.rows.source[edge_i])
            total = concentration.sum(-1, keepdim=True)
            mean = concentration / total
            both = (attention[..., edge_i] * attention[..., edge_j]).unsqueeze(-1) / (total + 1)
            shared = -(both * mean).unsqueeze(-1) * mean.unsqueeze(-2)
            shared.diagonal(dim1=-2, dim2=-1).add_(both * mean)
            table = table.index_add_(-3, pair, channel.push_tables(edge_i, edge_j, shared))
        same = (self.pairs[0] == self.pairs[1])[:, None, None]
        return torch.where(same, torch.diag_embed(first), table)


def pair_marginals(
    hood: Neighborhood, alpha: Tensor, logits: Tensor, pairs: Tensor, channel: Channel = KEEP
) -> Tensor:
    """``(..., P, C, C)``: joint distributions of pairs of labels, see :class:`PairRows`."""
    tables = []
    batch = torch.broadcast_shapes(alpha.shape[:-2], logits.shape[:-1], channel.batch_shape)
    for part in blocks(pairs.shape[1], batch.numel() * alpha.shape[-1] ** 2):
        near = PairRows(hood, pairs[:, part])
        local_alpha = alpha.index_select(-2, near.sources)
        attention = near.rows.softmax(logits.index_select(-1, near.rows.edge))
        change = channel.of(near.rows.edge)
        marginals = node_marginals(near.rows, local_alpha, attention, change)
        tables.append(near.tables(local_alpha, attention, marginals, change))
    return torch.cat(tables, -3)


def expected_interaction(
    hood: Neighborhood,
    alpha: Tensor,
    attention: Tensor,
    marginals: Tensor,
    pairs: Tensor,
    interaction: Tensor,
) -> Tensor:
    r"""``(..., P)``: :math:`E[\phi(y_i, y_j)]` for pairs of different nodes, without their tables,

    .. math::

        u_i^\top \phi \, u_j + \sum_{m \in n(i) \cap n(j)} L_{im} L_{jm}
            \frac{\sum_a \phi_{aa} \mu_{ma} - \mu_m^\top \phi \, \mu_m}{A_m + 1} ,

    for marginals :math:`u`, :math:`\phi` ``(C, C)``. Cost: :math:`O(N C^2)`, and degrees.
    """
    first, second = (marginals.index_select(-2, nodes) for nodes in pairs)
    total = alpha.sum(-1)
    mean = alpha / total.unsqueeze(-1)
    shared = mean @ interaction.diagonal() - ((mean @ interaction) * mean).sum(-1)
    shared = shared / (total + 1)

    pair, edge_i, edge_j = hood.common_neighbors(pairs)
    weight = attention.index_select(-1, edge_i) * attention.index_select(-1, edge_j)
    weight = weight * shared.index_select(-1, hood.source.index_select(0, edge_i))
    return ((first @ interaction) * second).sum(-1).index_add(-1, pair, weight)
