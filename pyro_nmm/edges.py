# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Errors about what a graph is made of: pairs of node ids, and masks of nodes."""

import torch
from torch import Tensor
from torch_geometric.utils import index_to_mask

from pyro_nmm.expect import expect, expect_device, out_of_range


def check_edge_index(edge_index: Tensor, num_nodes: int, num_sources: int | None = None) -> None:
    """Pairs of node ids, as PyG has them, or of a source and a node."""
    sizes = {"num_nodes": num_nodes}
    if num_sources is not None:
        sizes["num_sources"] = num_sources
    for name, size in sizes.items():
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"{name} must be a positive integer, got {size!r}")
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
    sources, nodes = edge_index
    if num_sources is None:
        _check_range(edge_index, "node", "num_nodes", num_nodes)
    else:
        _check_range(sources, "source", "num_sources", num_sources)
        _check_range(nodes, "node", "num_nodes", num_nodes)


def _check_range(ids: Tensor, what: str, name: str, size: int) -> None:
    if (bad := out_of_range(ids, size)) is not None:
        raise ValueError(
            f"edge_index holds {what} id {bad}, but ids must lie in 0..{size - 1}: "
            f"renumber the {what}s or raise {name} (now {size})"
        )


def check_degrees(degree: Tensor) -> None:
    """The number of every node's sources ``(N,)``; without one there is no label to take."""
    if (degree == 0).any():
        empty = (degree == 0).nonzero()[:, 0]
        raise ValueError(
            f"edge_index has no edge into node {int(empty[0])} ({len(empty)} such nodes): with "
            f"num_sources there are no self-loops, so give every node a source"
        )


def check_mask(
    mask: Tensor,
    num_nodes: int,
    device: torch.device,
    name: str = "observed",
    *,
    empty: bool = False,
    beside: str = "hood",
) -> None:
    """
    A boolean mask of nodes that selects at least one, or any number where ``empty``. Integers are
    no mask: torch would index with zeros and ones as node ids, without a word.

    :param str beside: the argument whose device it must be on.
    """
    expect(name, mask, (num_nodes,), kind="mask", note="one entry per node")
    expect_device(name, mask, device, beside)
    if not empty and not mask.any():
        raise ValueError(f"{name} selects no node: at least one entry must be True")


def as_mask(
    nodes: Tensor,
    num_nodes: int,
    device: torch.device,
    name: str = "nodes",
    *,
    empty: bool = False,
) -> Tensor:
    """A boolean mask of nodes that are given by ids or by a mask, see :func:`check_mask`."""
    if isinstance(nodes, Tensor) and nodes.dtype in (torch.int32, torch.int64) and nodes.dim() == 1:
        if (bad := out_of_range(nodes, num_nodes)) is not None:
            raise ValueError(f"{name} must hold node ids in 0..{num_nodes - 1}, got {bad}")
        nodes = index_to_mask(nodes.long(), num_nodes)
    check_mask(nodes, num_nodes, device, name, empty=empty)
    return nodes
