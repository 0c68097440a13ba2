# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The choice of a neighbour by every node, independently."""

from collections.abc import Sequence

import torch
from pyro.ops.provenance import track_provenance
from torch import Size, Tensor
from torch.distributions import constraints

from pyro_nmm.caching import derived
from pyro_nmm.distributions.base import GraphDistribution, flatten
from pyro_nmm.graph_arguments import check_logits, check_scores
from pyro_nmm.neighborhood import Neighborhood
from pyro_nmm.ops.sampling import pick
from pyro_nmm.provenance import untracked


class Neighbors(constraints.Constraint):
    """Choices ``(..., num_rows)`` of a neighbour by every row."""

    is_discrete, event_dim = True, 1

    def __init__(self, hood: Neighborhood) -> None:
        self.hood = hood

    def check(self, value: Tensor) -> Tensor:
        flat = value.reshape(-1, self.hood.num_rows)
        return (self.hood.find(flat) >= 0).all(-1).view(value.shape[:-1])


class NeighborChoice(GraphDistribution):
    r"""
    Every node's independent choice of a neighbour, :math:`p(c)`.

    .. math::

        c_i \sim \mathrm{Categorical}(L_i), \quad c_i \in n(i), \quad
        L_i = \mathrm{softmax}_{j \in n(i)}(\text{logits}_{ij})

    This is the second line of the paper's equation (1). A sample holds a node id for each row of
    ``hood``, shape ``batch_shape + (num_rows,)``. Cost: :math:`O(E)` a sample and a ``log_prob``.

    >>> hood = Neighborhood(torch.tensor([[0, 1], [1, 2]]), num_nodes=3)
    >>> choice = NeighborChoice(hood, torch.zeros(hood.num_edges))
    >>> choice.log_prob(torch.tensor([0, 0, 1])).exp()
    tensor(0.2500)

    :param Neighborhood hood: the neighbourhoods of all or of some nodes.
    :param Tensor logits: ``(..., num_edges)`` attention scores in the order of ``hood``, see
        :func:`~pyro_nmm.edge_values`; ``-inf`` switches an edge off.
    """

    shown = ("hood",)

    def __init__(self, hood: Neighborhood, logits: Tensor, *, validate_args=None) -> None:
        self.hood, self.logits = hood, (logits := check_logits(hood, logits))
        super().__init__(logits.shape[:-1], Size([hood.num_rows]), validate_args=validate_args)
        if self._validate_args:
            check_scores(hood, logits)

    @constraints.dependent_property(is_discrete=True, event_dim=1)
    def support(self):
        return Neighbors(self.hood)

    @derived
    def log_attention(self) -> Tensor:
        r"""``(..., num_edges)``: :math:`\log L_{ij}`."""
        return self.hood.log_softmax(self.logits)

    @torch.no_grad()
    def sample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        shape = self._extended_shape(Size(sample_shape))
        (logits,), provenance = untracked(self.logits)
        attention = flatten(self.hood.softmax(logits), shape[:-1])
        uniforms = torch.rand(shape, dtype=torch.double, device=self.hood.device)
        edges = pick(self.hood, attention, uniforms.view(-1, self.hood.num_rows))
        return track_provenance(self.hood.source[edges].view(shape), provenance)

    def log_prob(self, value: Tensor) -> Tensor:
        if self._validate_args:
            self._validate_sample(value)
        (value,), provenance = untracked(value)
        shape = torch.broadcast_shapes(value.shape[:-1], self.batch_shape)
        edges = self.hood.find(flatten(value, shape))
        log_attention = flatten(self.log_attention, shape)
        # Scores that the batch shares get their gradient in one pass over the choices.
        if len(log_attention) > 1:
            offset = self.hood.num_edges * torch.arange(len(log_attention), device=edges.device)
            edges = torch.where(edges < 0, -1, edges + offset[:, None])
        log_prob = log_attention.flatten().index_select(0, edges.clamp(min=0).flatten())
        log_prob = log_prob.view_as(edges).masked_fill(edges < 0, -torch.inf).sum(-1)
        log_prob = log_prob.expand(shape.numel()).view(shape)
        return track_provenance(log_prob, provenance)
