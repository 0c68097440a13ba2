# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The NMM as a variational family for Markov random fields, and its fit."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from statistics import fmean
from typing import Any, Unpack

import pyro
import torch
from pyro.infer import TraceGraph_ELBO
from torch import Tensor, nn

from pyro_nmm import Neighborhood, NeighborMixture
from pyro_nmm.arguments import Array, check_integers
from pyro_nmm.fitting import StepOptions, Steps, ordinary, with_gradients, with_options
from pyro_nmm.guides.best_state import BestState
from pyro_nmm.guides.shared_forward import SharedForward, as_order, evaluation, unvalidated
from pyro_nmm.model_arguments import check_hood
from pyro_nmm.models.networks import FreeNMM
from pyro_nmm.models.random_fields import (
    MarginalField,
    MeanFieldCorrection,
    RandomField,
    independent,
    mean_field,
)


class FieldGuide(SharedForward[NeighborMixture]):
    r"""The NMM as a variational family for a Markov random field: the bound of
    :class:`MixtureGuide` with far less noise, because the energy and most of the entropy are
    averaged in closed form.

    .. math::

        & \mathrm{KL}\big(p(y) \,\|\, p^*(y) / Z\big) - \log Z \\
            & \le -E_p \sum_i H\big(p(y_i \mid y_{<i}, c_{<i})\big) - E_p[\log p^*(y)]

    The loss of Pyro's ``TraceGraph_ELBO`` is the right-hand side, the paper's equation (10), in two
    factors: ``energy`` in the model and ``entropy`` in the guide.

    >>> from pyro.infer import TraceGraph_ELBO
    >>> from pyro_nmm.models import FreeNMM, grid_edges, ising
    >>> target = ising(grid_edges(3, 3), coupling=0.4, field=torch.full((9,), 0.1))
    >>> hood = Neighborhood.grid(3, 3)
    >>> family = FieldGuide(hood, FreeNMM(hood, num_classes=2), target)
    >>> loss = TraceGraph_ELBO(num_particles=20).loss(family.model, family.guide)
    >>> bool(loss + target.log_normalizer() > 0)  # a bound on the KL divergence
    True

    Cost: :math:`O(E C^2)` a sample. Parameters as for :class:`MixtureGuide`, and

    :param target: a ``PairwiseMRF`` or :class:`~pyro_nmm.models.MarginalField`, or a Pyro program
        that returns one.
    :param int num_samples: draws of :meth:`~pyro_nmm.NeighborMixture.entropy_bound` a step.
    :param Tensor order: ``(N,)`` node ids; default the colors of a field, else random.
    :raises ValueError: for a target of another size, and an ``order`` that is no permutation.
    :raises TypeError: if a program returns another target.
    """

    order: Tensor

    def __init__(
        self,
        hood: Neighborhood,
        network: nn.Module,
        target: RandomField | Callable[..., RandomField],
        *,
        num_samples: int = 4,
        order: Array | None = None,
        name: str = "mixture",
    ) -> None:
        super().__init__(hood, network, name, NeighborMixture)
        check_integers(1, num_samples=num_samples)
        self.target, self.num_samples = target, num_samples
        if isinstance(target, RandomField):
            _check_nodes("target", target, hood)
            order = torch.cat(target.colors()) if order is None else order
        self.register_buffer("order", as_order(hood, order))

    def guide(self, *inputs: Any) -> None:
        """The factor ``entropy``."""
        mixture = self.family(self.hood, *self.give(inputs))
        bound = mixture.entropy_bound(self.num_samples, order=self.order)
        pyro.factor("entropy", -bound.mean(), has_rsample=True)

    def model(self, *inputs: Any) -> RandomField:
        """The factor ``energy``; returns the target."""
        mixture = self.family(self.hood, *self.take(inputs))
        fixed = isinstance(self.target, RandomField)
        field = self.target if fixed else self.target(*inputs)  # type: ignore[operator]
        if not isinstance(field, RandomField):
            raise TypeError(f"target must return a PairwiseMRF or MarginalField, got {type(field)}")
        pyro.factor("energy", field.expected_potential(mixture))
        return field


@with_options
@with_gradients
def fit_mixture(
    field: RandomField | Callable[[int], RandomField],
    hood: Neighborhood,
    network: nn.Module | None = None,
    *,
    order: Array | None = None,
    num_samples: int = 4,
    options: Steps = Steps(),
    **fields: Unpack[StepOptions],
) -> tuple[NeighborMixture, list[float]]:
    r"""Fit an NMM to a Markov random field: Pyro's ``TraceGraph_ELBO`` on a
    :class:`~pyro_nmm.guides.FieldGuide`. Pyro's parameter store is left as it was. The learning
    rate falls over the second half of the steps. The bound is estimated before the fit, after every
    tenth of the steps and at the end, and the best state is returned (:class:`BestState`); or the
    mean field, if that is closer to a single field than the best state's bound.

    >>> from pyro_nmm.models import grid_edges, ising
    >>> field = ising(grid_edges(3, 3), coupling=0.4, field=torch.full((9,), 0.1))
    >>> mix, losses = fit_mixture(field, Neighborhood.grid(3, 3), num_steps=100, lr=0.1)
    >>> mix.marginals().shape  # (N, C)
    torch.Size([9, 2])

    :param field: a :class:`~pyro_nmm.models.PairwiseMRF` or, for a closer approximation, its
        :class:`~pyro_nmm.models.MarginalField`; or a function of the step's number that returns
        one, for a network that serves many.
    :param nn.Module network: ``(hood, field) -> (alpha, logits)``, such as a
        :class:`~pyro_nmm.models.MeanFieldCorrection`. Default: the better of two
        :class:`~pyro_nmm.models.FreeNMM` after an eighth of the steps each, from the mean field,
        and from each node's own term with interactions that rise from zero.
    :param Tensor order: as for :class:`~pyro_nmm.guides.FieldGuide`; needed if ``field`` is a
        function. The bound is much tighter if the last nodes are no neighbours in the target.
    :param int num_samples: draws of the entropy a step.
    :param options: keywords of :class:`~pyro_nmm.fitting.Steps`.
    :return: the mixture for the last step's target, and the loss of every step of its network, in
        nats. A step costs :math:`O(E C^2)` a sample, and the estimates of the bound a fifth of it.
    :raises ValueError: for a wrong ``field``, and a function without ``network`` or ``order``;
        errors of :meth:`~pyro_nmm.fitting.Steps.train`.
    """
    check_hood(hood)
    if not isinstance(field, RandomField):
        if not callable(field):
            kinds = "a PairwiseMRF, a MarginalField or a function that makes one"
            raise ValueError(f"field must be {kinds}, got {type(field)}")
        if network is None or order is None:
            name = "network" if network is None else "order"
            raise ValueError(f"{name} must be given if field is a function: it serves many")
        family = _family(hood, network, num_samples, order)
        target, _, losses = _run(family, field, options)
        with pyro.get_param_store().scope():
            return family.mixture(target), losses
    _check_nodes("field", field, hood)
    order = torch.cat(field.colors()) if order is None else order
    alone = mean_field(field)
    given: tuple[Tensor, ...] = ()
    early: list[float] = []
    if isinstance(network, MeanFieldCorrection):  # whose own answer is the start
        start = mean_field(field, **network.options) if network.options else alone
        given = (start.marginals,)
    if network is None:
        starts = alone.marginals, field.unary.softmax(-1)
        first, second = (FreeNMM(hood, field.num_classes, start) for start in starts)
        share, network = options.num_steps // 8, first
        if share:
            short = replace(options, num_steps=share, checkpoint=None)
            _, best, early = _run(_family(hood, first, num_samples, order), field, short)
            family = _family(hood, second, num_samples, order)
            _, other, late = _run(family, field, short, rise=0.5)
            if other.least < best.least:
                network, early = second, late
            options = replace(options, num_steps=options.num_steps - 2 * share)
    family = _family(hood, network, num_samples, order)
    *_, losses = _run(family, field, options, given)
    with pyro.get_param_store().scope():
        bound = fmean(_losses(family, options, field, *given, times=4))
        if bound > alone.losses[0] and (closest := independent(hood, alone.marginals)):
            return closest, early + losses
        return family.mixture(field, *given), early + losses


def _family(hood: Neighborhood, network: nn.Module, num_samples: int, order: Array) -> FieldGuide:
    """A guide whose first input is the field."""
    target = lambda field, *_: field  # noqa: E731
    return FieldGuide(hood, network, target, num_samples=num_samples, order=order)


def _run(
    family: FieldGuide,
    field: RandomField | Callable[[int], RandomField],
    options: Steps,
    given: tuple[Tensor, ...] = (),
    rise: float = 0.0,
) -> tuple[RandomField, BestState, list[float]]:
    """Steps of a network whose inputs are the field and what is ``given``. To a single field they
    end in the best state. Interactions ``rise`` from zero over a share of the steps.
    """
    hood, network, single = family.hood, family.network, isinstance(field, RandomField)
    optimizer = torch.optim.Adam(network.parameters(), lr=options.lr, betas=(0.9, 0.99))
    elbo, best, every = TraceGraph_ELBO(), BestState(), max(1, options.num_steps // 10)
    target: RandomField | None = None

    def now(step: int) -> RandomField:
        return field if isinstance(field, RandomField) else ordinary(field(step))

    def look() -> None:
        best.update(_losses(family, options, target, *given), network.state_dict())

    def rate(step: int) -> float:
        return max(min(1.0, 2 - 2 * step / options.num_steps), 1e-3)

    def backward(step: int) -> float:
        nonlocal target
        target = now(step)
        _check_nodes("field", target, hood)
        if step == 0:
            family.mixture(target, *given)  # with all checks, which the steps leave out
        if single and step % every == 0:
            look()
        share = (step + 1) / (rise * options.num_steps) if rise else 1.0
        risen = target.scaled(share) if share < 1 else target
        with unvalidated():
            return elbo.loss_and_grads(family.model, family.guide, risen, *given)

    whole = nn.ModuleDict({"network": network, "best": best})
    settings: dict[str, Any] = {"field": _tensors(field), "order": family.order}
    settings["hood"] = hood.num_sources, hood.ptr, hood.source
    settings["num_samples"] = family.num_samples
    with pyro.get_param_store().scope():
        losses = options.train(whole, optimizer, backward, rate, **settings)
        target = now(options.num_steps - 1) if target is None else target  # all steps were saved
        if single:
            look()
            best.restore(network.state_dict())
    return target, best, losses


def _losses(family: FieldGuide, options: Steps, *inputs, times: int = 1) -> list[float]:
    """Estimates of a state's loss. Half as many choose worse states; twice cost a third."""
    count = times * max(2, options.num_steps // 50)
    with evaluation(family), unvalidated():
        return [TraceGraph_ELBO().loss(family.model, family.guide, *inputs) for _ in range(count)]


def _check_nodes(name: str, field: RandomField, hood: Neighborhood) -> None:
    if field.num_nodes != hood.num_nodes or field.batch_shape:
        must = f"the {hood.num_nodes} nodes of hood and no batch dimensions"
        got = f"{field.num_nodes} nodes and batch {tuple(field.batch_shape)}"
        raise ValueError(f"{name} must have {must}, got {got}")
    # A mixture gives no label the probability zero. With 300 nats between terms the KL divergence
    # of a fit is as with 100, with 1,000 a quarter larger, with 10,000 twice as large or more.
    if (widest := (field.unary.amax(-1) - field.unary.amin(-1)).max()) > 500:
        cure = "for labels that cannot be, give 100 less than the largest term"
        warnings.warn(f"unary of {name} has terms {widest:.0f} nats apart: {cure}", stacklevel=4)


def _tensors(field: Any) -> Any:
    """Tensors by which a checkpoint knows a field, or the function that makes fields."""
    if isinstance(field, MarginalField):
        return field.nodes, _tensors(field.field)
    if isinstance(field, RandomField):
        return field.edges, field.unary, field.strength, field.interaction
    return field
