# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The NMM as a Pyro program."""

from typing import Any, Literal

import pyro
import torch
from pyro.distributions import Categorical, Delta, Dirichlet, Independent
from pyro.ops.provenance import track_provenance
from torch import Tensor

from pyro_nmm import ChosenLabels, NeighborChoice, Neighborhood
from pyro_nmm.distributions.parameters import Parameters
from pyro_nmm.model_arguments import check_label_range, check_labels
from pyro_nmm.models.plates import OneEvent, check_plates, is_prediction
from pyro_nmm.ops.counts import posterior_alpha
from pyro_nmm.ops.marginals import spread
from pyro_nmm.provenance import untracked
from pyro_nmm.relabel import Channel


def nmm(
    hood: Neighborhood, alpha: Tensor, logits: Tensor, y: Tensor | None = None,
    observed: Tensor | None = None, *, relabel: Tensor | Channel | None = None,
    collapsed: bool = False, predict: bool = False,
    choices: Literal["sampled", "summed"] = "sampled",
) -> Tensor:  # fmt: skip
    r"""The Neighbor Mixture Model as a Pyro program, the paper's equation (1).

    .. math::

        z_j \sim \mathrm{Dirichlet}(\alpha_j), \quad
        c_i \sim \mathrm{Categorical}(L_i), \quad
        y_i \sim \mathrm{Categorical}(z_{c_i})

    ==========  ============  ===============================================
    site        event shape   what it is
    ==========  ============  ===============================================
    ``z``       ``(N, C)``    label distributions; absent if ``collapsed``
    ``c``       ``(n,)``      chosen neighbours, node ids
    ``y``       ``(n,)``      labels; observed if given
    ``y_rest``  ``(N - n,)``  labels of the other nodes, if ``predict``
    ==========  ============  ===============================================

    for the ``n`` rows where ``observed`` is true, in ascending node id. The other rows are
    marginalised, exactly. Nodes are one event, which any plate of the caller's may surround: each
    slice is then a label field with choices of its own. A plate in which neither parameters nor
    labels differ is an error, and so are a dimension of no plate, and a ``poutine.mask`` or
    ``poutine.scale`` with an entry for every node: they would count one labelling several times.
    Sites below belong to one event too (``.to_event(1)``), or into a :func:`node_plate`.
    :func:`~pyro_nmm.guides.check_program` checks a program.

    ``choices="summed"`` sums the choices out, the paper's equation (2):

    .. math::

        y_i \sim \mathrm{Categorical}\Big(\sum_j L_{ij} z_j\Big)

    With observed labels no discrete site is left: every autoguide runs, and NUTS on small graphs.
    Latent labels stay discrete: use :class:`~pyro_nmm.guides.FieldGibbs`.

    ``collapsed`` integrates ``z`` out. The bound, its gradient and its variance are the same,
    the step is faster, and in single precision large ``alpha`` keep their digits.

    >>> hood = Neighborhood(torch.tensor([[0, 1], [1, 0]]), num_nodes=2)
    >>> alpha, logits = torch.ones(2, 3), torch.zeros(hood.num_edges)
    >>> nmm(hood, alpha, logits).shape
    torch.Size([2])

    ``predict`` is for Pyro's ``Predictive`` with :func:`~pyro_nmm.guides.ordered_guide`: the other
    nodes' labels are drawn given the choices and labels of the rows, as in
    :meth:`NeighborMixture.condition` with equal weights; ``WeighedPredictive`` has exact weights.
    After MCMC give it draws of ``c`` too, by ``save_params`` of
    :class:`~pyro_nmm.guides.FieldGibbs`: choices that have seen no label are refused.

    >>> from functools import partial
    >>> from pyro.infer import Predictive
    >>> from pyro_nmm.guides import ordered_guide
    >>> given = hood, alpha, logits, torch.tensor([2, -1]), torch.tensor([True, False])
    >>> model, guide = (partial(f, collapsed=True) for f in (nmm, ordered_guide))
    >>> draws = Predictive(partial(model, predict=True), guide=guide, num_samples=9, parallel=True)
    >>> draws(*given)["y_rest"].shape
    torch.Size([9, 1])

    :param Tensor alpha: ``(..., N, C)`` positive concentrations.
    :param Tensor logits: ``(..., num_edges)`` attention scores in the order of ``hood``, not of an
        ``edge_index``: :func:`~pyro_nmm.edge_values` puts values of PyG's edges into it.
    :param Tensor y: ``(..., N)`` labels, never read where ``observed`` is false.
    :param Tensor observed: ``(N,)`` boolean mask, default all nodes.
    :param Tensor relabel: label changes by edges, see :mod:`pyro_nmm.relabel`: matrices
        ``(..., num_edges, C, C)``, with which the borrowed labels have a site ``u`` of their own,
        of event shape ``(n,)``.
    :param str choices: ``"sampled"``, or ``"summed"`` without ``collapsed`` and ``predict``.
    :return: ``(..., n)`` the labels of the rows. Cost: :math:`O(N C + E)`.
    :raises ValueError: for wrong shapes or values, for a plate, mask or scale that counts one
        labelling several times, and for options that exclude each other.
    """
    prior = Parameters.of(hood, alpha, logits, relabel)
    rows = hood.restrict(observed)
    of_rows, obs = prior.of_rows(rows), None
    alpha, channel = prior.alpha, of_rows.channel
    if y is not None:
        whole = check_labels(hood, y, hood.num_nodes)
        obs = rows.last_labels.get((whole,), lambda: whole.index_select(-1, rows.nodes))
    if pyro.settings.get("validate_distributions_pyro"):
        prior.check_values()
        if obs is not None:
            check_label_range(rows, obs, prior.num_classes)
    if predict and (observed is None or observed.all()):
        raise ValueError("predict draws the nodes that observed leaves out, but it selects all")
    if choices not in ("sampled", "summed"):
        raise ValueError(f'choices must be "sampled" or "summed", got {choices!r}')
    summed = choices == "summed"
    if summed and (collapsed or predict):
        raise ValueError('choices="summed" has z as a site: leave out collapsed and predict')
    batch = torch.broadcast_shapes(prior.batch_shape, () if obs is None else obs.shape[:-1])
    if obs is not None:
        check_plates(rows, batch)
    site: Any = {"infer": {"nmm": (prior, observed)}}  # for guides that read a trace
    with OneEvent(rows, batch) as event:
        z = None
        if not collapsed:
            if summed:
                z = pyro.sample("z", Dirichlet(alpha).to_event(1))
                return pyro.sample("y", Categorical(summed_out(of_rows, z)).to_event(1), obs=obs)
            z = pyro.sample("z", Dirichlet(alpha).to_event(1), **site)
        c = pyro.sample("c", NeighborChoice(rows, of_rows.logits), **site)
        if predict and obs is not None and event.from_prior and is_prediction():
            raise ValueError(
                "predict would draw labels given choices that have seen none: give Predictive a "
                'guide, or draws of "c" by MCMC(FieldGibbs(model), ..., save_params=[..., "c"]), '
                'and of "z" if it is written out'
            )
        if event.fixed and collapsed and channel.keeps:
            # A guide leaves the labels that it drew the choices for in this site.
            unknown = Delta(torch.full_like(c, -1), event_dim=1).mask(False)
            seen = pyro.sample("u", unknown, infer={"is_auxiliary": True})
            event.forgotten = bool((seen < 0).any())
            if not event.forgotten:
                alpha = posterior_alpha(prior.alpha, c, seen)
        labels = ChosenLabels(alpha, c) if z is None else _of_chosen(z, c)
        borrowed = None
        if not channel.keeps:  # the labels shown are drawn given the borrowed labels
            borrowed = pyro.sample("u", labels, **site)
            labels = Categorical(channel.shown_probs(rows, c, borrowed)).to_event(1)
        y = pyro.sample("y", labels, obs=obs, **site)
    if predict:
        with torch.no_grad():
            # Labels that were drawn anew come on top of those that the guide saw.
            alpha = alpha if event.drawn else prior.alpha
            rest = prior.of_rows(hood.restrict(~observed))  # type: ignore[operator]
            pyro.deterministic(
                "y_rest", _rest(rest, alpha, z, c, y if borrowed is None else borrowed), event_dim=1
            )
    return y


def summed_out(part: Parameters, z: Tensor) -> Tensor:
    """``(..., n, C)``: probabilities of labels of rows, the paper's equation (2)."""
    (z, attention, channel), provenance = untracked(z, part.attention, part.channel)
    return track_provenance(spread(part.hood, z, attention, channel), provenance)


def _of_chosen(z: Tensor, c: Tensor) -> Independent:
    # Batch shapes differ where one of the two sites is given from outside.
    batch = torch.broadcast_shapes(z.shape[:-2], c.shape[:-1])
    index = c.unsqueeze(-1).expand(*batch, -1, z.shape[-1])
    return Categorical(z.expand(*batch, -1, -1).gather(-2, index)).to_event(1)


def _rest(rest: Parameters, alpha: Tensor, z: Tensor | None, c: Tensor, borrowed: Tensor) -> Tensor:
    """Labels of other rows, given choices and labels: without ``z`` a field again."""
    values = alpha, rest.logits, z, c, borrowed, rest.channel
    (alpha, logits, z, c, borrowed, channel), _ = untracked(*values)
    batch = torch.broadcast_shapes(c.shape[:-1], borrowed.shape[:-1])
    c_rest = NeighborChoice(rest.hood, logits).expand(batch).sample()
    if z is not None:
        labels = _of_chosen(z, c_rest).sample()
    else:
        seen = (value.expand(*batch, -1) for value in (c, borrowed))
        labels = ChosenLabels(posterior_alpha(alpha, *seen), c_rest).sample()
    return channel.draw(rest.hood, c_rest, labels)
