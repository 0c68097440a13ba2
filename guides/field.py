# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

from collections.abc import Callable

import pyro
import torch
from torch import Tensor, nn

from pyro_nmm import Neighborhood
from pyro_nmm.guides.shared_forward import SharedForward
from pyro_nmm.models.random_fields import RandomField
from pyro_nmm.ops.entropy import EntropyEstimator
from pyro_nmm.validation import as_member, check_integers, order_to_rows


class FieldGuide(SharedForward):
    r"""
    The NMM as a variational family for a Markov random field: the bound of :class:`MixtureGuide`
    with far less noise, because the energy and most of the entropy are averaged in closed form.

    .. math::

        \mathrm{KL}\big(p(y) \,\|\, p^*(y) / Z\big) - \log Z
            \le -E_p \sum_i H\big(p(y_i \mid y_{<i}, c_{<i})\big) - E_p[\log p^*(y)]

    The loss of Pyro's ``TraceGraph_ELBO`` is the right-hand side, in two factors: ``energy`` in the
    model and ``entropy`` in the guide. :func:`fit_mixture` adds a schedule.

    >>> from pyro.infer import SVI, TraceGraph_ELBO
    >>> from pyro.optim import Adam
    >>> from pyro_nmm.models import FreeNMM, grid_edges, ising
    >>> target = ising(grid_edges(3, 3), coupling=0.4, field=torch.full((9,), 0.1))
    >>> hood = Neighborhood.grid(3, 3)
    >>> family = FieldGuide(hood, FreeNMM(hood, num_classes=2), target)
    >>> svi = SVI(family.model, family.guide, Adam({"lr": 0.05}), TraceGraph_ELBO())
    >>> losses = [svi.step() for _ in range(100)]
    >>> bound = sum(losses[-20:]) / 20 + target.log_normalizer()  # on the KL divergence
    >>> bool(bound < 0.6)
    True

    Cost: :math:`O(E C^2)` a sample. The parameters are those of :class:`MixtureGuide`, and

    :param target: a ``PairwiseMRF`` or :class:`~pyro_nmm.models.MarginalField`, or a Pyro program
        that returns one.
    :param str estimator: of the entropy's gradient, see
        :meth:`~pyro_nmm.NeighborMixture.entropy_bound`.
    :param int num_samples: draws of the entropy a step.
    :param Tensor order: ``(N,)`` permutation of the node ids. Default: the colors of a field, else
        random.
    """

    order: Tensor

    def __init__(
        self,
        hood: Neighborhood,
        network: nn.Module,
        target: RandomField | Callable[..., RandomField],
        *,
        estimator: str = "one_step_credit",
        num_samples: int = 4,
        order: Tensor | None = None,
        name: str = "mixture",
    ) -> None:
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
        if order is None:
            order = torch.randperm(hood.num_nodes, device=hood.device)
        order_to_rows(hood, order)
        self.register_buffer("order", order)

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
