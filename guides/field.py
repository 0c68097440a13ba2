# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The NMM as a variational family for Markov random fields, its fit, and the mean field."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pyro
import torch
from pyro.infer import TraceGraph_ELBO
from torch import Tensor, nn

from pyro_nmm import Neighborhood, NeighborMixture
from pyro_nmm.arguments import as_member, as_tensor, check_finite, check_integers
from pyro_nmm.fitting import Steps, ordinary, with_gradients, with_options
from pyro_nmm.graph_arguments import check_hood
from pyro_nmm.guides.shared_forward import SharedForward, as_order, unvalidated
from pyro_nmm.models.random_fields import MarginalField, PairwiseMRF, RandomField, check_field
from pyro_nmm.ops.entropy import EntropyEstimator


class FieldGuide(SharedForward):
    r"""
    The NMM as a variational family for a Markov random field: the bound of :class:`MixtureGuide`
    with far less noise, because the energy and most of the entropy are averaged in closed form.

    .. math::

        & \mathrm{KL}\big(p(y) \,\|\, p^*(y) / Z\big) - \log Z \\
            & \le -E_p \sum_i H\big(p(y_i \mid y_{<i}, c_{<i})\big) - E_p[\log p^*(y)]

    The loss of Pyro's ``TraceGraph_ELBO`` is the right-hand side, in two factors: ``energy`` in the
    model and ``entropy`` in the guide. :func:`fit_mixture` adds a schedule.

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
    :param str estimator: see :meth:`~pyro_nmm.NeighborMixture.entropy_bound`; ``num_samples`` are
        its draws a step.
    :param Tensor order: ``(N,)`` node ids; default the colors of a field, else random.
    """

    order: Tensor

    def __init__(
        self, hood: Neighborhood, network: nn.Module,
        target: RandomField | Callable[..., RandomField], *, estimator: str = "one_step_credit",
        num_samples: int = 4, order: Tensor | None = None, name: str = "mixture",
    ) -> None:  # fmt: skip
        super().__init__(hood, network, name)
        check_integers(1, num_samples=num_samples)
        self.target, self.num_samples = target, num_samples
        self.estimator = as_member(EntropyEstimator, estimator=estimator)
        if isinstance(target, RandomField):
            if target.num_nodes != hood.num_nodes or target.batch_shape:
                raise ValueError(
                    f"target must have the {hood.num_nodes} nodes of hood and no batch dimensions, "
                    f"got {target.num_nodes} nodes and batch {tuple(target.batch_shape)}"
                )
            order = torch.cat(target.colors()) if order is None else order
        self.register_buffer("order", as_order(hood, order))

    def guide(self, *inputs) -> None:
        """The factor ``entropy``."""
        mixture = self.family(self.hood, *self.give(inputs))
        bound = mixture.entropy_bound(self.num_samples, self.estimator, self.order)
        pyro.factor("entropy", -bound.mean(), has_rsample=True)

    def model(self, *inputs) -> RandomField:
        """The factor ``energy``; returns the target."""
        mixture = self.family(self.hood, *self.take(inputs))
        fixed = isinstance(self.target, RandomField)
        field = self.target if fixed else self.target(*inputs)  # type: ignore[operator]
        if not isinstance(field, RandomField):
            raise TypeError(f"target must return a PairwiseMRF or MarginalField, got {type(field)}")
        pyro.factor("energy", field.expected_potential(mixture))
        return field


class MeanField(NamedTuple):
    """Marginals ``(N, C)``, and the loss of each start ``(S,)``, sorted."""

    marginals: Tensor
    losses: Tensor


@torch.no_grad()
def mean_field(
    field: PairwiseMRF, starts: Tensor | None = None, *, num_random: int = 4,
    num_sweeps: int = 2000, tolerance: float = 1e-8,
) -> MeanField:  # fmt: skip
    r"""
    Independent approximation of a Markov random field, by coordinate ascent from several starts.

    .. math::

        q(y) = \prod_i q_i(y_i), \qquad
        q_i \leftarrow \mathrm{softmax}\Big( u_i + \sum_j w_{ij} \phi \, q_j \Big)

    The loss is :math:`\mathrm{KL}(q \,\|\, p) - \log Z`, with many local minima if interactions are
    strong. Starts are the softmax of the unary terms, the same with interactions that rise slowly
    from zero, every label everywhere, random fields, and ``starts``.

    >>> from pyro_nmm.models import grid_edges, ising
    >>> field = ising(grid_edges(2, 2), coupling=0.1, field=torch.tensor([1.0, 0.0, 0.0, -1.0]))
    >>> mean_field(field).marginals[:, 1]
    tensor([0.8808, 0.5000, 0.5000, 0.1192])

    :param PairwiseMRF field: without batch dimensions.
    :param Tensor starts: ``(S, N, C)`` further starts, probabilities.
    :param int num_random: random starts.
    :param float tolerance: change of a probability that ends the at most ``num_sweeps`` sweeps.
    :return: the best marginals, and losses in nats. Cost: :math:`O(S K (P C + N C^2))` a
        sweep, with ``K`` colours of the graph.
    """
    check_field(field)
    check_integers(1, num_sweeps=num_sweeps)
    check_integers(0, num_random=num_random)
    if not tolerance >= 0:
        raise ValueError(f"tolerance must not be negative, got {tolerance}")
    shape = field.num_nodes, field.num_classes
    if starts is not None:
        starts = as_tensor("starts", starts, field.unary.device)
        good = starts.is_floating_point() and starts.dim() == 3
        if not good or starts.shape[1:] != shape or not (starts >= 0).all():
            size, got = f"(S, {shape[0]}, {shape[1]})", tuple(starts.shape)
            raise ValueError(f"starts must hold probabilities of shape {size}, got {got}")
    unary = field.unary
    labels = torch.eye(shape[1], dtype=unary.dtype, device=unary.device)[:, None].expand(-1, *shape)
    noise = torch.randn(num_random, *shape, dtype=unary.dtype, device=unary.device)
    colors = field.colors()
    q = torch.cat([unary.softmax(-1)[None], labels, (4 * noise).softmax(-1)])
    annealed = unary.softmax(-1)[None]
    for share in torch.linspace(0, 1, 101):
        annealed = _sweep(field.scaled(share.item()), colors, annealed)
    q = torch.cat([q, annealed] if starts is None else [q, annealed, starts.to(q)])
    for _ in range(num_sweeps):
        before, q = q, _sweep(field, colors, q)
        if (q - before).abs().max() < tolerance:
            break
    # Each edge meets both its ends in the local logits, so it counts half there.
    energy = (q * (field.local_logits(q) + unary)).sum((-2, -1)) / 2
    losses = -torch.special.entr(q).sum((-2, -1)) - energy
    return MeanField(q[losses.argmin()], losses.sort().values)


def _sweep(field: PairwiseMRF, colors: list[Tensor], q: Tensor) -> Tensor:
    for nodes in colors:
        q = q.index_copy(1, nodes, field.local_logits(q).index_select(1, nodes).softmax(-1))
    return q


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
