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
    shares among the nodes. On a graph it is judged by the labels around the nodes.

    >>> hood = Neighborhood(torch.empty(2, 0, dtype=torch.long), num_nodes=200)
    >>> truth = torch.arange(200) % 2
    >>> wrong = torch.rand(200, 3) < torch.tensor([0.05, 0.1, 0.4])
    >>> consensus = Annotators(2).fit(hood, truth[:, None] ^ wrong.long())
    >>> accuracy(consensus).mean.argmin()
    tensor(2)

    :param field: a :class:`Consensus`, or a field fitted to :class:`Annotators`, whose answers name
        labels.
    :param float level: the probability with which intervals hold the accuracy.
    :return: means and ends of intervals, ``(M,)``. Cost of a consensus of ``A`` answers: 100 times
        20 steps of EM, :math:`O(N C + A C)` each.
    """
    must = "annotators whose answers name labels, aligned and without num_types: see information"
    confusion, share = _by_label(field, level, f"accuracy needs {must}", named=True)
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
    confusion, share = _by_label(field, level, "information needs a field fitted to Annotators")
    joint = confusion * share[:, None, :, None]
    parts = joint, joint.sum(-1), joint.sum(-2)
    whole, labels, answers = (torch.special.entr(part).flatten(2).sum(-1) for part in parts)
    return Quality.of(labels + answers - whole, level)


def _by_label(
    fitted: HiddenField | Consensus, level: float, must: str, named: bool = False
) -> tuple[Tensor, Tensor]:
    """``(T, M, C, K)`` confusion matrices as drawn, and ``(T, C)`` the labels' shares."""
    if not 0 < level < 1:
        raise ValueError(f"level must lie between 0 and 1, got {level}")
    field = fitted.field if isinstance(fitted, Consensus) else fitted
    emission = field.emission
    if not isinstance(emission, Annotators) or (named and not emission.named):
        raise ValueError(must)
    if isinstance(fitted, Consensus) and informs(fitted.log_prior, fitted.graph_power):
        entries = Entries.of(fitted.answers)
        draws = beside_neighbors(fitted.log_prior, fitted.graph_power, field.values, entries)
        matrices, labels = zip(*draws, strict=True)
        shares = [table.sum(0) / table.sum() for table in labels]
        return torch.stack(matrices), torch.stack(shares)
    confusion = field.draws["confusion"]
    if "types" in field.draws:
        confusion = field.draws["types"][:, None] @ confusion
    share = [(field.samples == k).to(confusion).mean(-1) for k in range(emission.num_labels)]
    return confusion, torch.stack(share, -1)
