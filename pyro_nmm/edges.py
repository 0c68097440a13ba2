# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Errors about what a graph is made of: pairs of node ids, and masks of nodes."""

from __future__ import annotations

import torch
from torch import Tensor


def check_edge_index(edge_index: Tensor, num_nodes: int) -> None:
    """Pairs of node ids, as PyG has them."""
    if not isinstance(num_nodes, int) or num_nodes < 1:
        raise ValueError(f"num_nodes must be a positive integer, got {num_nodes!r}")
    if isinstance(edge_index, Tensor) and edge_index.layout != torch.strided:
        raise ValueError(
            "edge_index must hold pairs of node ids, got a sparse matrix: take its entries with "
            "PyG's to_edge_index(adj)[0], whose rows are sources"
        )
    if not isinstance(edge_index, Tensor) or edge_index.dim() != 2 or len(edge_index) != 2:
        got = tuple(edge_index.shape) if isinstance(edge_index, Tensor) else type(edge_index)
        raise ValueError(f"edge_index must be a tensor of shape (2, num_edges), got {got}")
    if edge_index.is_meta:
        raise ValueError("edge_index is on the meta device and holds no node ids")
    if edge_index.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"edge_index must hold integers (torch.long), got {edge_index.dtype}")
    if edge_index.numel() and not 0 <= int(edge_index.min()) <= int(edge_index.max()) < num_nodes:
        bad = edge_index.min() if edge_index.min() < 0 else edge_index.max()
        raise ValueError(
            f"edge_index holds node id {int(bad)}, but ids must lie in 0..{num_nodes - 1}: "
            f"renumber the nodes or raise num_nodes (now {num_nodes})"
        )


def check_mask(mask: Tensor, num_nodes: int, device: torch.device, name: str = "observed") -> None:
    """A boolean mask of nodes that selects at least one."""
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        got = mask.dtype if isinstance(mask, Tensor) else type(mask)
        raise ValueError(
            f"{name} must be a boolean mask (torch.bool), got {got}; "
            f"turn node ids into a mask with PyG's index_to_mask"
        )
    if mask.shape != (num_nodes,):
        raise ValueError(
            f"{name} must have shape ({num_nodes},), one entry per node, got {tuple(mask.shape)}"
        )
    if mask.device != device:
        raise ValueError(
            f"{name} is on {mask.device} but hood on {device}: move one with .to(device)"
        )
    if not mask.any():
        raise ValueError(f"{name} selects no node: at least one entry must be True")
