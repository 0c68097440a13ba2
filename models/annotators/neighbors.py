# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""What the neighbours of each node say about its label: by random walks, and in a Potts model."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch_geometric.utils import remove_self_loops, to_undirected

from pyro_nmm import Neighborhood
from pyro_nmm.models.hidden import HiddenField
from pyro_nmm.sparse import sparse_csr

#: Probability to go on after an edge, and the longest walk.
GO_ON, LONGEST = 0.9, 50
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

    >>> path = torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]])
    >>> own = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]]).double()
    >>> Walk.on_graph(path, 3).labels(own, torch.tensor([0, 1, 1]))[2]
    tensor([1., 0.], dtype=torch.float64)
    """

    there: Tensor  #: ``(N, N)`` or ``(N, M)`` shares of the neighbours or the sources of each node
    back: Tensor | None = None  #: ``(M, N)`` shares of the nodes of each source
    go_on: float = GO_ON

    @classmethod
    def on_graph(cls, edge_index: Tensor, num_nodes: int) -> "Walk":
        """An edge counts in both directions, and loops do not."""
        edges = remove_self_loops(to_undirected(edge_index.long(), num_nodes=num_nodes))[0]
        weight = torch.ones(edges.shape[1], dtype=torch.double, device=edges.device)
        return cls(_shares(edges[0], edges[1], weight, (num_nodes, num_nodes)))

    @classmethod
    def on_hood(cls, hood: Neighborhood, log_attention: Tensor) -> "Walk":
        """Over the sources, with attention ``(num_edges,)``."""
        ends, weight = (hood.target, hood.source), log_attention.double().exp()
        there = _shares(*ends, weight, (hood.num_nodes, hood.num_sources))
        back = _shares(*ends[::-1], weight, (hood.num_sources, hood.num_nodes))
        return cls(there, back, 0.5)

    def labels(self, own: Tensor, part: Tensor | None = None) -> Tensor:
        """
        Label distributions ``(N, C)`` around each node, equal shares if a walk meets no label.

        :param Tensor own: ``(N, C)`` distributions in double precision, zeros at nodes without any.
        :param Tensor part: ``(N,)`` integers from zero; a part's own labels are left out for it.
        """
        if part is None:
            found = self._ends(own)
        else:
            found = torch.zeros_like(own)
            for number in range(int(part.max()) + 1):
                here = part == number
                found[here] = self._ends(own.masked_fill(here[:, None], 0))[here]
        total = found.sum(-1, keepdim=True)
        return torch.where(total > 0, found / total, 1 / own.shape[1])

    def step(self, labels: Tensor) -> Tensor:
        """``(N, C)``: the mean of the neighbours."""
        return self.there @ (labels if self.back is None else self.back @ labels)

    def _ends(self, own: Tensor) -> Tensor:
        labels = own
        for _ in range(LONGEST if self.back is None else LONGEST // 2):
            labels = self.go_on * self.step(labels) + (1 - self.go_on) * own
        return labels


def _shares(rows: Tensor, columns: Tensor, weight: Tensor, shape: tuple[int, int]) -> Tensor:
    """A matrix whose rows sum to one, but for empty rows."""
    rows, order = rows.sort(stable=True)
    weight, size = weight[order], shape[0]
    total = weight.new_zeros(size).index_add_(0, rows, weight)
    starts = torch.zeros(size + 1, dtype=torch.long, device=rows.device)
    starts[1:] = rows.bincount(minlength=size).cumsum(0)
    return sparse_csr(starts, columns[order], weight / total[rows], shape)


def walk_of(field: HiddenField) -> Walk:
    """Over the sources of a field, with its fitted attention."""
    with torch.no_grad():
        logits = field.prior(field.hood, *field.inputs)[1]
    return Walk.on_hood(field.hood, field.hood.log_softmax(logits))


def potts_labels(walk: Walk, evidence: Tensor, part: Tensor) -> Tensor:
    r"""
    What neighbours say about each node, ``(N, C)``, in the mean field of a Potts model,

    .. math::

        q_i \propto \exp \Bigl( .3 \, e_i + \tfrac{2.5}{\sqrt{d_i}} \sum_{j \sim i} q_j \Bigr)

    Label spreading is linear in what nodes say, and mild. In the Potts model neighbours that agree
    convince each other. Over sources :math:`d_i` is the inverse sum of squared attention.

    :param Tensor evidence: ``(N, C)`` in double precision, zeros at nodes without any.
    :param Tensor part: ``(N,)`` integers from zero; a part's own evidence is left out for it.
    :return: the softmax of the second term. Cost: :math:`O(E C)` for each step and part.
    """
    found = torch.empty_like(evidence)
    shares, rows = walk.there.values(), walk.there.crow_indices().diff()
    squares = torch.segment_reduce(shares.square(), "sum", lengths=rows, initial=0)
    strength = STRENGTH * squares.clamp(min=torch.finfo(squares.dtype).tiny).rsqrt()[:, None]
    for number in range(int(part.max()) + 1):
        here = part == number
        without = (OWN * evidence).masked_fill(here[:, None], 0)
        labels = without.softmax(-1)
        for _ in range(NUM_STEPS):
            pull = strength * walk.step(labels)
            labels = (labels + (without + pull).softmax(-1)) / 2
        found[here] = (strength * walk.step(labels))[here].softmax(-1)
    return found
