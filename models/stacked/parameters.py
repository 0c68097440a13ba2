# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Concentrations and attention of a StackedNMM, of its numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from pyro_nmm import Neighborhood
from pyro_nmm.models.compatibility import between_nodes
from pyro_nmm.models.networks import attention_scores
from pyro_nmm.models.stacked.communities import means


def parameters_of(
    stacked, hood: Neighborhood, inputs: Tensor, edge_weight: Tensor | None
) -> tuple[Tensor, ...]:
    """
    What a StackedNMM returns.

    :param Tensor inputs: the pool's terms ``(4, N, C)``, or scores ``(N, C)`` without a pool.
    :param Tensor edge_weight: ``(num_edges,)`` in the order of ``hood``.
    """
    if stacked.pool is None:
        probs = (stacked.log_scale.exp() * inputs).softmax(-1)
    else:
        probs = stacked.pool(inputs)
    alpha, vectors = concentrations(stacked, hood, probs)
    return alpha, *attention(stacked, hood, vectors, edge_weight)


def concentrations(stacked, hood: Neighborhood, probs: Tensor) -> tuple[Tensor, Tensor]:
    """
    ``alpha`` and what attention compares, both ``(M, C)``: of nodes, and of their communities.

    :param Tensor probs: ``(N, C)``: :math:`P`.
    """

    def scaled(log_kappa: Tensor, probs: Tensor) -> Tensor:
        floor = stacked.log_floor.exp()
        if stacked.pool is not None:
            floor = (log_kappa + stacked.log_floor).exp() / probs.shape[1]
        return log_kappa.exp() * probs + floor

    alpha = scaled(stacked.log_kappa, probs)
    if not stacked.communities:
        return alpha, probs
    shared = means(hood, probs)
    alpha = torch.cat([alpha, scaled(stacked.log_kappa_community, shared)])
    return alpha, torch.cat([probs, shared])


def attention(
    stacked, rows: Neighborhood, vectors: Tensor, edge_weight: Tensor | None
) -> tuple[Tensor, ...]:
    """
    ``logits`` and, with a compatibility matrix, what edges make of labels, of some rows of a graph.

    :param Tensor edge_weight: ``(num_edges,)`` in the order of ``rows``.
    """
    logits = attention_scores(rows, vectors, stacked.similarity, stacked.gamma)
    if edge_weight is not None:
        logits = logits + edge_weight.to(logits).log()
    if stacked.communities:
        inside = rows.source >= rows.num_nodes
        nodes = rows.logsumexp(logits.masked_fill(inside, -torch.inf))
        against = stacked.community + nodes.index_select(0, rows.row)
        return (logits + inside * against,)
    if stacked.compatibility is None:
        return (logits,)
    keep, change = torch.eye(vectors.shape[1]).to(vectors), stacked.compatibility.to(vectors)
    return logits, between_nodes(rows, keep + stacked.odds.sigmoid() * (change - keep))
