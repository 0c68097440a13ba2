# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Values of a PyG graph's edges in the order of its neighbourhoods."""

from numbers import Real

import torch
from torch import Tensor
from torch_geometric.utils import scatter

from pyro_nmm.arguments import (
    as_edge_index,
    as_expected,
    expect_all,
)
from pyro_nmm.graph_arguments import check_all_rows
from pyro_nmm.neighborhood import Neighborhood, edges_between


def edge_values(
    hood: Neighborhood, edge_index: Tensor, values: Tensor, *,
    fill_value: float | None = None, reduce: str | None = None,
) -> Tensor:  # fmt: skip
    r"""
    Values of edges in the order of ``hood``, as all ``logits`` must be: row after row, sources
    ascending, each self-loop once.

    >>> edge_index = torch.tensor([[1, 0, 2, 1], [0, 1, 1, 2]])
    >>> hood = Neighborhood(edge_index, num_nodes=3)
    >>> edge_values(hood, edge_index, torch.tensor([1.0, 2.0, 3.0, 4.0]), fill_value=0.0)
    tensor([0., 1., 2., 0., 3., 4., 0.])

    Attention is a logarithm away from logits. PyG's ``GATConv`` returns it with self-loops:

    >>> from torch_geometric.nn import GATConv
    >>> _, attention = GATConv(3, 4)(torch.eye(3), edge_index, return_attention_weights=True)
    >>> edges, heads = attention  # heads: (E, 1)
    >>> edge_values(hood, edges, heads[:, 0]).log().shape
    torch.Size([7])

    :param Tensor edge_index: ``(2, E)``, the edges of the values: those of ``hood`` in any order,
        with or without self-loops.
    :param Tensor values: ``(..., E)``.
    :param float fill_value: for the self-loops that ``edge_index`` lacks. As a logit, 0 is neutral
        and ``-inf`` switches them off, which leaves an isolated node without any neighbour.
        Missing self-loops are an error without it.
    :param str reduce: for edges that ``edge_index`` lists several times, as for PyG's ``scatter``:
        ``"sum"`` of attention or weights, ``"mean"``, ``"max"``. They are an error without it.
    :return: ``(..., num_edges)``, with the gradient of the values. Cost: :math:`O(E \log E)`.
    :raises ValueError: if ``edge_index`` has other edges than ``hood``.
    """
    check_all_rows(hood)
    num_sources = hood.num_sources if hood.bipartite else None
    edge_index = as_edge_index(edge_index, hood.num_nodes, num_sources, like=hood)
    shape = "...", edge_index.shape[1]
    values = as_expected("values", values, shape, like=hood, note="one per edge")
    expect_all("values", values, values < torch.inf, "not be NaN or +inf")
    if reduce not in (None, "sum", "mean", "max", "min", "mul"):
        raise ValueError(f"reduce must be 'sum', 'mean', 'max', 'min' or 'mul', got {reduce!r}")
    if fill_value is not None and not (isinstance(fill_value, Real) and fill_value == fill_value):
        raise ValueError(f"fill_value must be a number or -inf, got {fill_value!r}")
    place = edges_between(hood, *edge_index)
    if (place < 0).any():
        edge = edge_index[:, place < 0][:, 0].tolist()
        raise ValueError(f"edge_index has the edge {edge}, which hood lacks: of another graph?")
    count, ends = torch.bincount(place, minlength=hood.num_edges), (hood.source, hood.target)
    lost, loop = count == 0, (hood.source == hood.target) & (not hood.bipartite)
    if (lost & ~loop).any():
        edge = [int(end[lost & ~loop][0]) for end in ends]
        raise ValueError(f"edge_index lacks the edge {edge}, which hood has: of another graph?")
    if fill_value is None and lost.any():
        raise ValueError(
            f"edge_index lacks the self-loop of node {int(hood.source[lost][0])}, which hood has: "
            f"give fill_value, as logits 0.0, or -inf for no self-loop"
        )
    if reduce is None and (most := int(count.max())) > 1:
        edge = [int(end[count == most][0]) for end in ends]
        raise ValueError(
            f"edge_index lists the edge {edge} {most} times: give reduce, 'sum' for attention or "
            f"weights, 'mean' for logits"
        )
    ordered = scatter(values, place, -1, hood.num_edges, reduce or "sum")
    return ordered if fill_value is None else ordered.masked_fill(lost, fill_value)
