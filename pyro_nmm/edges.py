# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Checks of what a graph is made of: pairs of node ids, and masks of nodes."""

import torch
from torch import Tensor
from torch_geometric.utils import index_to_mask

from pyro_nmm.expect import expect, expect_device, out_of_range


def check_edge_index(edge_index: Tensor, num_nodes: int, num_sources: int | None = None) -> None:
    """Pairs of node ids, as PyG has them, or of a source and a node."""
    own = ("node", num_nodes) if num_sources is None else ("source", num_sources)
    ends = own, ("node", num_nodes)
    for what, size in ends:
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"num_{what}s must be a positive integer, got {size!r}")
    if isinstance(edge_index, Tensor) and edge_index.layout != torch.strided:
        raise ValueError(
            "edge_index must hold pairs of node ids, got a sparse matrix: take its entries with "
            "PyG's to_edge_index(adj)[0], whose rows are sources"
        )
    expect("edge_index", edge_index, (2, "num_edges"))
    if edge_index.is_meta:
        raise ValueError("edge_index is on the meta device and holds no node ids")
    expect("edge_index", edge_index, kind="integers")
    for ids, (what, size) in zip(edge_index, ends, strict=True):
        if (bad := out_of_range(ids, size)) is not None:
            raise ValueError(
                f"edge_index holds {what} id {bad}, but ids must lie in 0..{size - 1}: "
                f"renumber the {what}s or raise num_{what}s (now {size})"
            )


def check_grid(radius: int, **sizes: int) -> None:
    """Refuse sizes of a grid below one, and a negative radius."""
    values = *sizes.values(), radius
    if not all(isinstance(n, int) for n in values) or min(values[:-1]) < 1 or radius < 0:
        needed = ", ".join(f"{name} >= 1" for name in sizes)
        got = ", ".join(map(repr, values))
        raise ValueError(f"grid needs {needed} and radius >= 0, integers, got {got}")


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
    A boolean mask of nodes that selects at least one, or any number if ``empty``. Integers are
    refused: torch would read zeros and ones as node ids.

    :param str beside: the argument whose device it must be on.
    """
    expect(name, mask, (num_nodes,), kind="mask", note="one entry per node")
    expect_device(name, mask, device, beside)
    if not empty and not mask.any():
        raise ValueError(f"{name} selects no node: at least one entry must be True")


def as_mask(
    nodes: Tensor, num_nodes: int, device: torch.device, name: str = "nodes", *, empty: bool = False
) -> Tensor:
    """Nodes given by ids or by a mask, as a mask; see :func:`check_mask`."""
    if isinstance(nodes, Tensor) and nodes.dtype in (torch.int32, torch.int64) and nodes.dim() == 1:
        if (bad := out_of_range(nodes, num_nodes)) is not None:
            raise ValueError(f"{name} must hold node ids in 0..{num_nodes - 1}, got {bad}")
        nodes = index_to_mask(nodes.long(), num_nodes)
    check_mask(nodes, num_nodes, device, name, empty=empty)
    return nodes
