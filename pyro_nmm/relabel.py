# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

r"""
Edges that relabel: labels that change on their way over an edge.

A node borrows the label :math:`u_i \sim z_{c_i}`, and shows :math:`y_i` instead, what edge
:math:`e = (c_i, i)` makes of it. ``relabel`` says what: for every edge a permutation, ``(E, C)``
integers whose entry ``[e, u]`` is :math:`y`; or a stochastic matrix, ``(..., E, C, C)``, whose
entry ``[e, u, y]`` is the probability of :math:`y` given :math:`u`. Two nodes that share a source
are positively correlated if their edges are the same, and negatively if one of them flips labels.

Where several permutations compete on an edge, with learned weights, their mean is its matrix:

>>> flip = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
>>> weight = torch.tensor([0.9, 0.2]).view(-1, 1, 1)  # of two edges
>>> weight * torch.eye(2) + (1 - weight) * flip
tensor([[[0.9000, 0.1000],
         [0.1000, 0.9000]],
<BLANKLINE>
        [[0.2000, 0.8000],
         [0.8000, 0.2000]]])

Inside the library ``relabel`` is a :class:`~pyro_nmm.channel.Channel`, so that kernels need not ask
which kind it is.
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
    """Nothing, permutations, matrices, or a channel, as a channel."""
    if relabel is None or isinstance(relabel, Channel):
        return relabel or KEEP
    if not isinstance(relabel, Tensor):
        raise ValueError(f"relabel must {needed}, got {type(relabel)}; see torch.from_numpy")
    return Matrices(relabel) if relabel.is_floating_point() else Permutations(relabel)


def check_relabel(hood: Neighborhood, relabel: Any, num_classes: int, kinds: str = "") -> Channel:
    """
    A permutation of the labels for every edge, a stochastic matrix, or nothing.

    :param str kinds: ``"permutations"`` where matrices will not do.
    """
    channel = as_channel(relabel)
    if channel.keeps:
        return channel
    relabel = channel.relabel
    shapes: dict[str, tuple] = {"permutations": (hood.num_edges, num_classes)}
    if not kinds:
        shapes["matrices"] = (hood.num_edges, num_classes, num_classes)
    shape = shapes.get("permutations" if channel.certain else "matrices", ())
    if not shape or relabel.shape[-len(shape) :] != shape:
        types = {"permutations": "integers", "matrices": "probabilities"}
        needed = " or ".join(f"{types[name]} of shape {size}" for name, size in shapes.items())
        got = f"{relabel.dtype} of shape {tuple(relabel.shape)}"
        raise ValueError(f"relabel must hold {needed}, got {got}")
    expect_device("relabel", relabel, hood.device)
    if not channel.certain:
        return channel
    if relabel.dim() > 2:
        raise ValueError(
            f"permutations in relabel have no batch dimensions, got {tuple(relabel.shape)}"
        )
    return Permutations(relabel.long())


def check_edge_evidence(hood: Neighborhood, evidence: Tensor) -> None:
    """Refuses evidence of nodes' own labels, which would be read as that of borrowed ones."""
    if evidence.dim() >= 2 and evidence.shape[-2] == hood.num_nodes != hood.num_edges:
        raise ValueError(
            f"evidence of shape {tuple(evidence.shape)} is of nodes' own labels, but edges "
            f"relabel: give that of the labels that are borrowed over each of the "
            f"{hood.num_edges} edges, logsumexp(log(relabel[e, u]) + evidence[i]) at edge e into "
            f"node i; or use condition for labels that are known"
        )


def check_permutations(relabel: Any, choices: Tensor, num_classes: int) -> Channel:
    """Permutations ``(..., n, C)`` of the edges of choices ``(..., n)``, or nothing."""
    size = choices.shape[-1], num_classes
    needed = f"integers of shape (..., {size[0]}, {size[1]}), a permutation for every choice"
    channel = as_channel(relabel, f"hold {needed}")
    if channel.keeps:
        return channel
    relabel = channel.relabel
    if not channel.certain or tuple(relabel.shape[-2:]) != size:
        got = f"{relabel.dtype} of shape {tuple(relabel.shape)}"
        raise ValueError(f"relabel must hold {needed}, got {got}")
    expect_device("relabel", relabel, choices.device, "choices")
    return Permutations(relabel.long())
