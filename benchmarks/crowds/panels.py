# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Effective number of independent annotators: panels that copy within groups, and people."""

import torch
from torch import Tensor
from torch.nn.functional import one_hot
from torch_geometric.data import Data

from pyro_nmm.models import Annotators
from pyro_nmm.models.annotators import effective_number

#: Sizes of groups, and the probability with which a judge repeats the guess of its group.
PANELS: dict[str, tuple[list[int], float]] = {
    "nine independent": ([1] * 9, 0.0),
    "three groups of three": ([3, 3, 3], 0.9),
    "five and four single": ([5, 1, 1, 1, 1], 0.8),
    "one group of nine": ([9], 0.7),
}
RIGHT = 0.6


def panel(y: Tensor, groups: list[int], copy: float) -> Tensor:
    """``(N, 9)`` answers, of which .6 are right."""
    labels, judges = int(y.max()) + 1, []
    for number in groups:
        size = len(y), number + 1
        wrong = (y[:, None] + torch.randint(1, labels, size)) % labels
        guesses = torch.where(torch.rand(size) < RIGHT, y[:, None], wrong)
        copies = torch.rand(len(y), number) < copy
        judges.append(torch.where(copies, guesses[:, :1], guesses[:, 1:]))
    return torch.cat(judges, 1)


def known_number(groups: list[int], copy: float) -> float:
    """Two judges of a group have errors with a correlation of the squared probability."""
    size, pairs = sum(groups), sum(number * (number - 1) for number in groups)
    return size / (1 + pairs / size * copy**2)


def numbers(data: Data) -> dict:
    """From a fit, and given the true labels."""
    found = Annotators(int(data.y.max()) + 1).fit(data.edge_index, data.answers)
    truth = one_hot(data.y).double().clamp(min=1e-9).log()
    best = effective_number(truth, 1.0, found.field.values, data.answers).mean.item()
    several = (data.answers >= 0).sum(1)
    row = {name: value.item() for name, value in found.effective_number()._asdict().items()}
    return row | {"truth": best, "answers": several[several > 1].double().mean().item()}
