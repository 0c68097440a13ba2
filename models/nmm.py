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
from pyro_nmm.relabel import (
    at_choices,
    batch_of,
    carried,
    check_relabel,
    check_relabel_values,
    is_permutation,
    of_edges,
    shown_probs,
)
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
    relabel: Tensor | None = None,
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
    :param Tensor relabel: what edges make of a label, see :mod:`pyro_nmm.relabel`: permutations
        ``(num_edges, C)``, or stochastic matrices ``(..., num_edges, C, C)``, with which the
        borrowed labels have a site ``u`` of their own, of event shape ``(n,)``.
    :return: ``(..., n)`` the labels of the rows.
    """
    alpha, logits = check_shapes(hood, alpha, logits)
    check_all_rows(hood)
    validate = pyro.settings.get("validate_distributions_pyro")
    if validate:
        check_values(alpha, logits, hood)
        check_relabel_values(relabel)
    rows = hood.restrict(observed)
    if relabel is not None:
        relabel = of_edges(check_relabel(hood, relabel, alpha.shape[-1]), rows.edge)
    obs = None
    if y is not None:
        obs = check_labels(hood, y, hood.num_nodes).index_select(-1, rows.nodes)
        if validate:
            check_label_range(rows, obs, alpha.shape[-1])
    if obs is not None:
        shapes = alpha.shape[:-2], logits.shape[:-1], obs.shape[:-1], batch_of(relabel)
        check_plates(torch.broadcast_shapes(*shapes))
    choice = NeighborChoice(rows, logits.index_select(-1, rows.edge))
    with OneEvent(rows.num_rows):
        return _sites(rows, alpha, choice, obs, collapsed, relabel)


def _sites(
    rows: Neighborhood,
    alpha: Concentrations,
    choice: NeighborChoice,
    obs: Tensor | None,
    collapsed: bool,
    relabel: Tensor | None,
) -> Tensor:
    # Where edges relabel by chance, what is borrowed is no function of what is shown.
    chance = relabel is not None and not is_permutation(relabel)
    site, seen = ("u", None) if chance else ("y", obs)
    if collapsed:
        c = pyro.sample("c", choice)
        table = None if relabel is None or chance else at_choices(rows, relabel, c)
        labels = pyro.sample(site, ChosenLabels(alpha, c, table), obs=seen)
    else:
        if isinstance(alpha, OrdinalConcentrations):
            raise ValueError("alpha is not written out: pass alpha.table(), or collapsed=True")
        z = pyro.sample("z", Dirichlet(alpha).to_event(1))
        c = pyro.sample("c", choice)
        # Batch shapes differ where one of the two sites is given from outside.
        batch = torch.broadcast_shapes(z.shape[:-2], c.shape[:-1])
        index = c.unsqueeze(-1).expand(*batch, -1, z.shape[-1])
        probs = z.expand(*batch, -1, -1).gather(-2, index)
        if relabel is not None and not chance:
            probs = carried(at_choices(rows, relabel, c), probs)
        labels = pyro.sample(site, Categorical(probs).to_event(1), obs=seen)
    if relabel is None or not chance:
        return labels
    shown = Categorical(shown_probs(rows, relabel, c, labels)).to_event(1)
    return pyro.sample("y", shown, obs=obs)
