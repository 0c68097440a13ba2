# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The fit of a StackedNMM: the part of a graph that it needs, its objective and the steps."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Size, Tensor

from pyro_nmm import Neighborhood, NeighborMixture
from pyro_nmm.models.stacked.communities import check_hood, sources_of
from pyro_nmm.models.stacked.edge_weights import places
from pyro_nmm.models.stacked.inputs import (
    check_disjoint,
    check_known,
    check_scores,
    labels_of,
    mask_of,
    scores_of,
    weights_of,
)
from pyro_nmm.models.stacked.parameters import parameters_of
from pyro_nmm.models.stacked.temperature import temperature_scaling
from pyro_nmm.validation import check_integers, check_positive

#: Normal priors, mean and standard deviation, of the numbers of an NMM on pooled scores. Some
#: hundred held-out nodes say little about them. Fitted to nearly all labels of 36 splits of three
#: graphs (`benchmarks.on_top.run priors`), of which two are reported on other splits.
PRIOR = {
    "log_kappa": (-1.2, 0.7),
    "log_floor": (-5.0, 1.0),
    "gamma": (0.5, 0.5),
    "similarity": (2.4, 0.7),
}
#: The same on a classifier's scores alone; the prior of log_scale is around temperature scaling's.
#: The means did best on five random splits of Cora and of CiteSeer, none of which is reported.
SCORES_PRIOR = {
    "log_kappa": (1.0, 1.0),
    "log_floor": (-5.0, 1.0),
    "gamma": (2.0, 1.0),
    "similarity": (1.0, 1.0),
}
#: The same for the log odds that edges relabel; not chosen on any data.
RELABEL_PRIOR = {"odds": (-1.0, 1.5)}
#: The same for the two numbers of communities, chosen on the same random splits.
COMMUNITY_PRIOR = {"log_kappa_community": (-1.0, 1.0), "community": (-1.0, 1.0)}


class Part(NamedTuple):
    """Labels that are held out, given others, on the nodes that they depend on."""

    hood: Neighborhood
    inputs: Tensor
    edge_weight: Tensor | None
    y: Tensor
    given: Tensor
    held_out: Tensor


def fit_numbers(
    stacked, hood: Neighborhood, scores: Tensor, y: Tensor, nodes: dict[str, Tensor],
    edge_weight: Tensor | None, num_folds: int | None, num_steps: int, num_samples: int, lr: float,
    progress: Callable[[range], Iterable[int]],
):  # fmt: skip
    """
    Gives a module the numbers that suit the held-out nodes, the second set of ``nodes``; without
    folds from the priors' means. Raises before anything changes.
    """
    check_integers(1, num_steps=num_steps)
    check_integers(2, num_samples=num_samples)
    check_positive(lr=lr)
    check_hood(hood, stacked.communities)
    scores, y = scores_of(hood, scores).detach(), labels_of(hood, y)
    check_scores(scores)
    edge_weight = weights_of(hood, edge_weight)
    masks = {name: mask_of(hood, of, name, empty=name == "train") for name, of in nodes.items()}
    check_disjoint(masks, "a classifier is overconfident where it was trained")
    train, held_out = masks.values()
    check_known(hood, y, train | held_out, num_classes_of(stacked, scores))
    changed = copy.deepcopy(stacked).to(scores)
    prior, temperature = dict(stacked.prior), temperature_of(scores, y, held_out)
    if changed.pool is None:
        prior["log_scale"] = (-math.log(temperature), 1.0)
    elif num_folds is None:
        changed.pool.temperature.fill_(temperature)
    if num_folds is None:
        for name, (mean, _) in prior.items():
            changed.get_parameter(name).data.fill_(mean)
    parts = parts_of(changed, hood, scores, edge_weight, y, train, held_out, num_folds or 1)
    maximise(changed, parts, prior, num_steps, num_samples, lr, progress)
    stacked.to(scores).load_state_dict(changed.state_dict())
    return stacked


def num_classes_of(stacked, scores: Tensor) -> int:
    num_classes = len(stacked.pool.offsets) if stacked.pool is not None else scores.shape[1]
    if num_classes != scores.shape[1]:
        raise ValueError(
            f"scores must have shape ({len(scores)}, {num_classes}), num_classes columns, got "
            f"{tuple(scores.shape)}"
        )
    return num_classes


def temperature_of(scores: Tensor, y: Tensor, held_out: Tensor) -> float:
    """That of temperature scaling, within bounds; the scale of the scores does not matter."""
    # Few held-out nodes may all be predicted rightly, and would have a temperature of zero.
    unit = scores.std().clamp(min=1e-30)
    found = temperature_scaling(scores / unit, y, held_out)
    return unit.item() * min(max(found, 0.05), 20.0)


def parts_of(
    stacked, hood: Neighborhood, scores: Tensor, edge_weight: Tensor | None, y: Tensor,
    train: Tensor, held_out: Tensor, num_folds: int,
) -> list[Part]:  # fmt: skip
    """One part for each fold of the held-out nodes, given those of the others and of ``train``."""
    nodes, parts = held_out.nonzero()[:, 0], []
    if num_folds > 1:
        nodes = nodes[torch.randperm(len(nodes), device=nodes.device)]
    num_folds = min(num_folds, len(nodes))
    for fold in range(num_folds):
        out = torch.zeros_like(held_out)
        out[nodes[fold::num_folds]] = True
        given, inputs = train | (held_out & ~out), scores
        if stacked.pool is not None:
            # What is given has its part in the pool, and would otherwise count twice.
            inputs = stacked.pool.terms(hood, scores, y, given, edge_weight)
            given = torch.zeros_like(given)
        # No label that is read depends on other nodes than those the observed may choose.
        near, kept, sources = sources_of(hood, given | out)
        weight = None
        if edge_weight is not None:
            weight = edge_weight[places(hood, sources[near.source], kept[near.target])]
        parts.append(Part(near, inputs[..., kept, :], weight, y[kept], given[kept], out[kept]))
    return parts


def maximise(
    stacked, parts: list[Part], prior: dict, num_steps: int, num_samples: int, lr: float,
    progress: Callable[[range], Iterable[int]],
) -> None:  # fmt: skip
    """Steps on one part after the other."""
    optimizer = torch.optim.Adam(stacked.parameters(), lr=lr, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, 2 - 2 * step / num_steps)
    )
    whole = sum(int(part.held_out.sum()) for part in parts)
    for step in progress(range(num_steps)):
        optimizer.zero_grad()
        part = parts[step % len(parts)]
        first, last = (mask.nonzero()[:, 0] for mask in (part.given, part.held_out))
        found = parameters_of(stacked, part.hood, part.inputs, part.edge_weight)
        mixture = NeighborMixture(part.hood, *found, validate_args=False)
        order = torch.cat([nodes[torch.randperm(len(nodes), device=nodes.device)]
                           for nodes in (first, last)])  # fmt: skip
        q = mixture.in_order(part.y, part.given | part.held_out, order)
        loss = -surrogate(q, len(first), num_samples) / len(last)
        (loss - log_prior(stacked, prior) / whole).backward()
        optimizer.step()
        schedule.step()
        if not finite(stacked):
            raise ValueError(f"{lr=} is too large: the numbers are no longer finite")


def log_prior(stacked, prior: dict) -> Tensor:
    terms = [((stacked.get_parameter(n) - m) / sd).square().sum() for n, (m, sd) in prior.items()]
    return -0.5 * torch.stack(terms).sum()


def surrogate(q: Any, num_given: int, num_samples: int) -> Tensor:
    """
    A number with the gradient of :math:`E_q \\sum_i f_i` over the nodes after the first
    ``num_given``: its own derivative, and the score of the choices, charged against the other
    draws.
    """
    choices = q.sample(Size([num_samples]))
    bound = q.log_terms(choices)[:, num_given:].sum(-1)
    others = (bound.sum() - bound) / (num_samples - 1)
    return (bound + q.log_prob(choices) * (bound - others).detach()).mean()


@torch.no_grad()
def finite(stacked) -> bool:
    """Whether alpha and logits are, and alpha positive."""
    numbers = dict(stacked.named_parameters())
    positive = torch.stack([p for name, p in numbers.items() if "log" in name]).exp()
    others = torch.cat([p.view(-1) for p in numbers.values()])
    return bool((positive > 0).all() and torch.cat([positive, others]).isfinite().all())
