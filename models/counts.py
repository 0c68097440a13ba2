# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The NMM of counts as a Pyro program."""

from typing import Any

import pyro
import torch
from pyro.distributions import Dirichlet
from torch import Tensor

from pyro_nmm import Neighborhood
from pyro_nmm.arguments import expect, expect_all
from pyro_nmm.distributions.label_counts import LabelCounts
from pyro_nmm.distributions.parameters import Parameters
from pyro_nmm.models.nmm import summed_out
from pyro_nmm.models.plates import OneEvent, check_plates


def nmm_counts(
    hood: Neighborhood, alpha: Tensor, logits: Tensor, y: Tensor | None = None,
    observed: Tensor | None = None, *, total_count: Tensor | None = None,
) -> Tensor:  # fmt: skip
    r"""The Neighbor Mixture Model of counts, such as votes of counties or cells of spots.

    Each of the :math:`n_i` units of a node chooses a neighbour and takes a label from it. Counts of
    units by label have, with the choices summed out,

    .. math::

        z_j \sim \mathrm{Dirichlet}(\alpha_j), \qquad
        y_i \sim \mathrm{Multinomial}\Big(n_i, \sum_j L_{ij} z_j\Big) .

    Sites are ``z``, of event shape ``(N, C)``, and ``y``, of event shape ``(n, C)`` for the ``n``
    rows where ``observed`` is true, in ascending node id. The other rows are marginalised, exactly.
    No discrete site is latent: NUTS runs on small graphs, :class:`~pyro_nmm.guides.FieldGibbs` on
    large ones. Autoguides run, too, and overestimate concentrations.

    Units of :math:`i` and :math:`i'` share label distributions, so their labels correlate. With
    :math:`u_i = \sum_j L_{ij} \mu_j`, :math:`\mu_j = \alpha_j / A_j` and :math:`A_j = \sum_k
    \alpha_{jk}`,

    .. math::

        E[y_i] = n_i u_i , \qquad
        \mathrm{Cov}(y_i, y_{i'}) = n_i n_{i'} K_{ii'}
            + \delta_{ii'} n_i \big(\mathrm{diag}(u_i) - u_i u_i^\top - K_{ii}\big) , \qquad
        K_{ii'} = \sum_j L_{ij} L_{i'j}
            \frac{\mathrm{diag}(\mu_j) - \mu_j \mu_j^\top}{A_j + 1} .

    If all :math:`\mu_j` are equal, the variance is :math:`1 + (n_i - 1) \sum_j L_{ij}^2 / (A_j +
    1)` times the variance of a multinomial. With a self-loop alone this is the
    Dirichlet-multinomial.

    >>> hood = Neighborhood.grid(2, 2)
    >>> votes = torch.tensor([[30, 12], [25, 20], [8, 31], [5, 40]])
    >>> def model(votes, total_count=None):
    ...     kappa = pyro.sample("kappa", pyro.distributions.LogNormal(0.0, 1.0))
    ...     alpha = kappa * torch.full((4, 2), 0.5)
    ...     return nmm_counts(hood, alpha, torch.zeros(hood.num_edges), votes,
    ...                       total_count=total_count)
    >>> model(None, total_count=votes.sum(-1)).sum(-1)
    tensor([42., 45., 39., 45.])

    ``Predictive`` with draws of ``z`` and without ``y`` has counts of all nodes, also of those that
    ``observed`` leaves out of the fit.

    :param Tensor alpha: ``(..., N, C)`` positive concentrations.
    :param Tensor logits: ``(..., num_edges)`` attention scores in the order of ``hood``.
    :param Tensor y: ``(..., N, C)`` counts, never read where ``observed`` is false.
    :param Tensor observed: ``(N,)`` boolean mask, default all nodes.
    :param Tensor total_count: ``(..., N)`` numbers of units, default the sums of ``y``.
    :return: ``(..., n, C)`` counts of the rows. Cost: :math:`O(E C)`, whatever the counts.
    :raises ValueError: for wrong shapes, ``y`` that holds no counts, a ``total_count`` that differs
        from its sums, neither of both, and plates as in :func:`nmm`.
    """
    prior = Parameters.of(hood, alpha, logits)
    rows, obs = hood.restrict(observed), None
    if y is None and total_count is None:
        raise ValueError(
            "total_count must be given without y: as many units of each node are drawn"
        )
    if y is not None:
        cells = "...", hood.num_nodes, prior.num_classes
        whole = expect("y", y, cells, like=hood, note="a count of each label of each node")
        obs = whole.index_select(-2, rows.nodes)
    number = total_count
    if number is not None:
        shape = "...", hood.num_nodes
        number = expect("total_count", number, shape, like=hood, note="units of each node")
        number = number.index_select(-1, rows.nodes)
    if pyro.settings.get("validate_distributions_pyro"):
        prior.check_values()
        for name, value in (("y", obs), ("total_count", number)):
            if value is not None:
                good = (value >= 0) & (value == value.round()) & (value < torch.inf)
                expect_all(name, value, good, "hold counts: whole numbers from 0 on")
        if obs is not None and number is not None:
            good = obs.double().sum(-1) == number
            expect_all("total_count", number.expand(good.shape), good, "be the sums of y")
    total: Any = number if obs is None else obs.double().sum(-1)
    batch = torch.broadcast_shapes(prior.batch_shape, total.shape[:-1])
    if obs is not None:
        check_plates(rows, batch)
    with OneEvent(rows, batch):
        infer: Any = {"nmm_counts": (prior, observed)}  # for FieldGibbs
        z = pyro.sample("z", Dirichlet(prior.alpha).to_event(1), infer=infer)
        counts = LabelCounts(total, summed_out(prior.of_rows(rows), z)).to_event(1)
        obs = None if obs is None else obs.to(prior.alpha.dtype)
        return pyro.sample("y", counts, obs=obs, infer=infer)
