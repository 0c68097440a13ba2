# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Latent labels without a graph: where the fit of a field starts."""

import math
from typing import Any

import torch
from torch import Tensor

from pyro_nmm import Neighborhood
from pyro_nmm.models.latent.field import Emission, Values


def mixture_em(
    emission: Emission, data: Any, values: Values, num_steps: int = 100, tolerance: float = 1e-6
) -> tuple[Values, Tensor]:
    """
    Expectation maximisation without a graph: labels of nodes are independent, of learned shares.
    With :class:`~pyro_nmm.models.Annotators` this is the method of Dawid and Skene (1979),
    "Maximum Likelihood Estimation of Observer Error-Rates Using the EM Algorithm", Journal of the
    Royal Statistical Society C 28. Cost: :math:`O(N C)` a step, and the emission's.

    :param dict values: where to start.
    :return: the emission's parameters, and ``(N, C)`` the probabilities of labels.
    """
    evidence, size = emission.log_prob(values, data), emission.num_labels
    log_share, old = evidence.new_full((size,), -math.log(size)), -torch.inf
    for _ in range(num_steps):
        joint = evidence + log_share
        bound = joint.logsumexp(-1).mean().item()
        if bound - old < tolerance:
            break
        probs, old = joint.softmax(-1), bound
        values = emission.maximise(data, probs, values)
        evidence = emission.log_prob(values, data)
        log_share = ((probs.sum(0) + 1) / (len(probs) + size)).log()
    return values, (evidence + log_share).softmax(-1)


def draw_places(number: int, size: int, device: torch.device) -> Tensor:
    """``(size,)`` of so many places, drawn at random and different as long as there are enough."""
    place = torch.randperm(number, device=device)[:size]
    return torch.cat([place, torch.randint(number, (size - len(place),), device=device)])


def source_counts(hood: Neighborhood, probs: Tensor) -> Tensor:
    """``(M, H)``: what nodes are, ``(N, H)``, counted at their sources in equal shares."""
    share = 1 / hood.ptr.diff().to(probs)
    counts = probs.new_zeros(hood.num_sources, probs.shape[1])
    return counts.index_add_(0, hood.source, (probs * share[:, None]).index_select(0, hood.row))
