# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

r"""
Edges that relabel: labels that change on their way over an edge.

A node borrows the label :math:`u_i \sim z_{c_i}`, and edge :math:`e = (c_i, i)` turns it into the
label :math:`y_i` that the node shows. ``relabel`` holds for every edge a permutation, ``(E, C)``
integers whose entry ``[e, u]`` is :math:`y`; or a stochastic matrix, ``(..., E, C, C)``, whose
entry ``[e, u, y]`` is the probability of :math:`y` given :math:`u`. Two nodes that share a source
are positively correlated if their edges are the same, and negatively if one of them flips labels.

If several permutations compete on an edge, with learned weights, their mean is its matrix:

>>> flip = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
>>> weight = torch.tensor([0.9, 0.2]).view(-1, 1, 1)  # of two edges
>>> weight * torch.eye(2) + (1 - weight) * flip
tensor([[[0.9000, 0.1000],
         [0.1000, 0.9000]],
<BLANKLINE>
        [[0.2000, 0.8000],
         [0.8000, 0.2000]]])

Inside the library ``relabel`` is a :class:`~pyro_nmm.channel.Channel`.
"""

from typing import Any

from torch import Tensor

from pyro_nmm.channel import KEEP, Channel, Matrices, Permutations
from pyro_nmm.expect import expect_device
from pyro_nmm.neighborhood import Neighborhood
from pyro_nmm.validation import check_label_range, check_labels


def evidence_of(
    hood: Neighborhood, relabel: Any, y: Tensor, observed: Tensor | None = None
) -> Tensor:
    r"""
    ``(..., num_edges, C)``: :math:`\log p(y_i \mid u_i)` over every edge, in nats.

    :param Tensor relabel: ``(..., num_edges, C, C)`` matrices, or a :class:`Channel`.
    :param Tensor y: ``(..., N)`` labels, read where ``observed`` only.
    """
    y, channel = check_labels(hood, y, hood.num_nodes), as_channel(relabel)
    rows = hood.restrict(observed)
    check_label_range(rows, y.index_select(-1, rows.nodes), channel.relabel.shape[-1])
    return channel.evidence(hood, y if observed is None else y.where(observed, 0), channel.relabel)


def as_channel(relabel: Any, needed: str = "be a tensor") -> Channel:
    """A channel of permutations, matrices or ``None``."""
    if relabel is None or isinstance(relabel, Channel):
        return relabel or KEEP
    if not isinstance(relabel, Tensor):
        raise ValueError(f"relabel must {needed}, got {type(relabel)}; see torch.from_numpy")
    return Matrices(relabel) if relabel.is_floating_point() else Permutations(relabel)


def check_relabel(hood: Neighborhood, relabel: Any, num_classes: int, kinds: str = "") -> Channel:
    """A channel of all edges; with ``kinds="permutations"`` without matrices."""
    channel, shape = as_channel(relabel), (hood.num_edges, num_classes)
    needed = f"integers of shape {shape}"
    if not kinds:
        needed += f" or probabilities of shape {(*shape, num_classes)}"
    fits = channel.keeps or (channel.relabel.shape == shape if channel.certain else not kinds)
    return _checked(channel, fits, shape, needed, hood)


def check_edge_evidence(hood: Neighborhood, evidence: Tensor) -> None:
    """Refuse evidence of nodes' own labels, which would be read as evidence of borrowed ones."""
    if evidence.dim() >= 2 and evidence.shape[-2] == hood.num_nodes != hood.num_edges:
        raise ValueError(
            f"evidence of shape {tuple(evidence.shape)} is of nodes' own labels, but edges "
            f"relabel: give evidence of the labels borrowed over each of the {hood.num_edges} "
            f"edges, logsumexp(log(relabel[e, u]) + evidence[i]) at edge e into node i; or use "
            f"condition for observed labels"
        )


def check_permutations(relabel: Any, choices: Tensor, num_classes: int) -> Channel:
    """A channel of the edges of choices ``(..., n)``: permutations ``(..., n, C)`` or nothing."""
    shape = choices.shape[-1], num_classes
    needed = f"integers of shape (..., {shape[0]}, {shape[1]}), a permutation for every choice"
    channel = as_channel(relabel, f"hold {needed}")
    return _checked(channel, channel.certain, shape, needed, choices, "choices")


def _checked(channel: Channel, fits: bool, shape: tuple, needed: str, like: Any,
             beside: str = "hood") -> Channel:  # fmt: skip
    """The channel, permutations as ``torch.long``; ``shape`` is that of permutations."""
    if channel.keeps:
        return channel
    relabel = channel.relabel
    shape = shape if channel.certain else (*shape, shape[-1])
    if not fits or relabel.shape[-len(shape) :] != shape:
        got = f"{relabel.dtype} of shape {tuple(relabel.shape)}"
        raise ValueError(f"relabel must hold {needed}, got {got}")
    expect_device("relabel", relabel, like.device, beside)
    return Permutations(relabel.long()) if channel.certain else channel
