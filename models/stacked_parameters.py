# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Concentrations and attention of a StackedNMM, of its numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from pyro_nmm import Neighborhood
from pyro_nmm.models.communities import means
from pyro_nmm.models.compatibility import between_nodes
from pyro_nmm.models.networks import attention_scores


def parameters_of(
    stacked, hood: Neighborhood, inputs: Tensor, edge_weight: Tensor | None
) -> tuple[Tensor, ...]:
    """
    What a StackedNMM returns.

    :param Tensor inputs: the pool's terms ``(4, N, C)``, or scores ``(N, C)`` without a pool.
    :param Tensor edge_weight: ``(num_edges,)`` in the order of ``hood``.
    """
    if stacked.pool is None:
        probs, floor = (stacked.log_scale.exp() * inputs).softmax(-1), stacked.log_floor.exp()
    else:
        probs = stacked.pool(inputs)
        floor = (stacked.log_kappa + stacked.log_floor).exp() / probs.shape[1]
    alpha = stacked.log_kappa.exp() * probs + floor
    shared = means(hood, probs) if stacked.communities else probs[:0]
    vectors = torch.cat([probs, shared])
    logits = attention_scores(hood, vectors, stacked.similarity, stacked.gamma)
    if edge_weight is not None:
        logits = logits + edge_weight.to(logits).log()
    if not stacked.communities:
        if stacked.compatibility is None:
            return alpha, logits
        keep, change = torch.eye(probs.shape[1]).to(probs), stacked.compatibility.to(probs)
        return alpha, logits, between_nodes(hood, keep + stacked.odds.sigmoid() * (change - keep))
    kappa = stacked.log_kappa_community
    if stacked.pool is not None:
        floor = (kappa + stacked.log_floor).exp() / probs.shape[1]
    inside = hood.source >= hood.num_nodes
    nodes = hood.logsumexp(logits.masked_fill(inside, -torch.inf))
    against = stacked.community + nodes.index_select(0, hood.row)
    return torch.cat([alpha, kappa.exp() * shared + floor]), logits + inside * against
