# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The graphs of a PyG batch."""

import torch
from torch import Tensor
from torch_geometric.utils import scatter

from pyro_nmm.neighborhood import Neighborhood


def sum_by_graph(hood: Neighborhood, values: Tensor, nodes: Tensor, batch: Tensor) -> Tensor:
    """
    ``(..., num_graphs)``: values ``(..., n)`` of nodes ``(n,)``, summed over each graph of a batch
    ``(N,)``; an error if graphs share sources.
    """
    shape = (hood.num_nodes,)
    if not isinstance(batch, Tensor) or batch.dtype != torch.long or batch.shape != shape:
        got = (tuple(batch.shape), batch.dtype) if isinstance(batch, Tensor) else type(batch)
        raise ValueError(f"batch must hold graph numbers (torch.long) of shape {shape}, got {got}")
    if batch.min() < 0:
        raise ValueError(f"batch must hold graph numbers from 0 on, got {int(batch.min())}")
    own, part = batch[hood.nodes], hood.components()
    ends = (scatter(own, part, dim_size=hood.num_rows, reduce=end) for end in ("min", "max"))
    least, most = (end[part] for end in ends)
    if (least != most).any():
        place = int((least != most).nonzero()[0])
        raise ValueError(
            f"batch puts nodes that share sources into graphs {int(least[place])} and "
            f"{int(most[place])}: labels of different graphs must be independent"
        )
    return scatter(values, batch[nodes], dim=-1, dim_size=int(batch.max()) + 1, reduce="sum")
