# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Parts of a graph around some seed nodes."""

import copy

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.utils import index_to_mask

from pyro_nmm.arguments import as_tensor, check_edges, check_ids, check_integers
from pyro_nmm.datasets.entries import entry


def seed_batch(data: Data, seeds: Tensor, num_hops: int, num_neighbors: int | None = None) -> Data:
    r"""The seed nodes and all nodes within ``num_hops`` edges of them, as PyG's ``NeighborLoader``:

    .. math::

        B_0 = \text{seeds}, \qquad B_{h} = B_{h-1} \cup \bigcup_{i \in B_{h-1}} n(i),

    with all edges into :math:`B_{H-1}`. A network of ``L`` layers needs ``num_hops = L + 1``. With
    ``num_neighbors`` the first hop is whole, because an NMM needs all of :math:`n(i)` of the seeds.
    Later hops draw edges into new nodes, as PyG does with ``[-1, num_neighbors, ...]``.

    >>> chain = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 4]])
    >>> data = Data(x=torch.arange(5.0)[:, None], edge_index=chain, y=torch.arange(5))
    >>> batch = seed_batch(data, torch.tensor([3]), num_hops=2)
    >>> batch.n_id, batch.edge_index, batch.batch_size
    (tensor([3, 1, 2]), tensor([[1, 2],
            [2, 0]]), 1)

    :param Tensor seeds: ``(S,)`` distinct node ids.
    :param int num_neighbors: the most edges into a node that is no seed, by torch, default all.
    :return: the batch, whose first nodes are the seeds. ``batch_size`` is ``S``, ``n_id`` and
        ``e_id`` hold ids in ``data``. Cost: :math:`O(H (N + E))`, and a sort of drawn edges.
    """
    edge_index, size = entry(data, "edge_index"), data.num_nodes
    check_edges("data.edge_index", edge_index)
    check_integers(1, num_hops=num_hops)
    seeds = as_tensor("seeds", seeds, edge_index.device)
    check_ids("seeds", seeds, ("S",), size, note="of a mask take mask.nonzero()[:, 0]")
    if len(seeds.unique()) < len(seeds):
        raise ValueError("seeds must be distinct: a node has one label only")
    if num_neighbors is not None:
        check_integers(1, num_neighbors=num_neighbors)
    reached, inside = _within_hops(seeds, num_hops, edge_index, size, num_neighbors)
    others = (reached & ~index_to_mask(seeds, size)).nonzero()[:, 0]
    nodes, edges = torch.cat([seeds, others]), inside.nonzero()[:, 0]
    number = torch.empty(size, dtype=torch.long, device=seeds.device)
    number[nodes] = torch.arange(len(nodes), device=seeds.device)
    batch = copy.copy(data)
    for name, value in data.to_dict().items():
        if name == "edge_index":
            batch.edge_index = number[edge_index[:, edges]]
        elif isinstance(value, Tensor) and data.is_node_attr(name):
            if value.layout != torch.strided:
                raise ValueError(f"data.{name} is in {value.layout}: give data.{name}.to_dense()")
            batch[name] = value[nodes]
        elif isinstance(value, Tensor) and data.is_edge_attr(name):
            batch[name] = value[edges]
    batch.num_nodes, batch.batch_size = len(nodes), len(seeds)
    batch.n_id, batch.e_id = nodes, edges
    return batch


def _within_hops(
    seeds: Tensor, num_hops: int, edge_index: Tensor, size: int, num_neighbors: int | None
) -> tuple[Tensor, Tensor]:
    """Masks of the nodes that hops against the edges reach, and of the edges on the way."""
    source, target = edge_index
    inside = torch.zeros_like(source, dtype=torch.bool)
    reached = new = index_to_mask(seeds, size)
    for hop in range(num_hops):
        edges = new[target].nonzero()[:, 0]
        if hop and num_neighbors is not None:
            edges = _sampled(edges, target, num_neighbors)
        inside[edges] = True
        new = index_to_mask(source[edges], size) & ~reached
        reached = reached | new
    return reached, inside


def _sampled(edges: Tensor, target: Tensor, most: int) -> Tensor:
    """At most so many of the edges ``(K,)`` into each target, drawn without replacement."""
    edges = edges[torch.randperm(len(edges), device=edges.device)]
    ends, order = target[edges].sort(stable=True)
    rank = torch.arange(len(ends), device=ends.device) - torch.searchsorted(ends, ends)
    return edges[order[rank < most]]
