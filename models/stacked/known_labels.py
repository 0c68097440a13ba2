# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Nodes whose labels are known, set apart in a mixture whose concentrations know them already."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import one_hot
from torch_geometric.utils import index_to_mask

from pyro_nmm import Neighborhood, NeighborMixture
from pyro_nmm.validation import check_all_rows

#: Concentration of a known label, and of the others: certain in single precision.
SURE, NEVER = 1e6, 1e-6


def set_apart(
    hood: Neighborhood, y: Tensor, known: Tensor, alpha: Tensor, logits: Tensor,
    relabel: Tensor | None = None,
) -> NeighborMixture:  # fmt: skip
    """
    A mixture in which every known node takes its label from a source of its own, which no other
    node may choose. So its label is certain, and tells nothing that ``alpha`` does not say already.

    :param Tensor y: ``(N,)`` labels, read where ``known``, a boolean mask ``(N,)``.
    :param Tensor alpha: ``(M, C)``, of the sources of ``hood``, ``logits`` ``(num_edges,)`` and, if
        edges relabel, matrices ``(num_edges, C, C)``.
    :return: a mixture with one source more for every known node. Cost: :math:`O(E)`.
    """
    check_all_rows(hood)
    matrices = () if relabel is None else (relabel,)
    nodes = known.nonzero()[:, 0]
    if not len(nodes):
        return NeighborMixture(hood, alpha, logits, *matrices)
    # The first edge of a known node's row gives its place to the one from its own source.
    keep, starts = ~known[hood.row], hood.ptr[:-1][nodes]
    keep[starts] = True
    kept, rows = keep.nonzero()[:, 0], hood.ptr.diff().where(~known, 1)
    ptr = torch.cat([rows.new_zeros(1), rows.cumsum(0)])
    new, source = index_to_mask(ptr[:-1][nodes], len(kept)), hood.source[kept]
    source[new] = hood.num_sources + torch.arange(len(nodes), device=nodes.device)
    number = hood.num_sources + len(nodes)
    apart = Neighborhood.of_rows(hood.num_nodes, hood.nodes, ptr, source, num_sources=number)
    labels = one_hot(y[nodes], alpha.shape[1]).to(alpha)
    alpha = torch.cat([alpha, SURE * labels + NEVER])
    logits = logits[kept].masked_fill(new, 0)
    if relabel is not None:
        same = torch.eye(alpha.shape[1]).to(relabel)
        matrices = (torch.where(new[:, None, None], same, relabel[kept]),)
    return NeighborMixture(apart, alpha, logits, *matrices)
