# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""What users have for a StackedNMM, as the tensors that it reads."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.utils import index_to_mask

from pyro_nmm import Neighborhood
from pyro_nmm.concentrations import in_single
from pyro_nmm.edges import check_mask
from pyro_nmm.models.stacked.edge_weights import check_weights
from pyro_nmm.validation import check_all_rows, check_label_range, check_labels


def scores_of(hood: Neighborhood, scores: Any) -> Tensor:
    """``(N, C)`` logits, of a tensor or an array, at least in single precision."""
    scores = _tensor(scores, hood)
    if not isinstance(scores, Tensor) or scores.is_meta:
        got = "one on the meta device" if isinstance(scores, Tensor) else type(scores)
        raise ValueError(f"scores must be a tensor or an array with values, got {got}")
    if scores.dim() != 2 or len(scores) != hood.num_nodes or scores.shape[1] < 2:
        raise ValueError(
            f"scores must have shape ({hood.num_nodes}, C), one row of logits per node and "
            f"C >= 2 labels, got {tuple(scores.shape)}"
        )
    return in_single(scores) if scores.is_floating_point() else scores


def check_scores(scores: Tensor) -> None:
    """Values of scores: they must be finite, and are expected to be logits."""
    if not scores.is_floating_point() or not scores.isfinite().all():
        bad = (~scores.isfinite()).sum().item() if scores.is_floating_point() else scores.dtype
        raise ValueError(
            f"scores must be finite floating-point logits, got {bad}"
            + (" entries that are not" if scores.is_floating_point() else "")
        )
    if (scores >= 0).all() and ((scores.sum(-1) - 1).abs() < 1e-3).all():
        warnings.warn(
            "scores look like probabilities: each row sums to one. Give logits; those of "
            "probabilities are their logarithms, scores.clamp(min=1e-6).log()",
            stacklevel=4,
        )


def labels_of(hood: Neighborhood, y: Any) -> Tensor:
    """``(N,)`` labels, of a tensor or an array ``(N,)`` or, as OGB has them, ``(N, 1)``."""
    y = _tensor(y, hood)
    if isinstance(y, Tensor) and y.dim() == 2 and y.shape[1] == 1:
        y = y[:, 0]
    return check_labels(hood, y, hood.num_nodes)


def mask_of(hood: Neighborhood, nodes: Any, name: str, empty: bool = False) -> Tensor:
    """``(N,)``: a boolean mask, of one or of node ids, as tensors or arrays."""
    size, nodes = hood.num_nodes, _tensor(nodes, hood)
    integers = isinstance(nodes, Tensor) and nodes.dtype in (torch.int32, torch.int64)
    # A mask of zeros and ones is no set of node ids: it repeats itself.
    if integers and nodes.dim() == 1 and len(nodes.unique()) == len(nodes):
        if len(nodes) and not 0 <= int(nodes.min()) <= int(nodes.max()) < size:
            bad = nodes.min() if nodes.min() < 0 else nodes.max()
            raise ValueError(f"{name} must hold node ids in 0..{size - 1}, got {int(bad)}")
        nodes = index_to_mask(nodes.long(), size)
    check_mask(nodes, size, hood.device, name, empty=empty)
    return nodes


def weights_of(hood: Neighborhood, edge_weight: Any) -> Tensor | None:
    """``(num_edges,)`` positive weights, of a tensor or an array, or none."""
    if edge_weight is None:
        return None
    check_all_rows(hood)
    edge_weight = _tensor(edge_weight, hood)
    if not isinstance(edge_weight, Tensor) or edge_weight.shape != (hood.num_edges,):
        got = getattr(edge_weight, "shape", type(edge_weight))
        raise ValueError(
            f"edge_weight must have shape ({hood.num_edges},), one weight per edge of hood, got "
            f"{got}: pyro_nmm.models.edge_weights makes it of PyG's"
        )
    check_weights(edge_weight)
    return edge_weight


def check_disjoint(masks: dict[str, Tensor], why: str) -> None:
    (one, first), (other, second) = masks.items()
    if (first & second).any():
        node = int((first & second).nonzero()[0])
        raise ValueError(f"{one} and {other} must be disjoint, but both hold node {node}: {why}")


def check_known(hood: Neighborhood, y: Tensor, known: Tensor, num_classes: int) -> None:
    """Labels of the nodes where they are known."""
    if known.any():
        rows = hood.restrict(known)
        check_label_range(rows, y[rows.nodes], num_classes)


def _tensor(value: Any, hood: Neighborhood) -> Any:
    if not isinstance(value, np.ndarray):
        return value
    return torch.from_numpy(np.ascontiguousarray(value)).to(hood.device)
