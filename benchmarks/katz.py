# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
The index of Katz (1953, "A new status index derived from sociometric analysis", Psychometrika),
which predicts links without a model: the number of walks from one node to the other, each step at a
discount. Here of walks of up to ``longest`` steps.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import one_hot


def walks(edge_index: Tensor, num_nodes: int, pairs: Tensor, longest: int = 6) -> Tensor:
    """``(longest, P)``: how many walks of each length lead from one node of a pair to the other."""
    ones = torch.ones(edge_index.shape[1], dtype=torch.double, device=edge_index.device)
    size = num_nodes, num_nodes
    graph = torch.sparse_coo_tensor(edge_index, ones, size, check_invariants=True).coalesce()
    found = []
    for start, end in (part.unbind() for part in pairs.split(500, 1)):
        reached, counts = one_hot(start, num_nodes).double().T, []
        for _ in range(longest):
            reached = torch.sparse.mm(graph, reached)
            counts.append(reached.gather(0, end[None])[0])
        found.append(torch.stack(counts))
    return torch.cat(found, 1)


def katz_index(counts: Tensor, discount: float) -> Tensor:
    """``(P,)``, from the numbers of walks."""
    powers = discount ** torch.arange(1, len(counts) + 1, dtype=counts.dtype, device=counts.device)
    return powers @ counts
