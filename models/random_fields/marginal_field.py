# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Markov random fields with some nodes summed out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from pyro.ops.provenance import track_provenance
from torch import Size, Tensor
from torch.distributions import Categorical
from torch.nn.functional import one_hot

from pyro_nmm import NeighborChoice, NeighborMixture
from pyro_nmm.arguments import as_shape, as_tensor, check_integers, check_mask, check_plain
from pyro_nmm.distributions.base import GraphDistribution
from pyro_nmm.models.random_fields.elimination import greedy_colors
from pyro_nmm.models.random_fields.pairwise import (
    PairwiseMRF,
    check_field,
    check_labels,
    check_mixture,
)
from pyro_nmm.ops.enumeration import enumerate_labels
from pyro_nmm.ops.score_costs import others_mean
from pyro_nmm.provenance import untracked

#: Most labellings of a node's neighbours for which the node is summed out.
MAX_LABELLINGS = 4096


class Stars(NamedTuple):
    """Nodes that are summed out and have the same number ``D`` of neighbours."""

    nodes: Tensor  #: ``(B,)`` node ids
    neighbors: Tensor  #: ``(B, D)`` places among the nodes that stay
    logits: Tensor  #: ``(B, C^D, C)`` of a node's label, by its neighbours' labels, last fastest
    sums: Tensor  #: ``(B, C^D)``: the logarithm of their sum over the node's label

    def rows(self, value: Tensor, table: Tensor) -> Tensor:
        """``(..., B, ...)``: rows of a table ``(B, C^D, ...)`` at labels ``(..., num_nodes)``."""
        count, num_classes = self.neighbors.shape[1], self.logits.shape[-1]
        digits = num_classes ** torch.arange(count - 1, -1, -1, device=value.device)
        number = (value[..., self.neighbors] * digits).sum(-1)
        return table[torch.arange(len(self.nodes), device=value.device), number]


class MarginalField(GraphDistribution):
    r"""The distribution of some nodes of a Markov random field, the others summed out exactly. No
    two of the others are neighbours, so each sum is over a single label:

    .. math::

        \log p^*(y_S) &= \sum_{i \in S} u_i(y_i)
            + \sum_{(i, j) \subset S} w_{ij} \, \phi(y_i, y_j) \\
            &+ \sum_{b \notin S} \log \sum_k \exp \Big( u_b(k) +
              \sum_{j \sim b} w_{bj} \, \phi(y_j, k) \Big)

    A :math:`q(y_S)` approximates the whole field as :math:`q(y_S) \, p(y_{\setminus S} \mid y_S)`,
    with the KL divergence of :math:`q(y_S)`. Cost: :math:`O(N C^{D + 1})` to build and to store,
    for ``D`` neighbours of a node that is summed out.

    >>> from pyro_nmm.models import grid_edges, ising
    >>> field = ising(grid_edges(3, 3), coupling=0.4, field=torch.full((9,), 0.1))
    >>> MarginalField(field).nodes
    tensor([1, 3, 5, 7])

    :param PairwiseMRF field: without batch dimensions.
    :param Tensor stay: ``(N,)`` mask of the nodes of :math:`S`. Default: the others are the
        largest of the field's :meth:`~PairwiseMRF.colors`, as far as their neighbours have at
        most 4096 labellings.
    :raises ValueError: for a field with a batch, an edge between two nodes that are summed out, and
        such a node whose neighbours have more than 4096 labellings; methods as in the field.
    """

    shown = "num_nodes", "num_classes"
    support = PairwiseMRF.support

    nodes: Tensor  #: ``(num_nodes,)`` ids, in the field, of the nodes that stay
    others: Tensor  #: ``(N - num_nodes,)`` of those summed out
    unary: Tensor  #: ``(num_nodes, C)`` terms of the field

    def __init__(self, field: PairwiseMRF, stay: Tensor | None = None) -> None:
        check_field(field)
        degree = torch.bincount(field.edges.flatten(), minlength=field.num_nodes)
        many = field.num_classes ** degree.double() > MAX_LABELLINGS
        if stay is None:
            color = max(reversed(field.colors()), key=len)
            stay = torch.ones_like(many).index_fill(0, color, False) | many
            stay[:1] |= not stay.any()  # of a field without edges nothing else would stay
        else:
            stay = as_tensor("stay", stay, field.edges.device)
            check_mask(stay, field.num_nodes, field.edges.device, "stay")
        between = field.edges[:, ~stay[field.edges].any(0)]
        if between.numel():
            got = f"neither {between[0, 0]} nor {between[1, 0]}"
            raise ValueError(f"stay must hold one end of every edge at least, but holds {got}")
        if (many & ~stay).any():
            node, most = int((many & ~stay).nonzero()[0]), f"more than {MAX_LABELLINGS} labellings"
            raise ValueError(f"node {node} has {most} of its neighbours: let it stay")
        self.field, self.stay = field, stay
        self.nodes, self.others = stay.nonzero()[:, 0], (~stay).nonzero()[:, 0]
        self.num_nodes, self.num_classes = len(self.nodes), field.num_classes
        place, inside = stay.cumsum(0) - 1, stay[field.edges].all(0)
        strength = field.strength.expand(field.num_edges)
        self.unary, edges = field.unary[self.nodes], place[field.edges[:, inside]]
        self.rest = PairwiseMRF(edges, self.unary, strength[inside], field.interaction)
        self.stars = tuple(self._stars(place, strength, degree[self.others]))
        super().__init__(Size(), Size([self.num_nodes]), validate_args=False)

    def _stars(self, place: Tensor, strength: Tensor, degree: Tensor) -> Iterator[Stars]:
        field = self.field
        both = torch.cat([field.edges, field.edges.flip(0)], 1)
        outside = ~self.stay[both[0]]
        center, end = both[:, outside]
        by_center = center.argsort(stable=True)
        end, weight = place[end[by_center]], strength.repeat(2)[outside][by_center]
        for count in degree.unique().tolist():
            nodes = self.others[degree == count]
            here = (degree == count).repeat_interleave(degree)
            labels = enumerate_labels(count, field.num_classes, end.device)
            neighbors, weights = (values[here].view(len(nodes), count) for values in (end, weight))
            sent = torch.einsum("bd,kdc->bkc", weights, field.interaction[labels])
            logits = field.unary[nodes].unsqueeze(1) + sent
            yield Stars(nodes, neighbors, logits, logits.logsumexp(-1))

    def log_potential(self, value: Tensor) -> Tensor:
        r"""``(...)``: :math:`\log p^*(y_S)` of ``(..., num_nodes)`` labels. Cost: :math:`O(P)`."""
        total = self.rest.log_potential(value)
        for star in self.stars:
            total = total + star.rows(value, star.sums).sum(-1)
        return total.expand(torch.broadcast_shapes(total.shape, self.batch_shape))

    def expected_potential(self, mixture: NeighborMixture, num_samples: int = 8) -> Tensor:
        r"""An unbiased estimate of :math:`E_q[\log p^*(y_S)]` under a mixture, and of its gradient,
        a number. The term :math:`f_b` of a node that is summed out is exact given its neighbours'
        choices :math:`c`, and averaged over ``num_samples`` draws of them, at least two. Cost:
        :math:`O(E C + N C^D D)` a draw.

        .. math::

            E_c \Big[ \sum_{y_1 \dots y_D} p(y_1 \dots y_D \mid c) \, f_b(y_1 \dots y_D) \Big],
            \qquad p(y_d \mid y_{<d}, c) = \frac{\alpha_{c_d y_d} + \#\{m < d : (c_m, y_m) =
            (c_d, y_d)\}}{A_{c_d} + \#\{m < d : c_m = c_d\}}
        """
        check_integers(2, num_samples=num_samples)
        check_plain("expected_potential", mixture.batch_shape)
        check_mixture(mixture, self.unary)
        (alpha, logits), provenance = untracked(mixture.alpha, mixture.logits)
        choice = NeighborChoice(mixture.hood, logits, validate_args=False)
        chosen = choice.sample((num_samples,))
        log_attention = choice.log_terms(chosen)
        total = self.rest.expected_potential(mixture)
        for star in self.stars:
            probs = _joint_labels(alpha, chosen[:, star.neighbors])
            terms = (probs * star.sums).sum(-1)
            score = log_attention[:, star.neighbors].sum(-1)
            baseline = others_mean(terms, [0])
            assert baseline is not None  # of two draws or more
            above = (terms - baseline).detach()
            total = total + (terms + above * (score - score.detach())).sum() / num_samples
        return track_provenance(total, provenance)

    @torch.no_grad()
    def complete(self, value: Tensor) -> Tensor:
        """``(..., N)``: labels ``(..., num_nodes)``, and draws of the others given them."""
        value = check_labels(self.rest, value, "a label for each node that stays")
        drawn = [Categorical(logits=star.rows(value, star.logits)).sample() for star in self.stars]
        # Where each node stands among those that stay and the stars; with this the inverse.
        place = torch.cat([self.nodes, *(star.nodes for star in self.stars)]).argsort()
        return torch.cat([value, *drawn], -1).index_select(-1, place)

    def colors(self) -> list[Tensor]:
        """Sets of places among the nodes that stay without an interaction inside."""
        pairs = [self.rest.edges]
        for star in self.stars:
            count = star.neighbors.shape[1]
            ends = torch.combinations(torch.arange(count, device=star.nodes.device))
            pairs.append(star.neighbors[:, ends].flatten(0, 1).T)
        return greedy_colors(torch.cat(pairs, 1).unique(dim=1), self.num_nodes)

    def scaled(self, share: float) -> MarginalField:
        """The same nodes of the field with its interactions multiplied by ``share``."""
        return MarginalField(self.field.scaled(share), self.stay)

    def log_normalizer(self) -> Tensor:
        r"""Exact :math:`\log Z` of the field; refuses wide graphs."""
        return self.field.log_normalizer()

    def log_prob(self, value: Tensor) -> Tensor:
        """Exact; refuses wide graphs."""
        return self.log_potential(value) - self.log_normalizer()

    def sample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Exact and independent samples; refuses wide graphs."""
        return self.field.sample(as_shape(sample_shape) + self.batch_shape)[..., self.nodes]


RandomField = PairwiseMRF | MarginalField


def _joint_labels(alpha: Tensor, chosen: Tensor) -> Tensor:
    """``(..., C^D)``: joint label distributions of nodes that have chosen sources ``(..., D)``."""
    (*shape, count), num_classes, total = chosen.shape, alpha.shape[-1], alpha.sum(-1)
    same = (chosen.unsqueeze(-1) == chosen.unsqueeze(-2)).to(alpha)
    joint = alpha.new_ones(*shape, 1)
    for d in range(count):
        # How often each label has come from the same source, among the nodes before.
        before, labels = same[..., d, :d], enumerate_labels(d, num_classes, alpha.device)
        come = torch.einsum("...m,kmc->...kc", before, one_hot(labels, num_classes).to(alpha))
        above = alpha[chosen[..., d]].unsqueeze(-2) + come
        below = total[chosen[..., d]] + before.sum(-1)
        joint = (joint.unsqueeze(-1) * (above / below[..., None, None])).flatten(-2)
    return joint
