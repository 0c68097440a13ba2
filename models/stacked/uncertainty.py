# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""How uncertain fitted parameters are: a weighted likelihood bootstrap, in one step."""

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.utils import segment

from pyro_nmm import Neighborhood
from pyro_nmm.arguments import check_integers
from pyro_nmm.blocks import row_blocks
from pyro_nmm.models.stacked.fit import Fold, label_log_probs, row_log_probs
from pyro_nmm.models.stacked.parameters import ParameterPriors

#: Draws of the parameters, in pairs of opposite deviations from the fit.
NUM_DRAWS = 16
#: Change of a parameter in a difference quotient, in double precision.
CHANGE = 1e-3


def deviations(stacked: Any, parameters: ParameterPriors, folds: list[Fold]) -> Tensor:
    r"""
    ``(NUM_DRAWS, d)``: draws of the parameters minus the fitted ones. The weighted likelihood
    bootstrap [1] refits the parameters to labels with random weights :math:`1 + \xi_{bi}`. Its
    first step is

    .. math::

        \theta_b - \hat\theta = H^{-1} \sum_i \xi_{bi} \, g_i, \qquad
        H = \Lambda + \sum_i g_i g_i^\top, \qquad \xi_{bi} \sim \mathcal{N}(0, 1)

    where :math:`g_i` is the gradient of the log-probability of held-out label ``i``, and
    :math:`\Lambda` the precision of the prior. Every second draw has the opposite deviation, so
    that the mean of the draws is the fit. Cost: :math:`O(E_\tau C)`; with communities ``2 d`` times
    the held-out nodes' edges.

    [1] Michael A. Newton, Adrian E. Raftery (1994) "Approximate Bayesian Inference with the
    Weighted Likelihood Bootstrap", Journal of the Royal Statistical Society B 56,
    https://doi.org/10.1111/j.2517-6161.1994.tb01956.x.
    """
    gradients = torch.cat([label_gradients(stacked, fold) for fold in folds])
    hessian = gradients.T @ gradients + parameters.precision().double().diag()
    scores = torch.randn(NUM_DRAWS // 2, len(gradients)).to(gradients) @ gradients
    half = torch.linalg.solve(hessian, scores.T).T
    return torch.stack([half, -half], 1).flatten(0, 1).to(folds[0].inputs)


@torch.no_grad()
def label_gradients(stacked: nn.Module, fold: Fold) -> Tensor:
    """``(n, d)``: of log-probabilities of held-out labels towards the parameters, in double."""
    fold = replace(fold, inputs=fold.inputs.double())
    exact, columns = copy.deepcopy(stacked).double(), []
    changes, own = CHANGE * torch.eye(len(flat(stacked)), dtype=torch.double).to(fold.inputs), None
    if exact.pool is not None and not fold.hood.bipartite:
        own = offset_gradients(exact.formula, fold)  # the last parameters
        changes = changes[: -own.shape[1]]
    for change in changes:
        ends = [label_log_probs(moved(exact, step), fold) for step in (change, -change)]
        columns.append((ends[0] - ends[1]) / (2 * CHANGE))
    found = torch.stack(columns, 1)
    found = found if own is None else torch.cat([found, own], 1)
    return found.nan_to_num(0.0, 0.0, 0.0)  # of a label without a probability


@torch.enable_grad()
def offset_gradients(formula: Any, fold: Fold) -> Tensor:
    """
    ``(n, C)``: the gradient towards the offsets of all labels in one pass. A label depends on the
    probabilities of its row's sources alone, so each edge gets a copy of them as a leaf.
    """
    rows, probs = fold.hood.restrict(fold.held_out), formula.predictor.probs(fold.inputs).detach()
    found = probs.new_empty(rows.num_rows, probs.shape[1])
    for block in row_blocks(rows.ptr, 8 * probs.shape[1]):  # eight tables of the edges at a time
        part = rows.take(torch.arange(block.start, block.stop, device=rows.device))
        place = torch.arange(part.num_edges, device=rows.device)
        stars = Neighborhood.of_rows(len(place), place[part.source == part.target], part.ptr, place)
        each = probs.index_select(0, part.source).requires_grad_()
        weight = None if fold.edge_weight is None else fold.edge_weight[part.edge]
        log_probs = row_log_probs(formula, stars, stars, each, weight, fold.y[part.nodes])
        (slope,) = torch.autograd.grad(log_probs.sum(), each)
        slope = each.detach() * (slope - (each.detach() * slope).sum(-1, keepdim=True))
        found[block] = segment(slope, part.ptr)
    return found


def flat(module: nn.Module) -> Tensor:
    """``(d,)``: all parameters."""
    return nn.utils.parameters_to_vector(module.parameters()).detach()


@torch.no_grad()
def moved(module: Any, change: Tensor) -> Any:
    """A copy whose parameters are changed."""
    found = copy.deepcopy(module)
    nn.utils.vector_to_parameters(flat(module) + change, found.parameters())
    return found


def drawn(stacked: Any, number: int) -> Iterator[Any]:
    """The module with some draws of its parameters; itself, if they are not uncertain."""
    if number == 0 or not stacked.deviations.any():
        yield stacked
        return
    for change in stacked.deviations[:number]:
        yield moved(stacked, change)


def number_of_draws(num_draws: int, num_samples: int | None) -> int:
    """At most so many draws as there are samples, which the draws share."""
    check_integers(0, num_draws=num_draws)
    if num_samples is not None:
        check_integers(1, num_samples=num_samples)
    if num_draws > NUM_DRAWS:
        raise ValueError(f"num_draws must be at most {NUM_DRAWS}, got {num_draws}")
    return num_draws if num_samples is None else min(num_draws, num_samples)
