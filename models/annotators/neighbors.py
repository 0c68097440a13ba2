# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Labels around each node, the priors of a consensus: random walks, and a Potts model."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch_geometric.utils import remove_self_loops, to_undirected

from pyro_nmm.models.hidden import HiddenField
from pyro_nmm.sparse import csr_of_entries

#: Probability of a further step after an edge, and the longest walk.
DAMPING, LONGEST = 0.9, 50
#: Weight of a node's own evidence, strength of the neighbours, and damped steps in a Potts model.
OWN, STRENGTH, NUM_STEPS = 0.3, 2.5, 30


@dataclass(frozen=True)
class Walk:
    r"""
    Label distribution at the other end of a random walk from each node, which is label spreading
    (Zhou et al. 2003, "Learning with Local and Global Consistency", NeurIPS 16) with the mean over
    neighbours,

    .. math::

        F \leftarrow g \, D^{-1} A F + (1 - g) \, Y, \qquad g = 0.9 .

    On a graph each step goes to a neighbour. On a neighbourhood it goes to a source and on to a
    node of that source, each in proportion to attention, with :math:`g = 0.5`.
    """

    there: Tensor  #: ``(N, N)`` or ``(N, M)`` shares of the neighbours or the sources of each node
    back: Tensor | None = None  #: ``(M, N)`` shares of the nodes of each source
    damping: float = DAMPING

    @classmethod
    def on_graph(cls, edge_index: Tensor, num_nodes: int) -> "Walk":
        """An edge counts in both directions, and loops do not."""
        edges = remove_self_loops(to_undirected(edge_index.long(), num_nodes=num_nodes))[0]
        weight = torch.ones(edges.shape[1], dtype=torch.double, device=edges.device)
        return cls(_shares(edges[0], edges[1], weight, (num_nodes, num_nodes)))

    @classmethod
    def on_field(cls, field: HiddenField) -> "Walk":
        """Over the sources of a field, with its fitted attention."""
        hood = field.hood
        with torch.no_grad():
            weight = hood.log_softmax(field.prior(hood, *field.inputs)[1]).double().exp()
        there = _shares(hood.target, hood.source, weight, (hood.num_nodes, hood.num_sources))
        back = _shares(hood.source, hood.target, weight, (hood.num_sources, hood.num_nodes))
        return cls(there, back, 0.5)

    def labels(self, own: Tensor, part: Tensor) -> Tensor:
        """Distributions ``(N, C)`` around each node, equal shares if a walk meets no label, from
        ``own`` ones, zeros at nodes without any; those of a node's ``part`` are left out for it."""
        ends = _without_own(own, part, self.ends)
        total = ends.sum(-1, keepdim=True)
        return torch.where(total > 0, ends / total, 1 / own.shape[1])

    def ends(self, own: Tensor) -> Tensor:
        """``(N, C)``: labels at the other ends of walks, in the formula's units."""
        labels = own
        for _ in range(LONGEST if self.back is None else LONGEST // 2):
            labels = self.damping * self.step(labels) + (1 - self.damping) * own
        return labels

    def step(self, labels: Tensor) -> Tensor:
        """``(N, C)``: the mean of the neighbours."""
        return self.there @ (labels if self.back is None else self.back @ labels)


def _shares(rows: Tensor, columns: Tensor, weight: Tensor, shape: tuple[int, int]) -> Tensor:
    """A matrix whose rows sum to one, but for empty rows."""
    total = weight.new_zeros(shape[0]).index_add_(0, rows, weight)
    return csr_of_entries(rows, columns, weight / total[rows], shape)


def _without_own(own: Tensor, part: Tensor, around: Callable[[Tensor], Tensor]) -> Tensor:
    """A function of all nodes' tables ``(N, C)``, for each part without the part's own rows."""
    labels = torch.empty_like(own)
    for number in range(int(part.max()) + 1):
        here = part == number
        labels[here] = around(own.masked_fill(here[:, None], 0))[here]
    return labels


def potts_labels(walk: Walk, evidence: Tensor, part: Tensor) -> Tensor:
    r"""
    Softmax of the second term, ``(N, C)``, in the mean field of a Potts model,

    .. math::

        q_i \propto \exp \Bigl( .3 \, e_i + \tfrac{2.5}{\sqrt{d_i}} \sum_{j \sim i} q_j \Bigr)

    Label spreading is linear and mild, but in the Potts model neighbours that agree convince each
    other. Over sources :math:`d_i` is the inverse sum of squared attention. The evidence of a
    node's ``part`` is left out for it.
    """
    shares, rows = walk.there.values(), walk.there.crow_indices().diff()
    squares = torch.segment_reduce(shares.square(), "sum", lengths=rows, initial=0)
    strength = STRENGTH * squares.clamp(min=torch.finfo(squares.dtype).tiny).rsqrt()[:, None]

    def around(own: Tensor) -> Tensor:
        labels = own.softmax(-1)
        for _ in range(NUM_STEPS):
            labels = (labels + (own + strength * walk.step(labels)).softmax(-1)) / 2
        return (strength * walk.step(labels)).softmax(-1)

    return _without_own(OWN * evidence, part, around)
