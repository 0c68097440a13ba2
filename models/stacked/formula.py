# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Concentrations and attention of a StackedNMM, as functions of its parameters."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch_geometric.utils import scatter

from pyro_nmm import Neighborhood
from pyro_nmm.models.compatibility import between_nodes
from pyro_nmm.models.networks import attention_scores
from pyro_nmm.models.stacked.inputs import GraphScores
from pyro_nmm.models.stacked.predictors import Predictor


@dataclass(frozen=True)
class Formula:
    """``alpha`` and ``logits``. Nodes are the only sources, and edges keep labels."""

    predictor: Predictor
    log_kappa: Tensor
    gamma: Tensor
    similarity: Tensor

    def graph_scores(
        self, hood: Neighborhood, scores: Any, y: Any, known: Any, weight: Any
    ) -> GraphScores:
        """:meth:`GraphScores.of`, checked against the sources and the predictor."""
        self.check(hood)
        data = GraphScores.of(hood, scores, y, known, weight)
        self.predictor.check(data, labelled=y is not None and known is not None)
        return data

    def check(self, hood: Neighborhood) -> None:
        """Whether a graph has these sources."""
        if hood.bipartite:
            raise ValueError(
                "hood has sources that are no nodes: if they are communities, made by "
                "pyro_nmm.sources.communities, use StackedNMM(..., communities=True)"
            )

    def of(self, data: GraphScores) -> tuple[Tensor, ...]:
        """``alpha``, ``logits`` and, if edges relabel, ``relabel``."""
        inputs, _ = self.predictor.read(data)
        return self(data.hood, inputs, data.edge_weight)

    def __call__(
        self, hood: Neighborhood, inputs: Tensor, edge_weight: Tensor | None
    ) -> tuple[Tensor, ...]:
        """The same, of the predictor's inputs."""
        alpha, probs = self.concentrations(hood, self.predictor.probs(inputs))
        return alpha, *self.attention(hood, probs, edge_weight)

    def concentrations(self, hood: Neighborhood, probs: Tensor) -> tuple[Tensor, Tensor]:
        """``alpha`` and :math:`P` of all sources, of :math:`P` of nodes."""
        return self.predictor.alpha(self.log_kappa, probs), probs

    def attention(
        self, rows: Neighborhood, probs: Tensor, edge_weight: Tensor | None
    ) -> tuple[Tensor, ...]:
        """``logits`` and perhaps ``relabel`` of some rows, of :math:`P` of all sources."""
        logits = attention_scores(rows, probs, self.similarity, self.gamma)
        if edge_weight is not None:
            logits = logits + edge_weight.to(logits).log()
        return (logits,)


@dataclass(frozen=True)
class RelabelFormula(Formula):
    """Edges between nodes relabel."""

    odds: Tensor
    compatibility: Tensor

    def attention(
        self, rows: Neighborhood, probs: Tensor, edge_weight: Tensor | None
    ) -> tuple[Tensor, ...]:
        keep, change = torch.eye(len(self.compatibility)).to(probs), self.compatibility.to(probs)
        relabel = between_nodes(rows, keep + self.odds.sigmoid() * (change - keep))
        return *super().attention(rows, probs, edge_weight), relabel


@dataclass(frozen=True)
class CommunityFormula(Formula):
    """The sources are the nodes, followed by the communities of which they are members."""

    log_kappa_community: Tensor
    community: Tensor

    def check(self, hood: Neighborhood) -> None:
        own = int((hood.source == hood.target).sum())
        if not hood.bipartite or hood.num_rows != hood.num_nodes or own != hood.num_nodes:
            raise ValueError(
                f"communities=True needs a hood of pyro_nmm.sources.communities, whole, whose "
                f"sources are the nodes and then communities, got {hood}: make one, or use "
                f"StackedNMM(...)"
            )

    def concentrations(self, hood: Neighborhood, probs: Tensor) -> tuple[Tensor, Tensor]:
        alpha, inside = self.predictor.alpha(self.log_kappa, probs), hood.source >= hood.num_nodes
        members, community = hood.target[inside], hood.source[inside] - hood.num_nodes
        number = hood.num_sources - hood.num_nodes
        means = scatter(probs.index_select(0, members), community, 0, number, reduce="mean")
        shared = self.predictor.alpha(self.log_kappa_community, means)
        return torch.cat([alpha, shared]), torch.cat([probs, means])

    def attention(
        self, rows: Neighborhood, probs: Tensor, edge_weight: Tensor | None
    ) -> tuple[Tensor, ...]:
        (logits,) = super().attention(rows, probs, edge_weight)
        inside = rows.source >= rows.num_nodes
        nodes = rows.logsumexp(logits.masked_fill(inside, -torch.inf))
        return (logits + inside * (self.community + nodes.index_select(0, rows.row)),)
