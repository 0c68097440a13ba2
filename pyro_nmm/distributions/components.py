# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from pyro_nmm.blocks import blocks
from pyro_nmm.ops.compact import Places


class Components:
    r"""
    ``T`` weighted choices of the observed nodes. Given choices,
    :math:`z_j \sim \mathrm{Dirichlet}(\alpha_j + s_j)`, made where a query needs it.

    :param Tensor alpha: ``(N, C)`` concentrations of the prior.
    :param Tensor nodes: ``(n,)`` observed node ids.
    :param Tensor labels: ``(n,)`` the labels that they borrowed; ``(T, n)`` if components differ.
    :param Tensor choices: ``(T, n)`` their choices as node ids.
    :param Tensor log_weights: ``(T,)`` up to a constant.
    :param Tensor shown: the labels of the nodes, of the same shapes; default the borrowed ones.
    """

    def __init__(
        self,
        alpha: Tensor,
        nodes: Tensor,
        labels: Tensor,
        choices: Tensor,
        log_weights: Tensor,
        shown: Tensor | None = None,
    ) -> None:
        self.alpha, self.nodes, self.labels, self.choices = alpha, nodes, labels, choices
        self.shown = labels if shown is None else shown
        self.log_weights = log_weights.log_softmax(0)

    @classmethod
    def prior(cls, alpha: Tensor) -> Components:
        """One component, without any choice."""
        none = torch.empty(0, dtype=torch.long, device=alpha.device)
        return cls(alpha, none, none, none[None], alpha.new_zeros(1))

    def __len__(self) -> int:
        return len(self.log_weights)

    @property
    def weights(self) -> Tensor:
        """``(T,)``, of sum one."""
        return self.log_weights.exp()

    @property
    def latent(self) -> bool:
        """Whether components differ in the labels of the nodes."""
        return self.shown.dim() == 2

    def drawn(self, size: int) -> Tensor:
        """``(size,)`` components, drawn by their weight."""
        if len(self) == 1:
            return torch.zeros(size, dtype=torch.long, device=self.nodes.device)
        sums = self.log_weights.double().exp().cumsum(0)
        places = torch.rand(size, dtype=torch.double, device=self.nodes.device) * sums[-1]
        # To the right: a component of weight zero ends where it begins.
        return torch.searchsorted(sums, places, right=True).clamp(max=len(sums) - 1)

    def resampled(self, size: int) -> Components:
        """So many components of equal weight, drawn by their weight."""
        some, equal = self.drawn(size), self.log_weights.new_zeros(size)
        labels, shown = (of_components(each, some) for each in (self.labels, self.shown))
        return Components(self.alpha, self.nodes, labels, self.choices[some], equal, shown)

    def probs(self) -> Tensor:
        """``(n, C)``: the weight of every label of the observed nodes."""
        if not self.latent:
            return one_hot(self.shown, self.alpha.shape[-1]).to(self.alpha)
        probs = self.alpha.new_zeros(self.alpha.shape[-1], len(self.nodes))
        return probs.scatter_add_(0, self.shown, self.weights[:, None].expand_as(self.shown)).T

    def concentrations(self, nodes: Tensor, part: slice = slice(None)) -> Tensor:
        r"""
        ``(T, K, C)``: :math:`\alpha_j + s_j` of nodes ``(K,)``, of all components or a part.
        Cost: :math:`O(T (n \log K + K C))`.
        """
        places, num_classes = Places(nodes), self.alpha.shape[-1]
        place, found = places.find(self.choices[part])
        counts = self.alpha.new_zeros(len(place), len(places.keys) * num_classes)
        index = place * num_classes + of_components(self.labels, part)
        counts.scatter_add_(1, index, found.to(counts.dtype))
        return self.alpha[nodes] + counts.unflatten(1, (-1, num_classes))[:, places.place]

    def mean(self) -> Tensor:
        r"""
        ``(N, C)``: the weighted mean of :math:`(\alpha_j + s_j) / (A_j + S_j)`. Cost:
        :math:`O(T n \log(T n) + N C)`.
        """
        size, num_classes = self.alpha.shape
        # In double precision: the weight of components that did not choose a node is a difference.
        weights, total = self.log_weights.double().exp(), self.alpha.sum(-1).double()
        chosen, changed = torch.zeros_like(total), torch.zeros_like(total)
        added = torch.zeros_like(self.alpha, dtype=torch.double).flatten()
        for part in blocks(len(weights), 4 * len(self.nodes)):
            choices, weight = self.choices[part], weights[part]
            component = torch.arange(len(weight), device=choices.device)[:, None]
            key, place, count = (component * size + choices).unique(
                return_inverse=True, return_counts=True
            )
            node, own = key % size, weight[key.div(size, rounding_mode="floor")]
            share = own / (total[node] + count)
            chosen.index_add_(0, node, own)
            changed.index_add_(0, node, share)
            index = choices * num_classes + of_components(self.labels, part)
            added.index_add_(0, index.flatten(), share[place].flatten())
        scale = (weights.sum() - chosen).clamp(min=0) / total + changed
        return added.view_as(self.alpha).addcmul_(self.alpha, scale[:, None]).to(self.alpha.dtype)


def of_components(labels: Tensor, part: slice | Tensor) -> Tensor:
    """Labels of some components; those that all components share, ``(n,)``, as they are."""
    return labels[part] if labels.dim() == 2 else labels
