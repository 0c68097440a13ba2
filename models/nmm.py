# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import pyro
import torch
from pyro.distributions import Categorical, Dirichlet
from torch import Tensor

from pyro_nmm import ChosenLabels, NeighborChoice, Neighborhood
from pyro_nmm.concentrations import Concentrations, OrdinalConcentrations
from pyro_nmm.models.one_event import OneEvent, check_plates
from pyro_nmm.validation import (
    check_all_rows,
    check_label_range,
    check_labels,
    check_shapes,
    check_values,
)


def nmm(
    hood: Neighborhood,
    alpha: Concentrations,
    logits: Tensor,
    y: Tensor | None = None,
    observed: Tensor | None = None,
    *,
    collapsed: bool = False,
) -> Tensor:
    r"""
    The Neighbor Mixture Model as a Pyro program, the paper's equation (1).

    .. math::

        z_j \sim \mathrm{Dirichlet}(\alpha_j), \quad
        c_i \sim \mathrm{Categorical}(L_i), \quad
        y_i \sim \mathrm{Categorical}(z_{c_i})

    ======  ==================  ===============================================
    site    event shape         what it is
    ======  ==================  ===============================================
    ``z``   ``(N, C)``          label distributions; absent if ``collapsed``
    ``c``   ``(n,)``            chosen neighbours, node ids
    ``y``   ``(n,)``            labels; observed if given
    ======  ==================  ===============================================

    for the ``n`` rows where ``observed`` is true, in ascending node id. Leaving the other
    rows out is exact: they are marginalised. Nodes are event dimensions, not a plate, so
    the program may stand in any plate of the caller's: each slice is then a label field
    with choices of its own. What would count one labelling several times is an error: a plate in
    which neither parameters nor labels differ, and a ``poutine.mask`` or ``poutine.scale`` with an
    entry for every node. To leave nodes out give ``observed``; to weigh a batch of graphs, joined
    into one, as a part of all graphs, ``poutine.scale`` with a number.

    ``collapsed`` integrates ``z`` out. The bound, its gradient and its variance are the same,
    the step is faster, and in single precision large ``alpha`` keep their digits.

    >>> hood = Neighborhood(torch.tensor([[0, 1], [1, 0]]), num_nodes=2)
    >>> alpha, logits = torch.ones(2, 3), torch.zeros(hood.num_edges)
    >>> nmm(hood, alpha, logits).shape
    torch.Size([2])

    Cost: :math:`O(N C + E)`.

    :param Neighborhood hood: The neighbourhoods.
    :param alpha: ``(..., N, C)`` positive concentrations; or, with ``collapsed``,
        :class:`~pyro_nmm.GaussianConcentrations` or :class:`~pyro_nmm.LogisticConcentrations`.
    :param Tensor logits: ``(..., num_edges)`` attention scores in the order of ``hood``.
    :param Tensor y: ``(..., N)`` labels, never read where ``observed`` is false.
    :param Tensor observed: ``(N,)`` boolean mask, default all nodes.
    :return: ``(..., n)`` the labels of the rows.
    """
    alpha, logits = check_shapes(hood, alpha, logits)
    check_all_rows(hood)
    validate = pyro.settings.get("validate_distributions_pyro")
    if validate:
        check_values(alpha, logits, hood)
    rows = hood.restrict(observed)
    obs = None
    if y is not None:
        obs = check_labels(hood, y, hood.num_nodes).index_select(-1, rows.nodes)
        if validate:
            check_label_range(rows, obs, alpha.shape[-1])
    if obs is not None:
        shapes = alpha.shape[:-2], logits.shape[:-1], obs.shape[:-1]
        check_plates(torch.broadcast_shapes(*shapes))
    choice = NeighborChoice(rows, logits.index_select(-1, rows.edge))
    with OneEvent(rows.num_rows):
        return _sites(alpha, choice, obs, collapsed)


def _sites(
    alpha: Concentrations, choice: NeighborChoice, obs: Tensor | None, collapsed: bool
) -> Tensor:
    if collapsed:
        c = pyro.sample("c", choice)
        return pyro.sample("y", ChosenLabels(alpha, c), obs=obs)
    if isinstance(alpha, OrdinalConcentrations):
        raise ValueError("alpha is not written out: pass alpha.table(), or collapsed=True")
    z = pyro.sample("z", Dirichlet(alpha).to_event(1))
    c = pyro.sample("c", choice)
    # Batch shapes differ where one of the two sites is given from outside.
    batch = torch.broadcast_shapes(z.shape[:-2], c.shape[:-1])
    z = z.expand(*batch, -1, -1)
    index = c.unsqueeze(-1).expand(*batch, -1, z.shape[-1])
    return pyro.sample("y", Categorical(z.gather(-2, index)).to_event(1), obs=obs)
