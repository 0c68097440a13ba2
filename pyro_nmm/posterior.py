# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from pyro_nmm.checks import check_label_range, check_labels, check_nodes
from pyro_nmm.exact import MAX_CHOICES, MAX_NUMBERS, enumerate_labels
from pyro_nmm.neighborhood import Neighborhood
from pyro_nmm.pairwise import node_marginals, pair_marginals
from pyro_nmm.sequential import predict_in_turn

if TYPE_CHECKING:
    from pyro_nmm.distributions.neighbor_mixture import NeighborMixture


def posterior_alpha(alpha: Tensor, choices: Tensor, labels: Tensor) -> Tensor:
    r"""
    :math:`\alpha + s(c, y)`: the concentrations of :math:`p(z \mid c, y)`, by conjugacy.

    :param Tensor alpha: ``(..., N, C)``.
    :param Tensor choices: ``(..., n)`` node ids.
    :param Tensor labels: ``(..., n)`` labels.
    :return: ``(..., N, C)``.
    """
    num_nodes, num_classes = alpha.shape[-2:]
    index = choices * num_classes + labels
    ones = torch.ones_like(index, dtype=alpha.dtype)
    empty = alpha.new_zeros(*index.shape[:-1], num_nodes * num_classes)
    counts = empty.scatter_add(-1, index, ones)
    return alpha + counts.unflatten(-1, (num_nodes, num_classes))


class Posterior:
    r"""
    :math:`p(y \mid y_\tau)`, section 3.6 of the paper: a weighted mixture over choices
    :math:`c_\tau`. Given these, :math:`z_j \sim \mathrm{Dirichlet}(\alpha_j + s_j)`, so each
    component is a :class:`NeighborMixture` over the unobserved labels and every query is a
    weighted mean of its closed forms. Made by :meth:`NeighborMixture.condition`.

    Observed nodes keep their label with probability one.

    :param NeighborMixture mixture: batch shape ``(T,)``, one component for each sample.
    :param Tensor log_weights: ``(T,)`` normalised.
    :param Neighborhood observed_rows: the rows of :math:`\tau`.
    :param Tensor y: ``(N,)`` labels, read at observed nodes only.
    """

    def __init__(
        self,
        mixture: NeighborMixture,
        log_weights: Tensor,
        observed_rows: Neighborhood,
        y: Tensor,
    ) -> None:
        self.mixture, self.log_weights, self.hood = mixture, log_weights, mixture.hood
        self.num_classes = mixture.num_classes
        nodes = observed_rows.nodes
        self.observed = torch.zeros(self.hood.num_nodes, dtype=torch.bool, device=y.device)
        self.observed[nodes] = True
        # Zero stands for "not known": an unobserved entry of y is never read.
        self.labels = torch.zeros_like(self.observed, dtype=torch.long)
        self.labels[nodes] = y[nodes].long()

    def _mean(self, values: Tensor) -> Tensor:
        return torch.tensordot(self.log_weights.exp(), values, 1)

    def marginals(self) -> Tensor:
        """``(N, C)``: the distribution of every node's label. Cost: :math:`O(T N C + E C)`."""
        # Linear in the components' means, so the mixture is merged before it is spread.
        alpha = self.mixture.table
        mean = self._mean(alpha / alpha.sum(-1, keepdim=True))
        marginals = node_marginals(self.hood, mean, self.mixture.attention)
        known = one_hot(self.labels, self.num_classes).to(marginals.dtype)
        return known.where(self.observed[:, None], marginals)

    def pairwise(self, pairs: Tensor) -> Tensor:
        """
        Joint distributions of pairs of labels.

        :param Tensor pairs: ``(2, P)`` node ids.
        :return: ``(P, C, C)``. Cost: :math:`O(T E C)` and :math:`O(T C^2)` for each common
            neighbour of a pair.
        """
        check_nodes(self.hood, pairs, name="pairs")
        # Some components at a time, so that memory does not grow with their number.
        block = max(1, MAX_NUMBERS // 8 // (pairs.shape[1] * self.num_classes**2 + 1))
        alpha, attention = self.mixture.table, self.mixture.attention
        parts = zip(self.log_weights.exp().split(block), alpha.split(block), strict=True)
        table = torch.stack(
            [
                torch.tensordot(weight, pair_marginals(self.hood, part, attention, pairs), 1)
                for weight, part in parts
            ]
        ).sum(0)
        first, second = self.marginals()[pairs]
        fixed = self.observed[pairs].any(0)[:, None, None]
        product = first[:, :, None] * second[:, None, :]
        same = (pairs[0] == pairs[1])[:, None, None]
        return product.where(fixed & ~same, torch.diag_embed(first).where(same, table))

    def log_marginal(self, nodes: Tensor, labels: Tensor) -> Tensor:
        r"""
        :math:`\log p(y_\kappa \mid y_\tau)` of a small set of nodes.

        :param Tensor nodes: ``(K,)`` distinct node ids :math:`\kappa`.
        :param Tensor labels: ``(..., K)`` their labels.
        :return: ``(...)``, ``-inf`` where an observed node is given another label.
        """
        check_nodes(self.hood, nodes)
        check_labels(self.hood, labels, len(nodes))
        check_label_range(self.hood.take(nodes), labels, self.num_classes)
        known = self.observed[nodes]
        agrees = (labels == self.labels[nodes]) | ~known
        if known.all():
            log_prob = self.log_weights.new_zeros(labels.shape[:-1])
        else:
            free = self.mixture.log_marginal(nodes[~known], labels[..., None, :][..., ~known])
            log_prob = (free + self.log_weights).logsumexp(-1)
        return log_prob.masked_fill(~agrees.all(-1), -torch.inf)

    def predict(
        self, nodes: Tensor | None = None, method: str = "marginal", generator=None
    ) -> Tensor:
        r"""
        Predicted labels.

        * ``"marginal"``: the mode of each node's own marginal.
        * ``"joint"``: the joint mode of a small set of nodes, over all
          :math:`C^K` labellings.
        * ``"sequential"``: node after node, the most certain first; each prediction is
          merged into the known labels before the next. Linear in the edges. Each of the
          ``T`` components follows one continuation, so give :meth:`NeighborMixture.condition`
          a ``num_samples`` of some dozens rather than an exact or weighted sum.

        :param Tensor nodes: ``(K,)`` distinct node ids; default all nodes, which returns
            ``(N,)`` with the observed labels in place.
        :param torch.Generator generator: the source of randomness of ``"sequential"``.
        :return: ``(K,)`` labels.
        """
        wanted = torch.arange(self.hood.num_nodes, device=self.hood.device)
        if nodes is not None:
            check_nodes(self.hood, nodes)
            wanted = nodes
        free = wanted[~self.observed[wanted]]
        labels = self.labels.clone()
        if method == "marginal":
            labels[free] = self.marginals()[free].argmax(-1)
        elif method == "joint" and len(free):
            labels[free] = self._joint_mode(free)
        elif method == "sequential" and len(free):
            certainty = self.marginals()[free].max(-1).values
            order = free[certainty.argsort(descending=True, stable=True)]
            labels[order] = predict_in_turn(self, order, generator)
        elif method not in ("joint", "sequential"):
            known = "'marginal', 'joint' or 'sequential'"
            raise ValueError(f"method must be {known}, got {method!r}")
        return labels[wanted]

    def _joint_mode(self, nodes: Tensor) -> Tensor:
        if self.num_classes ** len(nodes) > MAX_CHOICES:
            raise ValueError(
                f"method='joint' would compare {self.num_classes}^{len(nodes)} labellings of "
                f"nodes: use method='sequential', or fewer nodes"
            )
        labels = enumerate_labels(len(nodes), self.num_classes, nodes.device)
        return labels[self.log_marginal(nodes, labels).argmax()]
