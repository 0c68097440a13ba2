# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

r"""
Edges that relabel: labels that change on their way over an edge.

A node borrows the label :math:`u_i \sim z_{c_i}`, and shows :math:`y_i` instead, what edge
:math:`e = (c_i, i)` makes of it. ``relabel`` says what: for every edge a permutation, ``(E, C)``
integers whose entry ``[e, u]`` is :math:`y`; or a stochastic matrix, ``(..., E, C, C)``, whose
entry ``[e, u, y]`` is the probability of :math:`y` given :math:`u`. Nodes that share a source are
positively correlated where their edges relabel alike, and negatively where one of them flips.

Where several permutations compete on an edge, with learned weights, their mean is its matrix:

>>> flip = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
>>> weight = torch.tensor([0.9, 0.2]).view(-1, 1, 1)  # of two edges
>>> weight * torch.eye(2) + (1 - weight) * flip
tensor([[[0.9000, 0.1000],
         [0.1000, 0.9000]],
<BLANKLINE>
        [[0.2000, 0.8000],
         [0.8000, 0.2000]]])
"""

from __future__ import annotations

from typing import Any

import torch
from pyro.ops.provenance import track_provenance
from torch import Size, Tensor

from pyro_nmm.neighborhood import Neighborhood
from pyro_nmm.provenance import untracked
from pyro_nmm.validation import check_label_range, check_labels


def is_permutation(relabel: Tensor) -> bool:
    """Whether every edge has a permutation, and no matrix."""
    return not relabel.is_floating_point()


def batch_of(relabel: Tensor | None) -> Size:
    """The batch shape of matrices; permutations have none."""
    return Size() if relabel is None or is_permutation(relabel) else Size(relabel.shape[:-3])


def of_edges(relabel: Any, edges: Tensor | slice) -> Any:
    """The permutations or matrices of some edges, or ``None`` of ``None``."""
    if relabel is None:
        return None
    return relabel[edges] if is_permutation(relabel) else relabel[..., edges, :, :]


def taken(table: Tensor, labels: Tensor) -> Tensor:
    """``(...)``: the entry of every row of ``table``, ``(..., C)``, at its label ``(...)``."""
    return table.gather(-1, labels.unsqueeze(-1)).squeeze(-1)


def borrowed_labels(rows: Neighborhood, relabel: Tensor, labels: Tensor) -> Tensor:
    """
    ``(..., num_edges)``: the label that a row borrowed, if over this edge.

    :param Tensor relabel: ``(num_edges, C)`` permutations of the edges of ``rows``.
    :param Tensor labels: ``(..., num_rows)``, what the rows show.
    """
    shown = labels.index_select(-1, rows.row)
    return taken(relabel.argsort(-1).expand(*shown.shape, -1), shown)


def log_entries(matrices: Tensor) -> Tensor:
    """
    Logarithms of probabilities, ``-inf`` of zeros, which get no gradient: that of ``log`` at zero
    is infinite, and times the zero derivative of a constant zero it would be NaN.
    """
    zero = matrices == 0
    return matrices.masked_fill(zero, 1).log().masked_fill(zero, -torch.inf)


def label_evidence(rows: Neighborhood, relabel: Tensor, labels: Tensor) -> Tensor:
    r"""
    ``(..., num_edges, C)``: :math:`\log p(y_i \mid u_i)` over every edge, in nats.

    :param Tensor relabel: ``(..., num_edges, C, C)`` matrices of the edges of ``rows``.
    :param Tensor labels: ``(..., num_rows)``, what the rows show.
    """
    batch = torch.broadcast_shapes(relabel.shape[:-3], labels.shape[:-1])
    shown = labels.index_select(-1, rows.row)[..., None].expand(*batch, *relabel.shape[-3:-1])
    return log_entries(taken(relabel.expand(*batch, *relabel.shape[-3:]), shown))


def evidence_of(
    hood: Neighborhood, relabel: Tensor, y: Tensor, observed: Tensor | None = None
) -> Tensor:
    r"""
    ``(..., num_edges, C)``: :func:`label_evidence` of labels ``(..., N)`` of all nodes, those of
    unobserved ones not read.
    """
    y = check_labels(hood, y, hood.num_nodes)
    rows = hood.restrict(observed)
    check_label_range(rows, y.index_select(-1, rows.nodes), relabel.shape[-1])
    return label_evidence(hood, relabel, y if observed is None else y.where(observed, 0))


def carried(relabel: Tensor, probs: Tensor) -> Tensor:
    """``(..., K, C)``: probabilities of borrowed labels over ``K`` edges, as of what is shown."""
    if is_permutation(relabel):
        return probs.gather(-1, relabel.argsort(-1).expand(probs.shape))
    return (probs.unsqueeze(-2) @ relabel).squeeze(-2)


def carried_tables(first: Tensor, second: Tensor, tables: Tensor) -> Tensor:
    """
    ``(..., K, C, C)``: moments of two borrowed labels, as those of what two edges make of them.

    :param Tensor first: the permutations or matrices of the ``K`` edges of the first label.
    """
    return _columns(second, _columns(first, tables.mT).mT)


def _columns(relabel: Tensor, tables: Tensor) -> Tensor:
    if is_permutation(relabel):
        return tables.gather(-1, relabel.argsort(-1).unsqueeze(-2).expand(tables.shape))
    return tables @ relabel


def at_choices(hood: Neighborhood, relabel: Tensor, choices: Tensor) -> Tensor:
    """``(..., n, C)``: the permutation of every row's chosen edge, for choices ``(..., n)``."""
    (relabel, choices), provenance = untracked(relabel, choices)
    edges = hood.find(choices.reshape(-1, hood.num_rows)).clamp(min=0)
    found = relabel[edges].view(*choices.shape, relabel.shape[-1])
    return track_provenance(found, provenance)


def shown_probs(hood: Neighborhood, relabel: Tensor, choices: Tensor, borrowed: Tensor) -> Tensor:
    """
    ``(..., n, C)``: the probability of every label that a row may show, given its choice and the
    label that it borrowed, both ``(..., n)``.

    :param Tensor relabel: matrices ``(..., hood.num_edges, C, C)``.
    """
    plain, provenance = untracked(relabel, choices, borrowed)
    relabel, *values = plain
    batch = torch.broadcast_shapes(relabel.shape[:-3], *(value.shape[:-1] for value in values))
    choices, borrowed = (v.expand(*batch, -1).reshape(-1, hood.num_rows) for v in values)
    places: tuple = hood.find(choices).clamp(min=0), borrowed
    if batch_of(relabel).numel() == 1:
        relabel = relabel.reshape(relabel.shape[-3:])
    else:
        event = relabel.shape[-3:]
        relabel = relabel.expand(*batch, *event).reshape(-1, *event)
        places = torch.arange(len(relabel), device=hood.device)[:, None], *places
    probs = relabel[places]
    return track_provenance(probs.view(*batch, *probs.shape[-2:]), provenance)


@torch.no_grad()
def pass_on(hood: Neighborhood, relabel: Tensor, choices: Tensor, borrowed: Tensor) -> Tensor:
    """``(..., n)``: what rows show, drawn given their choices and the labels that they borrowed."""
    if is_permutation(relabel):
        return taken(at_choices(hood, relabel, choices), borrowed)
    probs = shown_probs(hood, relabel, choices, borrowed)
    return torch.distributions.Categorical(probs, validate_args=False).sample()


def check_relabel(hood: Neighborhood, relabel: Tensor, num_classes: int, kinds: str = "") -> Tensor:
    """
    A permutation of the labels for every edge, or a stochastic matrix.

    :param str kinds: ``"permutations"`` where matrices will not do.
    :return: permutations as ``torch.long``.
    """
    shapes: dict[str, tuple] = {"permutations": (hood.num_edges, num_classes)}
    if not kinds:
        shapes["matrices"] = (hood.num_edges, num_classes, num_classes)
    if not isinstance(relabel, Tensor):
        raise ValueError(f"relabel must be a tensor, got {type(relabel)}; see torch.from_numpy")
    kind = "permutations" if is_permutation(relabel) else "matrices"
    shape = shapes.get(kind, ())
    if not shape or relabel.shape[-len(shape) :] != shape:
        types = {"permutations": "integers", "matrices": "probabilities"}
        needed = " or ".join(f"{types[name]} of shape {size}" for name, size in shapes.items())
        got = f"{relabel.dtype} of shape {tuple(relabel.shape)}"
        raise ValueError(f"relabel must hold {needed}, got {got}")
    if relabel.device != hood.device:
        raise ValueError(
            f"relabel is on {relabel.device} but hood on {hood.device}: move one with .to(device)"
        )
    if kind == "permutations" and relabel.dim() > 2:
        raise ValueError(
            f"permutations in relabel have no batch dimensions, got {tuple(relabel.shape)}"
        )
    return relabel.long() if kind == "permutations" else relabel


def check_edge_evidence(hood: Neighborhood, evidence: Tensor) -> None:
    """Refuses evidence of nodes' own labels, which would be read as that of borrowed ones."""
    if evidence.dim() >= 2 and evidence.shape[-2] == hood.num_nodes != hood.num_edges:
        raise ValueError(
            f"evidence of shape {tuple(evidence.shape)} is of nodes' own labels, but edges "
            f"relabel: give that of the labels that are borrowed over each of the "
            f"{hood.num_edges} edges, logsumexp(log(relabel[e, u]) + evidence[i]) at edge e into "
            f"node i; or use condition for labels that are known"
        )


def check_permutations(relabel: Tensor, choices: Tensor, num_classes: int) -> Tensor:
    """
    Permutations ``(..., n, C)`` of the edges of choices ``(..., n)``.

    :return: the same as ``torch.long``.
    """
    size = choices.shape[-1], num_classes
    integers = isinstance(relabel, Tensor) and is_permutation(relabel)
    if not integers or tuple(relabel.shape[-2:]) != size:
        known = isinstance(relabel, Tensor)
        got = f"{relabel.dtype} of shape {tuple(relabel.shape)}" if known else str(type(relabel))
        raise ValueError(
            f"relabel must hold integers of shape (..., {size[0]}, {size[1]}), a permutation of "
            f"the labels for every choice, got {got}"
        )
    if relabel.device != choices.device:
        raise ValueError(
            f"relabel is on {relabel.device} but choices on {choices.device}: move one with "
            f".to(device)"
        )
    return relabel.long()


def check_relabel_values(relabel: Tensor | None) -> None:
    """Follows ``validate_args``, because it reads the data."""
    if relabel is None:
        return
    if is_permutation(relabel):
        labels = torch.arange(relabel.shape[-1], device=relabel.device)
        wrong = (relabel.sort(-1).values != labels).any(-1)
        needed = f"permutations of 0..{len(labels) - 1}"
    else:
        wrong = ~((relabel >= 0).all(-1) & ((relabel.sum(-1) - 1).abs() < 1e-4))
        needed = "probabilities that sum to one over the last dimension"
    if wrong.any():
        where = wrong.nonzero()[0].tolist()
        got = [round(number, 4) for number in relabel[tuple(where)].tolist()]
        raise ValueError(f"relabel must hold {needed}, got {got} at {where}")
