# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

from typing import NamedTuple

import torch
from torch import Tensor

from pyro_nmm.models.random_fields import PairwiseMRF, check_field
from pyro_nmm.validation import check_integers


class MeanField(NamedTuple):
    """Marginals ``(N, C)``, and the loss of each start ``(S,)``, sorted."""

    marginals: Tensor
    losses: Tensor


@torch.no_grad()
def mean_field(
    field: PairwiseMRF,
    starts: Tensor | None = None,
    *,
    num_random: int = 4,
    num_sweeps: int = 2000,
    tolerance: float = 1e-8,
) -> MeanField:
    r"""
    Independent approximation of a Markov random field, by coordinate ascent from several starts.

    .. math::

        q(y) = \prod_i q_i(y_i), \qquad
        q_i \leftarrow \mathrm{softmax}\Big( u_i + \sum_j w_{ij} \phi \, q_j \Big)

    The loss is :math:`\mathrm{KL}(q \,\|\, p) - \log Z`, as of :class:`FieldGuide`. It has many
    local minima if interactions are strong. Starts are the softmax of the unary terms, the same
    with interactions that rise slowly from zero, every label everywhere, random fields, and
    ``starts``.

    >>> from pyro_nmm.models import grid_edges, ising
    >>> field = ising(grid_edges(2, 2), coupling=0.1, field=torch.tensor([1.0, 0.0, 0.0, -1.0]))
    >>> mean_field(field).marginals[:, 1]
    tensor([0.8808, 0.5000, 0.5000, 0.1192])

    :param PairwiseMRF field: without batch dimensions.
    :param Tensor starts: ``(S, N, C)`` further starts, probabilities.
    :param int num_random: random starts.
    :param int num_sweeps: at most.
    :param float tolerance: largest change of a probability in the last sweep.
    :return: the best marginals, and losses in nats. Cost: :math:`O(S P C)` a sweep.
    """
    check_field(field)
    check_integers(1, num_sweeps=num_sweeps)
    check_integers(0, num_random=num_random)
    if not tolerance >= 0:
        raise ValueError(f"tolerance must not be negative, got {tolerance}")
    shape = field.num_nodes, field.num_classes
    if starts is not None:
        good = isinstance(starts, Tensor) and starts.is_floating_point() and starts.dim() == 3
        if not good or starts.shape[1:] != shape or not (starts >= 0).all():
            got = tuple(starts.shape) if isinstance(starts, Tensor) else type(starts)
            size = f"(S, {shape[0]}, {shape[1]})"
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
    losses = _losses(field, q)
    return MeanField(q[losses.argmin()], losses.sort().values)


def _sweep(field: PairwiseMRF, colors: list[Tensor], q: Tensor) -> Tensor:
    for nodes in colors:
        q = q.index_copy(1, nodes, field.local_logits(q).index_select(1, nodes).softmax(-1))
    return q


def _losses(field: PairwiseMRF, q: Tensor) -> Tensor:
    """``(S,)``: each edge meets both its ends in the local logits, so it counts half there."""
    energy = (q * (field.local_logits(q) + field.unary)).sum((-2, -1)) / 2
    return -torch.special.entr(q).sum((-2, -1)) - energy
