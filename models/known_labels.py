# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Nodes whose labels are known, set apart in a mixture whose concentrations know them already."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from pyro_nmm import Neighborhood, NeighborMixture

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
    :return: a mixture with one source more for every known node. Cost: :math:`O(E \\log E)`.
    """
    matrices = () if relabel is None else (relabel,)
    nodes = known.nonzero()[:, 0]
    if not len(nodes):
        return NeighborMixture(hood, alpha, logits, *matrices)
    kept = ~known[hood.target]
    target = torch.cat([hood.target[kept], nodes])
    own = hood.num_sources + torch.arange(len(nodes), device=nodes.device)
    edges = torch.stack([torch.cat([hood.source[kept], own]), target])
    apart = Neighborhood(edges, hood.num_nodes, hood.num_sources + len(nodes))
    order, labels = target.argsort(stable=True), one_hot(y[nodes], alpha.shape[1]).to(alpha)
    alpha = torch.cat([alpha, SURE * labels + NEVER])
    logits = torch.cat([logits[kept], logits.new_zeros(len(nodes))])[order]
    if relabel is not None:
        same = torch.eye(alpha.shape[1]).to(relabel).expand(len(nodes), -1, -1)
        matrices = (torch.cat([relabel[kept], same])[order],)
    return NeighborMixture(apart, alpha, logits, *matrices)
