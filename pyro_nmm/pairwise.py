# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

r"""Single and pair marginals of a Neighbor Mixture Model in closed form."""

from __future__ import annotations

import torch
from torch import Tensor

from pyro_nmm.neighborhood import Neighborhood


def node_marginals(hood: Neighborhood, alpha: Tensor, attention: Tensor) -> Tensor:
    r"""
    :math:`u_i = p(y_i) = \sum_{j \in n(i)} L_{ij} \alpha_j / A_j`.

    :param Tensor alpha: ``(..., N, C)``.
    :param Tensor attention: ``(..., num_edges)``, :math:`L_{ij}`.
    :return: ``(..., num_rows, C)``. Cost: :math:`O(E C)`.
    """
    mean = alpha / alpha.sum(-1, keepdim=True)
    messages = attention.unsqueeze(-1) * mean.index_select(-2, hood.source)
    size = (*messages.shape[:-2], hood.num_rows, messages.shape[-1])
    return messages.new_zeros(size).index_add(-2, hood.row, messages)


def pair_marginals(hood: Neighborhood, alpha: Tensor, attention: Tensor, pairs: Tensor) -> Tensor:
    r"""
    .. math::

        p(y_i = a, y_j = b) = u_{ia} u_{jb} + \sum_{m \in n(i) \cap n(j)}
            L_{im} L_{jm} \mathrm{Cov}(z_{ma}, z_{mb})

    with :math:`\mathrm{Cov}(z_{ma}, z_{mb}) = (\delta_{ab} \mu_{ma} - \mu_{ma} \mu_{mb}) /
    (A_m + 1)` and :math:`\mu_m = \alpha_m / A_m`. A node paired with itself has the diagonal
    table of its own marginal.

    :param Tensor pairs: ``(2, P)`` node ids; ``hood`` must hold all nodes' rows.
    :return: ``(..., P, C, C)``. Cost: :math:`O(E C)` and, for each pair, the smaller degree.
    """
    marginals = node_marginals(hood, alpha, attention)
    first, second = (marginals.index_select(-2, nodes) for nodes in pairs)
    table = first.unsqueeze(-1) * second.unsqueeze(-2)

    pair, edge_i, edge_j = common_neighbors(hood, pairs)
    node = hood.source[edge_i]
    concentration = alpha.index_select(-2, node)
    total = concentration.sum(-1, keepdim=True)
    mean = concentration / total
    both = (attention[..., edge_i] * attention[..., edge_j]).unsqueeze(-1) / (total + 1)
    table = table.index_add(-3, pair, torch.diag_embed(both * mean))
    table = table.index_add(-3, pair, -(both * mean).unsqueeze(-1) * mean.unsqueeze(-2))
    return torch.where((pairs[0] == pairs[1])[:, None, None], torch.diag_embed(first), table)


def expected_interaction(
    hood: Neighborhood,
    alpha: Tensor,
    attention: Tensor,
    marginals: Tensor,
    pairs: Tensor,
    interaction: Tensor,
) -> Tensor:
    r"""
    :math:`E[\phi(y_i, y_j)]` for every pair, without their tables:

    .. math::

        u_i^\top \phi \, u_j + \sum_{m \in n(i) \cap n(j)} L_{im} L_{jm}
            \frac{\sum_a \phi_{aa} \mu_{ma} - \mu_m^\top \phi \, \mu_m}{A_m + 1}

    :param Tensor marginals: ``(..., N, C)``, :math:`u` of :func:`node_marginals`.
    :param Tensor pairs: ``(2, P)`` node ids, two different nodes each.
    :param Tensor interaction: ``(C, C)``, :math:`\phi`.
    :return: ``(..., P)``. Cost: :math:`O(E C + N C^2)` and, for each pair, the smaller degree.
    """
    first, second = (marginals.index_select(-2, nodes) for nodes in pairs)
    total = alpha.sum(-1)
    mean = alpha / total.unsqueeze(-1)
    shared = mean @ interaction.diagonal() - ((mean @ interaction) * mean).sum(-1)
    shared = shared / (total + 1)

    pair, edge_i, edge_j = _remembered_neighbors(hood, pairs)
    weight = attention.index_select(-1, edge_i) * attention.index_select(-1, edge_j)
    weight = weight * shared.index_select(-1, hood.source.index_select(0, edge_i))
    expected = ((first @ interaction) * second).sum(-1)
    return expected.index_add(-1, pair, weight)


def _remembered_neighbors(hood: Neighborhood, pairs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`common_neighbors`, kept for a loop that asks for the same pairs at every step."""
    if pairs.is_inference():
        return common_neighbors(hood, pairs)
    last = hood.memo.get("common_neighbors")
    if last is None or last[0] is not pairs or last[1] != pairs._version:
        with torch.inference_mode(False):  # what is kept must serve a training step too
            found = common_neighbors(hood, pairs)
        last = hood.memo["common_neighbors"] = pairs, pairs._version, found
    return last[2]


def common_neighbors(hood: Neighborhood, pairs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """
    Every node that is a neighbour of both nodes of a pair, as the triple: number of the
    pair, edge to its first node, edge to its second node.
    """
    degree = hood.ptr.diff()
    swap = degree[pairs[0]] > degree[pairs[1]]
    small, large = pairs.flip(0).where(swap, pairs)
    rows = hood.take(small)
    wanted = large[rows.row] * hood.num_nodes + rows.source
    keys = hood.row * hood.num_nodes + hood.source
    found = torch.searchsorted(keys, wanted).clamp(max=len(keys) - 1)
    hit = keys[found] == wanted
    pair, edge, other = rows.row[hit], rows.edge[hit], found[hit]
    return pair, other.where(swap[pair], edge), edge.where(swap[pair], other)
