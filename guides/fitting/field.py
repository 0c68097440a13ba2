# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The fit of an NMM to a Markov random field."""

from collections.abc import Callable
from typing import Any

import pyro
import torch
from pyro.infer import TraceGraph_ELBO
from torch import Tensor, nn

from pyro_nmm import Neighborhood, NeighborMixture
from pyro_nmm.arguments import as_tensor, check_finite, check_integers
from pyro_nmm.fitting import Steps, ordinary, with_gradients, with_options
from pyro_nmm.graph_arguments import check_hood
from pyro_nmm.guides.field import FieldGuide
from pyro_nmm.guides.shared_forward import unvalidated
from pyro_nmm.models.random_fields import MarginalField, RandomField


@with_options
@with_gradients
def fit_mixture(
    field: RandomField | Callable[[int], RandomField], hood: Neighborhood, network: nn.Module, *,
    order: Tensor | None = None, num_samples: int = 4, warmup: float = 0.5,
    options: Steps = Steps(),
) -> tuple[NeighborMixture, list[float]]:  # fmt: skip
    r"""
    Fit an NMM to a Markov random field: Pyro's ``TraceGraph_ELBO`` on a
    :class:`~pyro_nmm.guides.FieldGuide`. Pyro's parameter store is left as it was. Interactions
    rise from zero over the first steps, and the learning rate falls over the second half.

    >>> from pyro_nmm.models import FreeNMM, grid_edges, ising
    >>> field = ising(grid_edges(3, 3), coupling=0.4, field=torch.full((9,), 0.1))
    >>> hood = Neighborhood.grid(3, 3)
    >>> mix, losses = fit_mixture(field, hood, FreeNMM(hood, 2), num_steps=100, lr=0.1)
    >>> mix.marginals().shape  # (N, C)
    torch.Size([9, 2])

    :param field: a :class:`~pyro_nmm.models.PairwiseMRF` or, for a closer approximation, its
        :class:`~pyro_nmm.models.MarginalField`; or a function of the step's number that returns
        one.
    :param nn.Module network: ``(hood, field) -> (alpha, logits)``.
    :param Tensor order: as for :class:`~pyro_nmm.guides.FieldGuide`. The bound is much tighter if
        the last nodes are no neighbours in the target.
    :param int num_samples: draws of the entropy a step.
    :param float warmup: share of the steps over which interactions rise.
    :param options: keywords of :class:`~pyro_nmm.guides.fitting.Steps`.
    :return: the mixture for the last step's target, and every step's loss, in nats. A step costs
        :math:`O(E C^2)` a sample.
    """
    check_hood(hood)
    check_integers(1, num_samples=num_samples)
    check_finite(warmup=warmup)
    order = None if order is None else as_tensor("order", order, hood.device)
    if not 0 <= warmup <= 1:
        raise ValueError(f"warmup must be in [0, 1], got {warmup}")
    if not isinstance(field, RandomField) and not callable(field):
        kinds = "a PairwiseMRF, a MarginalField or a function that makes one"
        raise ValueError(f"field must be {kinds}, got {type(field)}")
    optimizer = torch.optim.Adam(network.parameters(), lr=options.lr, betas=(0.9, 0.99))
    elbo, rise = TraceGraph_ELBO(), warmup * options.num_steps
    family: FieldGuide | None = None
    target: RandomField | None = None

    def take(step: int) -> tuple[FieldGuide, RandomField]:
        nonlocal family, target
        target = field if isinstance(field, RandomField) else ordinary(field(step))
        if target.batch_shape:
            raise ValueError(f"field must have no batch dimensions, got {target.batch_shape}")
        if target.num_nodes != hood.num_nodes:
            raise ValueError(f"hood has {hood.num_nodes} nodes, but field {target.num_nodes}")
        if family is None:
            last = torch.cat(target.colors()) if order is None else order
            family = FieldGuide(hood, network, lambda field: field,
                                num_samples=num_samples, order=last)  # fmt: skip
            family.mixture(target)  # with all checks, which the steps leave out
        return family, target

    def rate(step: int) -> float:
        return max(min(1.0, 2 - 2 * step / options.num_steps), 1e-3)

    def backward(step: int) -> float:
        pair, now = take(step)
        if step + 1 < rise:
            now = now.scaled((step + 1) / rise)
        with unvalidated():
            return elbo.loss_and_grads(pair.model, pair.guide, now)

    settings = {
        "field": _contents(field), "hood": (hood.num_sources, hood.ptr, hood.source),
        "order": order, "num_samples": num_samples, "warmup": warmup,
    }  # fmt: skip
    with pyro.get_param_store().scope():
        losses = options.train(network, optimizer, backward, rate, **settings)
        if family is None or target is None:  # a checkpoint had all steps
            family, target = take(options.num_steps - 1)
        return family.mixture(target), losses


def _contents(field: Any) -> Any:
    """Tensors of a field, for a checkpoint; or the function."""
    if not isinstance(field, RandomField):
        return field
    whole, stay = (field.field, field.nodes) if isinstance(field, MarginalField) else (field, None)
    return stay, whole.edges, whole.unary, whole.strength, whole.interaction
