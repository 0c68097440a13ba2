# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""What a neighborhood, its labels and its nodes must be, as in :mod:`pyro_nmm.arguments`."""

from typing import Any

import torch
from torch import Tensor

from pyro_nmm.arguments import check_ids, expect, expect_all
from pyro_nmm.neighborhood import Neighborhood
from pyro_nmm.provenance import untracked


def in_single(parameter: Tensor) -> Tensor:
    """A tensor of half precision in single precision: ``bfloat16`` loses counts beyond 256."""
    return parameter.float() if parameter.dtype in (torch.float16, torch.bfloat16) else parameter


def check_logits(hood: Neighborhood, logits: Tensor) -> Tensor:
    """Attention scores of every edge, in single precision at least."""
    shape = "...", hood.num_edges
    note = "one score per edge of hood (self-loops included, in the order of hood.source)"
    return in_single(expect("logits", logits, shape, kind="float", like=hood, note=note))


def check_hood(hood: Any) -> None:
    """Refuse what is no neighborhood, as where two arguments are swapped."""
    if not isinstance(hood, Neighborhood):
        cure = "Neighborhood(edge_index, num_nodes) makes one"
        raise ValueError(f"hood must be a Neighborhood, got {type(hood)}: {cure}")


def check_all_rows(hood: Neighborhood) -> None:
    """Refuse a part of a graph."""
    check_hood(hood)
    if hood.num_rows != hood.num_nodes:
        got = f"{hood.num_nodes} nodes, got {hood.num_rows} rows"
        raise ValueError(f"hood must hold all {got}: pass the whole neighborhood and observed")


def check_alpha(alpha: Tensor) -> None:
    """Refuse bad concentrations. Follows ``validate_args``, because it reads the data."""
    (alpha,), _ = untracked(alpha)
    cure = ": pass the network's output through softplus or exp and add a floor"
    expect_all("alpha", alpha, (alpha > 0) & (alpha < torch.inf), "be positive and finite", cure)


def check_scores(hood: Neighborhood, logits: Tensor) -> None:
    """Refuse bad attention scores. Follows ``validate_args``, because it reads the data."""
    (logits,), _ = untracked(logits)
    expect_all("logits", logits, logits < torch.inf, "not be NaN or +inf")
    if logits.isinf().any():
        empty = hood.sum(logits.isfinite().int()) == 0
        if empty.any():
            node = hood.nodes[empty.nonzero()[0, -1]].item()
            raise ValueError(f"logits of node {node} are all -inf: leave at least one finite")


def check_evidence(hood: Neighborhood, alpha: Tensor, evidence: Tensor) -> Tensor:
    """Evidence of the labels of every node or of every edge, of the type of ``alpha``."""
    expect("evidence", evidence, kind="float", like=hood)
    nodes, edges = ((size, alpha.shape[-1]) for size in (hood.num_nodes, hood.num_edges))
    if evidence.shape[-2:] not in (nodes, edges):
        raise ValueError(
            f"evidence must hold log-likelihoods of shape {nodes}, one row per node, or {edges}, "
            f"one per edge, after batch dimensions, got {tuple(evidence.shape)}"
        )
    evidence = in_single(evidence)
    if evidence.dtype != alpha.dtype:
        both = f"{alpha.dtype} and {evidence.dtype}"
        raise ValueError(f"alpha and evidence must have the same dtype, got {both}")
    return evidence


def check_possible(rows: Neighborhood, evidence: Tensor) -> None:
    """Refuse bad values of evidence ``(..., num_rows, C)`` or ``(..., num_edges, C)`` of rows."""
    cure = ": log-likelihoods are finite or -inf"
    expect_all("evidence", evidence, evidence < torch.inf, "not be NaN or +inf", cure)
    possible = evidence.isfinite().any(-1)
    if evidence.shape[-2] == rows.num_edges:
        possible = rows.sum(possible.int()) > 0
    if not possible.all():
        node = rows.nodes[(~possible).nonzero()[0, -1]].item()
        cure = "leave one finite, or mask the node out with observed"
        raise ValueError(f"evidence rules out every label of node {node}: {cure}")


def check_labels(hood: Neighborhood, y: Tensor, num_nodes: int) -> Tensor:
    """Labels of the right shape and device, as ``torch.long``."""
    shape, note = ("...", num_nodes), "one label per node"
    return expect("y", y, shape, kind="labels", like=hood, note=note).long()


def check_label_range(
    rows: Neighborhood,
    labels: Tensor,
    num_classes: int,
    has: str = "alpha has",
    cure: str = "mask that node out with observed, or give alpha more columns",
) -> None:
    """Refuse observed labels ``(..., num_rows)`` beyond the classes."""
    labels = expect("y", labels, kind="labels").long()  # uint8 compares with 256 modulo 256
    wrong = (labels < 0) | (labels >= num_classes)
    if wrong.any():
        where = wrong.nonzero()[0]
        label, node = labels[tuple(where)].item(), rows.nodes[where[-1]].item()
        known = f"{has} labels 0..{num_classes - 1}"
        raise ValueError(f"y holds label {label} at node {node}, but {known}: {cure}")


def order_to_rows(rows: Neighborhood, order: Tensor) -> Tensor:
    """Row numbers of an order of node ids, a permutation of the rows' nodes."""
    if order is rows.nodes:
        return torch.arange(rows.num_rows, device=rows.device)
    good = isinstance(order, Tensor) and (order.dtype, order.device) == (torch.long, rows.device)
    if not good or not torch.equal(order.sort().values, rows.nodes):
        got = f"{order.dtype} of shape {tuple(order.shape)}" if isinstance(order, Tensor) else order
        raise ValueError(
            f"order must be a permutation of the {rows.num_rows} observed node ids "
            f"(torch.long, on {rows.device}), got {got}"
        )
    return torch.searchsorted(rows.nodes, order.contiguous())


def as_nodes(hood: Neighborhood, nodes: Tensor | None) -> Tensor:
    """Node ids ``(K,)``, default all; none, those that repeat or are out of range are refused."""
    if nodes is None:
        return torch.arange(hood.num_nodes, device=hood.device)
    check_ids("nodes", nodes, (("K", 1),), hood.num_nodes, like=hood, note="at least one")
    if len(nodes.unique()) < len(nodes):
        raise ValueError("nodes must be distinct: a node has one label only")
    return nodes


def check_pairs(hood: Neighborhood, pairs: Tensor) -> None:
    """Refuse pairs of node ids ``(2, P)`` that are none or out of range."""
    check_ids("pairs", pairs, (2, ("P", 1)), hood.num_nodes, like=hood, note="at least one")
