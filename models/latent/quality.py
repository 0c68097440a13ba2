# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""How good annotators are."""

from typing import NamedTuple

import torch
from torch import Tensor

from pyro_nmm.models.latent.annotators import Annotators
from pyro_nmm.models.latent.field import HiddenField


class Quality(NamedTuple):
    """How good annotators are: posterior means with intervals, ``(M,)`` each."""

    mean: Tensor
    low: Tensor
    high: Tensor


def accuracy(field: HiddenField, level: float = 0.9) -> Quality:
    r"""
    How often annotators name the label, :math:`\sum_k \pi_k P_{mkk}`, with :math:`\pi` the labels'
    shares among the nodes.

    >>> from pyro_nmm import Neighborhood
    >>> from pyro_nmm.models import Annotators, accuracy
    >>> hood = Neighborhood(torch.empty(2, 0, dtype=torch.long), num_nodes=200)
    >>> truth = torch.arange(200) % 2
    >>> wrong = torch.rand(200, 3) < torch.tensor([0.05, 0.1, 0.4])
    >>> field = Annotators(2).fit(hood, truth[:, None] ^ wrong.long())
    >>> quality = accuracy(field)
    >>> quality.mean.argmin()
    tensor(2)

    :param HiddenField field: fitted to :class:`Annotators` whose answers name labels.
    :param float level: of the intervals, which hold the accuracy with this probability.
    :return: means and ends of intervals, ``(M,)``. Cost: :math:`O(T (N + M C K))` for ``T`` draws.
    :raises ValueError: for answers that name no labels.
    """
    emission = field.emission
    if not isinstance(emission, Annotators) or not emission.named:
        raise ValueError(
            "accuracy needs annotators whose answers name labels: aligned=True and no num_types; "
            "see information"
        )
    confusion, shares = _by_label(field)
    size = min(confusion.shape[-2:])
    right = confusion.diagonal(dim1=-2, dim2=-1) * shares[:, None, :size]
    return _quality(right.sum(-1), level)


def information(field: HiddenField, level: float = 0.9) -> Quality:
    r"""
    What an answer tells of the label, in nats: their mutual information at the labels' shares
    among the nodes. It does not need answers to name labels.

    .. math::

        I(a_m; u) = \sum_{k, a} \pi_k P_{mka} \log \frac{P_{mka}}{\sum_l \pi_l P_{mla}}

    >>> from pyro_nmm import Neighborhood
    >>> from pyro_nmm.models import Annotators, information
    >>> hood = Neighborhood(torch.empty(2, 0, dtype=torch.long), num_nodes=200)
    >>> truth = torch.arange(200) % 2
    >>> noise = torch.randint(2, (200,))
    >>> field = Annotators(2, aligned=False).fit(hood, torch.stack([truth, 1 - truth, noise], 1))
    >>> information(field).mean > 0.5  # of log 2 = 0.69 nats
    tensor([ True,  True, False])

    :param HiddenField field: fitted to :class:`Annotators`.
    :param float level: of the intervals.
    :return: means and ends of intervals, ``(M,)``. Cost: :math:`O(T (N + M C K))` for ``T`` draws.
    :raises ValueError: for a field of another emission.
    """
    if not isinstance(field.emission, Annotators):
        raise ValueError("information needs a field fitted to Annotators")
    confusion, shares = _by_label(field)
    joint = confusion * shares[:, None, :, None]
    parts = joint, joint.sum(-1), joint.sum(-2)
    whole, labels, answers = (torch.special.entr(part).flatten(2).sum(-1) for part in parts)
    return _quality(labels + answers - whole, level)


def _by_label(field: HiddenField) -> tuple[Tensor, Tensor]:
    """``(T, M, C, K)`` confusion matrices as drawn, and ``(T, C)`` the labels' shares."""
    confusion, size = field.draws["confusion"], field.emission.num_labels
    if "types" in field.draws:
        confusion = field.draws["types"][:, None] @ confusion
    shares = [(field.samples == k).sum(-1) / field.hood.num_nodes for k in range(size)]
    return confusion, torch.stack(shares, -1).to(confusion)


def _quality(draws: Tensor, level: float) -> Quality:
    if not 0 < level < 1:
        raise ValueError(f"level must lie between 0 and 1, got {level}")
    ends = draws.new_tensor([(1 - level) / 2, (1 + level) / 2])
    return Quality(draws.mean(0), *draws.quantile(ends, dim=0))
