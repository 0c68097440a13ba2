# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Errors that name the argument, what it got and what would be right."""

import math
from collections.abc import Callable
from dataclasses import fields
from enum import StrEnum
from numbers import Integral
from typing import Any, TypeVar

import torch
from torch import Size, Tensor

from pyro_nmm.concentrations import Concentrations, OrdinalConcentrations, in_single
from pyro_nmm.expect import expect, out_of_range
from pyro_nmm.neighborhood import Neighborhood
from pyro_nmm.provenance import untracked

Member = TypeVar("Member", bound=StrEnum)
Options = TypeVar("Options")


def check_shapes(
    hood: Neighborhood, alpha: Concentrations, logits: Tensor
) -> tuple[Concentrations, Tensor]:
    """
    Shapes, dtypes and devices of the parameters; always on, because it costs nothing.

    :return: the parameters, those of half precision in single precision.
    """
    alpha, logits = check_alpha(hood, alpha), check_logits(hood, logits)
    dtype = alpha.mean.dtype if isinstance(alpha, OrdinalConcentrations) else alpha.dtype
    if dtype != logits.dtype:
        raise ValueError(
            f"alpha and logits must have the same dtype, got {dtype} and {logits.dtype}"
        )
    return alpha, logits


def check_alpha(hood: Neighborhood, alpha: Concentrations) -> Concentrations:
    """The concentrations; see :func:`check_shapes`."""
    what = "source" if hood.bipartite else "node"
    if isinstance(alpha, OrdinalConcentrations):
        each = f"one number per {what}"
        expect("alpha.mean", alpha.mean, ("...", hood.num_sources), like=hood, note=each)
        return alpha
    shape, each = ("...", hood.num_sources, ("C", 2)), f"one row per {what} and C >= 2 labels"
    return in_single(expect("alpha", alpha, shape, kind="float", like=hood, note=each))


def check_logits(hood: Neighborhood, logits: Tensor) -> Tensor:
    """The attention's scores; see :func:`check_shapes`."""
    each = "one score per edge of hood (self-loops included, in the order of hood.source)"
    shape = "...", hood.num_edges
    return in_single(expect("logits", logits, shape, kind="float", like=hood, note=each))


def check_integers(least: int, **values: int) -> None:
    """Numbers of steps, samples and the like, by the arguments' names."""
    for name, value in values.items():
        if not isinstance(value, Integral) or value < least:
            raise ValueError(f"{name} must be an integer of at least {least}, got {value}")


def as_member(kind: type[Member], **value: str) -> Member:
    """One of a role's names, as its enum has it, by the argument's name."""
    ((name, given),) = value.items()
    try:
        return kind(given)
    except ValueError:
        known = tuple(str(member) for member in kind)
        raise ValueError(f"{name} must be one of {known}, got {given!r}") from None


def options_of(function: Callable, kind: type[Options], options: dict[str, Any]) -> Options:
    """Options as one value; an error that lists them for one that there is not."""
    known = [each.name for each in fields(kind)]  # type: ignore[arg-type]
    if unknown := sorted(options.keys() - known):
        raise TypeError(
            f"{function.__name__} has no option {unknown[0]!r}: its options are {', '.join(known)}"
        )
    return kind(**options)


def check_positive(**values: float) -> None:
    """Rates and the like, by the arguments' names."""
    for name, value in values.items():
        if not 0 < value < math.inf:
            raise ValueError(f"{name} must be positive and finite, got {value}")


def check_all_rows(hood: Neighborhood) -> None:
    """Whether the graph is whole; ``observed`` is the way to name some nodes."""
    if hood.num_rows != hood.num_nodes:
        raise ValueError(
            f"hood must hold all {hood.num_nodes} nodes, got {hood.num_rows} rows: pass the whole "
            f"neighborhood and the mask as observed"
        )


def check_values(
    alpha: Concentrations | None,
    logits: Tensor | None,
    hood: Neighborhood | None = None,
) -> None:
    """Values of the parameters; follows ``validate_args``, because it reads the data."""
    (alpha, logits), _ = untracked(alpha, logits)
    if isinstance(alpha, OrdinalConcentrations):
        for name in ("width", "scale"):
            value = getattr(alpha, name)
            if not ((value > 0) & value.isfinite()).all():
                raise ValueError(
                    f"alpha.{name} must be positive and finite: pass it through softplus or exp"
                )
        if not alpha.mean.isfinite().all():
            raise ValueError("alpha.mean must be finite")
        alpha = None
    if alpha is not None and not (alpha > 0).all():
        where = (~(alpha > 0)).nonzero()[0].tolist()
        raise ValueError(
            f"alpha must be positive, got {alpha[tuple(where)].item()} at index {where}: "
            f"pass the network's output through softplus or exp and add a floor"
        )
    if alpha is not None and alpha.isinf().any():
        where = alpha.isinf().nonzero()[0].tolist()
        raise ValueError(f"alpha must be finite, got inf at index {where}")
    if logits is not None and (logits.isnan() | (logits == torch.inf)).any():
        where = (logits.isnan() | (logits == torch.inf)).nonzero()[0].tolist()
        raise ValueError(f"logits must not be NaN or +inf, got {logits[tuple(where)]} at {where}")
    if logits is not None and hood is not None and logits.isinf().any():
        empty = hood.sum(logits.isfinite().int()) == 0
        if empty.any():
            node = hood.nodes[empty.nonzero()[0, -1]].item()
            raise ValueError(f"logits of node {node} are all -inf: leave at least one finite")


def check_evidence(
    hood: Neighborhood, alpha: Concentrations, evidence: Tensor
) -> tuple[Tensor, Tensor]:
    """
    Shape, dtype and device of log-likelihoods of labels, of every node or of every edge.

    :return: the concentrations, and the evidence, that of half precision in single precision.
    """
    if isinstance(alpha, OrdinalConcentrations):
        raise ValueError("alpha must be written out where labels are latent: pass alpha.table()")
    expect("evidence", evidence, kind="float", like=hood)
    shapes = [(size, alpha.shape[-1]) for size in (hood.num_nodes, hood.num_edges)]
    if evidence.dim() < 2 or evidence.shape[-2:] not in shapes:
        raise ValueError(
            f"evidence must hold log-likelihoods of shape (..., {shapes[0][0]}, {shapes[0][1]}), "
            f"one row per node, or (..., {shapes[1][0]}, {shapes[1][1]}), one per edge, got "
            f"{tuple(evidence.shape)}"
        )
    evidence = in_single(evidence)
    if evidence.dtype != alpha.dtype:
        raise ValueError(
            f"alpha and evidence must have the same dtype, got {alpha.dtype} and {evidence.dtype}"
        )
    return alpha, evidence


def check_evidence_values(rows: Neighborhood, evidence: Tensor) -> None:
    """Values of evidence ``(..., num_rows, C)`` or ``(..., num_edges, C)`` of some rows."""
    if (evidence.isnan() | (evidence == torch.inf)).any():
        raise ValueError("evidence must not be NaN or +inf: log-likelihoods are finite or -inf")
    possible = evidence.isfinite().any(-1)
    if evidence.shape[-2] == rows.num_edges:
        possible = rows.sum(possible.int()) > 0
    if not possible.all():
        node = rows.nodes[(~possible).nonzero()[0, -1]].item()
        raise ValueError(
            f"evidence rules out every label of node {node}: leave one finite, or mask the node "
            f"out with observed"
        )


def as_labels(name: str, value: Tensor) -> Tensor:
    """
    Labels of any integer type as ``torch.long``: comparisons of small types wrap around, so that
    ``uint8`` labels would all lie beyond 256 classes.
    """
    return expect(name, value, kind="labels").long()


def check_labels(hood: Neighborhood, y: Tensor, num_nodes: int) -> Tensor:
    """
    Shape, dtype and device of labels.

    :return: the labels as ``torch.long``.
    """
    shape, each = ("...", num_nodes), "one label per node"
    return expect("y", y, shape, kind="labels", like=hood, note=each).long()


def check_plain(method: str, batch_shape: Size) -> None:
    """For queries that know no batch."""
    if batch_shape:
        raise ValueError(f"{method} needs a mixture without batch, got {batch_shape}")


def check_labelling(method: str, hood: Neighborhood, batch_shape: Size, y: Tensor) -> Tensor:
    """One labelling ``(N,)`` of a mixture without batch."""
    check_plain(method, batch_shape)
    y = check_labels(hood, y, hood.num_nodes)
    if y.dim() != 1:
        raise ValueError(f"{method} needs one labelling y of shape (N,), got {tuple(y.shape)}")
    return y


def check_label_range(rows: Neighborhood, labels: Tensor, num_classes: int) -> None:
    """Labels ``(..., num_rows)`` of the observed nodes; the others are never read."""
    labels = as_labels("y", labels)
    wrong = (labels < 0) | (labels >= num_classes)
    if wrong.any():
        where = wrong.nonzero()[0]
        raise ValueError(
            f"y holds label {labels[tuple(where)].item()} at node {rows.nodes[where[-1]].item()}, "
            f"but alpha has labels 0..{num_classes - 1}: mask that node out with observed, "
            f"or give alpha more columns"
        )


def order_to_rows(rows: Neighborhood, order: Tensor) -> Tensor:
    """Row numbers of an order of node ids, which must be a permutation of the rows' nodes."""
    if (
        not isinstance(order, Tensor)
        or order.dtype != torch.long
        or order.shape != rows.nodes.shape
        or order.device != rows.device
        or not torch.equal(order.sort().values, rows.nodes)
    ):
        got = f"{order.dtype} of shape {tuple(order.shape)}" if isinstance(order, Tensor) else order
        raise ValueError(
            f"order must be a permutation of the {rows.num_rows} observed node ids "
            f"(torch.long, on {rows.device}), got {got}"
        )
    return torch.searchsorted(rows.nodes, order.contiguous())


def check_nodes(hood: Neighborhood, nodes: Tensor) -> None:
    """A set of node ids ``(K,)``."""
    _check_ids(hood, nodes, "nodes", ("K",))
    if len(nodes.unique()) < len(nodes):
        raise ValueError("nodes must be distinct: a node has one label only")


def check_pairs(hood: Neighborhood, pairs: Tensor) -> None:
    """Pairs of node ids ``(2, P)``."""
    _check_ids(hood, pairs, "pairs", (2, "P"))


def _check_ids(hood: Neighborhood, ids: Tensor, name: str, shape: tuple) -> None:
    some = *shape[:-1], (shape[-1], 1)
    expect(name, ids, some, kind="ids", like=hood, note="at least one")
    if (bad := out_of_range(ids, hood.num_nodes)) is not None:
        raise ValueError(f"{name} holds node id {bad}, but ids lie in 0..{hood.num_nodes - 1}")


def check_choices(alpha: Concentrations, choices: Tensor) -> Concentrations:
    """
    Concentrations ``(..., N, C)`` and node ids ``(..., n)`` that choose among them.

    :return: the concentrations, those of half precision in single precision.
    """
    good = isinstance(alpha, Tensor) and alpha.is_floating_point() and alpha.dim() >= 2
    if not good and not isinstance(alpha, OrdinalConcentrations):
        shape = tuple(alpha.shape) if isinstance(alpha, Tensor) else type(alpha)
        raise ValueError(f"alpha must be a floating-point tensor of shape (..., N, C), got {shape}")
    expect("choices", choices, ("...", "n"), kind="ids")
    if (bad := out_of_range(choices, alpha.shape[-2])) is not None:
        raise ValueError(
            f"choices holds node id {bad}, but alpha has nodes 0..{alpha.shape[-2] - 1}"
        )
    return alpha if isinstance(alpha, OrdinalConcentrations) else in_single(alpha)
