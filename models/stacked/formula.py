# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Label probabilities, concentrations and attention of a StackedNMM, of its parameters."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot
from torch_geometric.utils import index_to_mask, scatter

from pyro_nmm import Neighborhood, NeighborMixture
from pyro_nmm.graph_arguments import check_hood
from pyro_nmm.models.compatibility import between_nodes
from pyro_nmm.models.networks import attention_scores
from pyro_nmm.models.stacked.inputs import GraphScores
from pyro_nmm.models.stacked.pooled import PooledScores, all_terms

#: Concentrations of a known node's label, and of the others: certain in single precision.
CERTAIN, EXCLUDED = 1e6, 1e-6

Tensors = tuple[Tensor, ...]


@dataclass(frozen=True)
class ScoresAlone:
    """Label probabilities :math:`P` of scaled scores. A mixture is conditioned on known labels."""

    log_scale: Tensor
    log_floor: Tensor
    num_classes = None  #: any number

    def read(self, data: GraphScores) -> tuple[Tensor, Tensor]:
        """Inputs ``(..., N, C)`` without parameters; mask of known labels that are not in them."""
        return data.scores, data.known

    def probs(self, inputs: Tensor) -> Tensor:
        """``(N, C)``: :math:`P`."""
        return (self.log_scale.exp() * inputs).softmax(-1)

    def alpha(self, log_kappa: Tensor, probs: Tensor) -> Tensor:
        """Concentrations of sources with these probabilities."""
        return log_kappa.exp() * probs + self.log_floor.exp()

    def mixtures(self, data: GraphScores, every: Iterable[Tensors]) -> Iterator[NeighborMixture]:
        """Mixtures with ``alpha`` and ``logits``, given the known labels in :math:`P`."""
        return (NeighborMixture(data.hood, *parameters) for parameters in every)


@dataclass(frozen=True)
class Pooled:
    """The same of scores pooled with the scores of neighbours and with known labels."""

    pool: PooledScores
    log_floor: Tensor
    share: float = 1.0  #: of the NMM beside temperature scaling

    @property
    def num_classes(self) -> int:
        return len(self.pool.offsets)

    def read(self, data: GraphScores) -> tuple[Tensor, Tensor]:
        return all_terms(data, self.pool.temperature), data.known & ~data.certain

    def probs(self, inputs: Tensor) -> Tensor:
        return self.pool(inputs)

    def alpha(self, log_kappa: Tensor, probs: Tensor) -> Tensor:
        floor = (log_kappa + self.log_floor).exp() / probs.shape[1]
        return log_kappa.exp() * probs + floor

    def mixtures(self, data: GraphScores, every: Iterable[Tensors]) -> Iterator[NeighborMixture]:
        beside = data.beside
        if beside is None:
            beside = (data.scores / self.pool.temperature).softmax(-1)
        return with_own_sources(data, beside, self.share, every)


def with_own_sources(
    data: GraphScores, table: Tensor, share: float, every: Iterable[Tensors]
) -> Iterator[NeighborMixture]:
    """
    Mixtures in which nodes have one more source each, which no other node may choose. A node with a
    certain label has it alone: the label is no further evidence about others. Other nodes choose it
    with probability ``1 - share``, and its label probabilities are the ``table``'s. The mixtures
    share one graph.
    """
    hood, known = data.hood, data.certain
    own = known if share == 1 else torch.ones_like(known)
    if not own.any():
        yield from (NeighborMixture(hood, *parameters) for parameters in every)
        return
    kept, nodes = (~known)[hood.row].nonzero()[:, 0], own.nonzero()[:, 0]
    degree = hood.ptr.diff().where(~known, 0) + own.long()
    ptr = torch.cat([degree.new_zeros(1), degree.cumsum(0)])
    added = ptr[1:][nodes] - 1  # the last edge of a row, whose source has the largest number
    others = (~index_to_mask(added, int(ptr[-1]))).nonzero()[:, 0]
    number = hood.num_sources + len(nodes)

    def with_added(old: Tensor, new: Tensor) -> Tensor:
        found = old.new_empty(len(added) + len(others), *old.shape[1:])
        found[added] = new
        return found.index_copy_(0, others, old.index_select(0, kept))

    source = with_added(hood.source, torch.arange(hood.num_sources, number, device=nodes.device))
    wider = Neighborhood.of_rows(hood.num_nodes, hood.nodes, ptr, source, num_sources=number)
    labels = one_hot(data.y.where(known, 0), table.shape[1]).to(table)
    rows = (torch.where(known[:, None], CERTAIN * labels, table) + EXCLUDED)[nodes]
    same = torch.eye(table.shape[1]).to(table)
    for alpha, logits, *relabel in every:
        odds = hood.logsumexp(logits) + math.log((1 - share) / share) if share < 1 else 0.0
        added_logits = torch.zeros_like(table[:, 0]).where(known, odds)[nodes]
        matrices = [with_added(each, same) for each in relabel]
        parameters = torch.cat([alpha, rows]), with_added(logits, added_logits), *matrices
        yield NeighborMixture(wider, *parameters)


@dataclass(frozen=True)
class Formula:
    """``alpha`` and ``logits``. Nodes are the only sources, and edges keep labels."""

    predictor: ScoresAlone | Pooled
    log_kappa: Tensor
    gamma: Tensor
    similarity: Tensor

    def graph_scores(
        self, hood: Neighborhood, scores: Any, y: Any, known: Any, weight: Any, new: Any = None
    ) -> GraphScores:
        """:meth:`GraphScores.of`, of this formula's sources and the predictor's labels."""
        check_hood(hood)
        self.check(hood)
        num_classes = self.predictor.num_classes
        if num_classes and (y is None or known is None):
            raise ValueError(
                "y and known are needed: the labels that are known, and where, are a part of what "
                "is pooled; on a graph without any, give a mask that selects no node"
            )
        return GraphScores.of(hood, scores, y, known, weight, num_classes, new)

    def check(self, hood: Neighborhood) -> None:
        if hood.bipartite:
            raise ValueError(
                "hood has sources that are no nodes: if they are communities, made by "
                "pyro_nmm.sources.communities, use StackedNMM(..., communities=True)"
            )

    def of(self, data: GraphScores) -> Tensors:
        """``alpha``, ``logits`` and, if edges relabel, ``relabel``."""
        return self(data.hood, self.predictor.read(data)[0], data.edge_weight)

    def __call__(self, hood: Neighborhood, inputs: Tensor, weight: Tensor | None) -> Tensors:
        """The same, of the predictor's inputs."""
        alpha, probs = self.concentrations(hood, self.predictor.probs(inputs))
        return alpha, *self.attention(hood, probs, weight)

    def concentrations(self, hood: Neighborhood, probs: Tensor) -> tuple[Tensor, Tensor]:
        """``alpha`` and :math:`P` of all sources, of :math:`P` of nodes."""
        return self.predictor.alpha(self.log_kappa, probs), probs

    def attention(self, rows: Neighborhood, probs: Tensor, weight: Tensor | None) -> Tensors:
        """``logits`` and perhaps ``relabel`` of some rows, of :math:`P` of all sources."""
        logits = attention_scores(rows, probs, self.similarity, self.gamma)
        return (logits if weight is None else logits + weight.to(logits).log(),)


@dataclass(frozen=True)
class RelabelFormula(Formula):
    """Edges between nodes relabel."""

    odds: Tensor
    compatibility: Tensor

    def attention(self, rows: Neighborhood, probs: Tensor, weight: Tensor | None) -> Tensors:
        keep, change = torch.eye(len(self.compatibility)).to(probs), self.compatibility.to(probs)
        relabel = between_nodes(rows, keep + self.odds.sigmoid() * (change - keep))
        return *super().attention(rows, probs, weight), relabel


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
        own, inside = self.predictor.alpha(self.log_kappa, probs), hood.source >= hood.num_nodes
        members, community = hood.target[inside], hood.source[inside] - hood.num_nodes
        number = hood.num_sources - hood.num_nodes
        means = scatter(probs.index_select(0, members), community, 0, number, reduce="mean")
        shared = self.predictor.alpha(self.log_kappa_community, means)
        return torch.cat([own, shared]), torch.cat([probs, means])

    def attention(self, rows: Neighborhood, probs: Tensor, weight: Tensor | None) -> Tensors:
        (logits,) = super().attention(rows, probs, weight)
        inside = rows.source >= rows.num_nodes
        nodes = rows.logsumexp(logits.masked_fill(inside, -torch.inf))
        return (logits + inside * (self.community + nodes.index_select(0, rows.row)),)


def formula_of(stacked: Any) -> Formula:
    """The formula of a module's options and parameters."""
    predictor: ScoresAlone | Pooled
    if stacked.pool is None:
        predictor = ScoresAlone(stacked.log_scale, stacked.log_floor)
    else:
        predictor = Pooled(stacked.pool, stacked.log_floor, float(stacked.share))
    shared = predictor, stacked.log_kappa, stacked.gamma, stacked.similarity
    if stacked.communities:
        return CommunityFormula(*shared, stacked.log_kappa_community, stacked.community)
    if stacked.compatibility is not None:
        return RelabelFormula(*shared, stacked.odds, stacked.compatibility)
    return Formula(*shared)
