# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Label probabilities under a StackedNMM: of scores alone, or pooled with neighbours and labels."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from pyro_nmm import Neighborhood, NeighborMixture
from pyro_nmm.models.stacked.inputs import GraphScores
from pyro_nmm.models.stacked.pooled import PooledScores, all_terms, terms_in_blocks

#: Concentrations of a known node's label, and of the others: certain in single precision.
CERTAIN, EXCLUDED = 1e6, 1e-6


class Predictor(Protocol):
    """How the probabilities :math:`P` are made, and where the known labels are read."""

    def check(self, data: GraphScores, labelled: bool) -> None:
        """Whether it can read these scores, with known labels or without."""

    def calibrate(self, temperature: float) -> None:
        """Stores temperature scaling's temperature, before a fit."""

    def read(self, data: GraphScores) -> tuple[Tensor, Tensor]:
        """
        Inputs ``(..., N, C)`` that do not depend on parameters, and the mask of the known nodes
        whose labels are not in them. A mixture is to be conditioned on these.
        """

    def probs(self, inputs: Tensor) -> Tensor:
        """``(N, C)``: :math:`P`."""

    def probs_in_blocks(self, data: GraphScores) -> Tensor:
        """``(N, C)``: :math:`P` without gradients, and without storing all inputs."""

    def alpha(self, log_kappa: Tensor, probs: Tensor) -> Tensor:
        """Concentrations of sources with these probabilities."""

    def mixture(self, data: GraphScores, *parameters: Tensor) -> NeighborMixture:
        """The mixture with these ``alpha`` and ``logits``, given the known labels in :math:`P`."""


@dataclass(frozen=True)
class ScoresAlone:
    """Scaled scores, without known labels."""

    log_scale: Tensor
    log_floor: Tensor

    def check(self, data: GraphScores, labelled: bool) -> None:
        pass

    def calibrate(self, temperature: float) -> None:
        pass  # the prior mean of log_scale is relative to the temperature

    def read(self, data: GraphScores) -> tuple[Tensor, Tensor]:
        return data.scores, data.known

    def probs(self, inputs: Tensor) -> Tensor:
        return (self.log_scale.exp() * inputs).softmax(-1)

    def probs_in_blocks(self, data: GraphScores) -> Tensor:
        raise ValueError("stacked has pool=False, whose posterior needs draws: use posterior()")

    def alpha(self, log_kappa: Tensor, probs: Tensor) -> Tensor:
        return log_kappa.exp() * probs + self.log_floor.exp()

    def mixture(self, data: GraphScores, *parameters: Tensor) -> NeighborMixture:
        return NeighborMixture(data.hood, *parameters)


@dataclass(frozen=True)
class Pooled:
    """Scores pooled with the scores of neighbours and with known labels."""

    pool: PooledScores
    log_floor: Tensor

    def check(self, data: GraphScores, labelled: bool) -> None:
        if not labelled:
            raise ValueError(
                "y and known are needed: the labels that are known, and where, are a part of what "
                "is pooled; on a graph without any, give a mask that selects no node"
            )
        shape, num_classes = tuple(data.scores.shape), len(self.pool.offsets)
        if shape[1] != num_classes:
            raise ValueError(
                f"scores must have shape {shape[0], num_classes}, num_classes columns, got {shape}"
            )

    def calibrate(self, temperature: float) -> None:
        self.pool.temperature.fill_(temperature)

    def read(self, data: GraphScores) -> tuple[Tensor, Tensor]:
        return all_terms(data, self.pool.temperature), torch.zeros_like(data.known)

    def probs(self, inputs: Tensor) -> Tensor:
        return self.pool(inputs)

    @torch.no_grad()
    def probs_in_blocks(self, data: GraphScores) -> Tensor:
        found = torch.empty_like(data.scores)
        for rows, terms in terms_in_blocks(data, self.pool.temperature, found.shape[1]):
            found[rows] = self.pool(terms)
        return found

    def alpha(self, log_kappa: Tensor, probs: Tensor) -> Tensor:
        floor = (log_kappa + self.log_floor).exp() / probs.shape[1]
        return log_kappa.exp() * probs + floor

    def mixture(self, data: GraphScores, *parameters: Tensor) -> NeighborMixture:
        return with_known_labels(data.hood, data.y, data.known, *parameters)


def with_known_labels(
    hood: Neighborhood, y: Tensor, known: Tensor, alpha: Tensor, logits: Tensor, *relabel: Tensor
) -> NeighborMixture:
    """
    A mixture in which every known node takes its label from a source of its own, which no other
    node may choose. Its label is certain, and is no further evidence about other labels.
    """
    if not known.any():
        return NeighborMixture(hood, alpha, logits, *relabel)
    nodes = known.nonzero()[:, 0]
    # The first edge of a known node's row becomes the edge from its own source, the others go.
    kept = (~known[hood.row]).index_fill(0, hood.ptr[nodes], True).nonzero()[:, 0]
    degree = hood.ptr.diff().where(~known, 1)
    ptr = torch.cat([degree.new_zeros(1), degree.cumsum(0)])
    own, number = ptr[nodes], hood.num_sources + len(nodes)
    source = hood.source[kept]
    source[own] = torch.arange(hood.num_sources, number, device=nodes.device)
    apart = Neighborhood.of_rows(hood.num_nodes, hood.nodes, ptr, source, num_sources=number)
    labels, same = one_hot(y[nodes], alpha.shape[1]).to(alpha), torch.eye(alpha.shape[1]).to(alpha)
    alpha, logits = torch.cat([alpha, CERTAIN * labels + EXCLUDED]), logits[kept]
    matrices = [each[kept].index_put((own,), same) for each in relabel]
    return NeighborMixture(apart, alpha, logits.index_fill(0, own, 0), *matrices)
