# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Calls of a user's script: each right one beside a wrong one that a type checker must find."""

import torch
from torch import Tensor, nn
from torch_geometric.data import Data

from pyro_nmm import AveragedPosterior, Neighborhood, NeighborMixture, edge_values
from pyro_nmm.guides import AmortizedNMM, fit_mixture, fit_nmm, ordered_guide
from pyro_nmm.models import (
    Annotators,
    FreeNMM,
    NMMNetwork,
    NormalEmission,
    StackedNMM,
    fit_field,
    ising,
    nmm,
)

EDGES = torch.tensor([[0, 1, 1, 2, 2, 3], [1, 0, 2, 1, 3, 2]])
HOOD, Y = Neighborhood(EDGES, num_nodes=4), torch.tensor([0, 0, 1, 1])
SCORES = torch.tensor([[3.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 3.0]])
TRAIN, VAL = torch.tensor([True, False, False, False]), torch.tensor([False, True, True, False])
ALPHA, LOGITS = torch.ones(4, 2), torch.zeros(HOOD.num_edges)
MIXTURE = NeighborMixture(HOOD, ALPHA, LOGITS)
POSTERIOR = MIXTURE.condition(Y, TRAIN)
STACKED = StackedNMM(2).fit(HOOD, SCORES, Y, TRAIN, VAL, num_steps=2)
DATA = Data(x=SCORES, edge_index=EDGES, y=Y, train_mask=TRAIN)
FIELD = ising(EDGES[:, ::2].sort(0).values, coupling=0.3, field=torch.zeros(4))


class Network(nn.Module):
    """A network of nothing but free parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.free = FreeNMM(HOOD, num_classes=2)

    def forward(self, hood: Neighborhood, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        alpha, logits = self.free(hood)
        return alpha, logits


def averaged(posterior: AveragedPosterior) -> Tensor:
    return posterior.members[0].marginals()


def table(mixture: NeighborMixture) -> Tensor:
    return mixture.marginals()


RIGHT = [
    lambda: fit_nmm(Network(), DATA, HOOD, num_steps=2),
    lambda: fit_mixture(FIELD, HOOD, num_steps=8, lr=0.1),
    lambda: fit_field(NormalEmission(2), HOOD, SCORES, num_starts=1, num_steps=2, num_draws=2),
    lambda: Annotators(2).fit(EDGES, Y[:, None].expand(4, 3), num_starts=1, num_steps=2),
    lambda: StackedNMM(2).fit(HOOD, SCORES.numpy(), Y.numpy(), [0], VAL, num_steps=2),
    lambda: averaged(STACKED.posterior(HOOD, SCORES, Y, TRAIN)),
    lambda: nmm(HOOD, ALPHA, LOGITS, choices="summed"),
    lambda: ordered_guide(HOOD, ALPHA, LOGITS, Y, estimator="no_score"),
    lambda: NMMNetwork(nn.Linear(2, 2), nn.Linear(2, 3), num_classes=2, link="softplus"),
    lambda: MIXTURE.condition(Y, torch.tensor([True, False, False, False])),
    lambda: edge_values(HOOD, EDGES, torch.ones(6), fill_value=0.0),
    lambda: table(AmortizedNMM(HOOD, Network()).mixture(SCORES)),
]

WRONG = [
    lambda: fit_nmm(Network(), DATA, HOOD, num_step=2),
    lambda: fit_mixture(FIELD, HOOD, num_steps=8, lr="0.1"),
    lambda: fit_field(NormalEmission(2), HOOD, SCORES, num_starts=1, num_steps=2.5, num_draws=2),
    lambda: Annotators(2).fit(EDGES, Y[:, None].expand(4, 3), num_chain=1, num_steps=2),
    lambda: StackedNMM(2).fit(HOOD, SCORES.numpy(), Y.numpy(), "train", VAL, num_steps=2),
    lambda: averaged(STACKED.posterior(HOOD, SCORES, Y, TRAIN, num_draws=0)),
    lambda: nmm(HOOD, ALPHA, LOGITS, choices="sum"),
    lambda: ordered_guide(HOOD, ALPHA, LOGITS, Y, estimator="score"),
    lambda: NMMNetwork(nn.Linear(2, 2), nn.Linear(2, 3), num_classes=2, link="relu"),
    lambda: MIXTURE.condition(Y, [True, False, False, False]),
    lambda: edge_values(HOOD, EDGES, torch.ones(6), fill_value="none"),
    lambda: table(AmortizedNMM(HOOD, Network())),
]
