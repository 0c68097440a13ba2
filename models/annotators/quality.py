# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""How good each annotator is: accuracy and information, with intervals."""

import torch
from torch import Tensor

from pyro_nmm.models.annotators.agreement import Quality, beside_neighbors, informs
from pyro_nmm.models.annotators.answers import Entries
from pyro_nmm.models.annotators.consensus import Consensus
from pyro_nmm.models.annotators.model import Annotators
from pyro_nmm.models.hidden import HiddenField


def accuracy(field: HiddenField | Consensus, level: float = 0.9) -> Quality:
    r"""Accuracy of every annotator, :math:`\sum_k \pi_k P_{mkk}`, with :math:`\pi` the labels'
    shares among the nodes. Confusion matrices of a consensus on a graph do not come from the
    agreement of annotators, but from the labels around the nodes that each one answered.

    >>> hood = Neighborhood(torch.empty(2, 0, dtype=torch.long), num_nodes=200)
    >>> truth = torch.arange(200) % 2
    >>> wrong = torch.rand(200, 3) < torch.tensor([0.05, 0.1, 0.4])
    >>> consensus = Annotators(2).fit(hood, truth[:, None] ^ wrong.long())
    >>> accuracy(consensus).mean.argmin()
    tensor(2)

    :param field: a :class:`Consensus`, or a field fitted to :class:`Annotators`, whose answers name
        labels.
    :param float level: the probability with which intervals hold the accuracy.
    :return: means and ends of intervals, ``(M,)``. Cost: :math:`O(T (N + M C K))` for ``T`` draws;
        on a consensus EM of ``A`` answers for each, :math:`O(T (N C + S A C))` with 20 steps ``S``.
    """
    emission = _emission(field, level)
    if not isinstance(emission, Annotators) or not emission.named:
        must = "annotators whose answers name labels, aligned and without num_types"
        raise ValueError(f"accuracy needs {must}: see information")
    confusion, share = _by_label(field)
    right = confusion.diagonal(dim1=-2, dim2=-1)
    return Quality.of((right * share[:, None, : right.shape[-1]]).sum(-1), level)


def information(field: HiddenField | Consensus, level: float = 0.9) -> Quality:
    r"""The mutual information of an answer and the label, in nats. Answers need not name labels.

    .. math::

        I(a_m; u) = \sum_{k, a} \pi_k P_{mka} \log \frac{P_{mka}}{\sum_l \pi_l P_{mla}}

    >>> hood = Neighborhood(torch.empty(2, 0, dtype=torch.long), num_nodes=200)
    >>> truth = torch.arange(200) % 2
    >>> noise = torch.randint(2, (200,))
    >>> answers = torch.stack([truth, 1 - truth, noise], 1)
    >>> consensus = Annotators(2, aligned=False).fit(hood, answers)
    >>> information(consensus).mean > 0.5  # of log 2 = 0.69 nats
    tensor([ True,  True, False])

    :param field: as for :func:`accuracy`.
    :return: ``(M,)`` means and ends, as of :func:`accuracy`, at the same cost.
    """
    if not isinstance(_emission(field, level), Annotators):
        raise ValueError("information needs a field fitted to Annotators")
    confusion, share = _by_label(field)
    joint = confusion * share[:, None, :, None]
    parts = joint, joint.sum(-1), joint.sum(-2)
    whole, labels, answers = (torch.special.entr(part).flatten(2).sum(-1) for part in parts)
    return Quality.of(labels + answers - whole, level)


def _emission(field: HiddenField | Consensus, level: float) -> object:
    if not 0 < level < 1:
        raise ValueError(f"level must lie between 0 and 1, got {level}")
    return (field.field if isinstance(field, Consensus) else field).emission


def _by_label(fitted: HiddenField | Consensus) -> tuple[Tensor, Tensor]:
    """``(T, M, C, K)`` confusion matrices as drawn, and ``(T, C)`` the labels' shares."""
    if isinstance(fitted, Consensus) and informs(fitted.log_prior, fitted.graph_power):
        values, entries = fitted.field.values, Entries.of(fitted.answers)
        draws = beside_neighbors(fitted.log_prior, fitted.graph_power, values, entries)
        matrices, labels = zip(*draws, strict=True)
        shares = [table.sum(0) / table.sum() for table in labels]
        return torch.stack(matrices), torch.stack(shares)
    field = fitted.field if isinstance(fitted, Consensus) else fitted
    confusion, size = field.draws["confusion"], field.emission.num_labels
    if "types" in field.draws:
        confusion = field.draws["types"][:, None] @ confusion
    parts = [(field.samples == k).sum(-1) / field.hood.num_nodes for k in range(size)]
    return confusion, torch.stack(parts, -1).to(confusion)
