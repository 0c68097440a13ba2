# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from pyro_nmm import Neighborhood
from pyro_nmm.blocks import row_blocks
from pyro_nmm.edges import check_mask
from pyro_nmm.models.stacked.walk import Walk
from pyro_nmm.validation import check_all_rows

#: Normal priors of the pool's numbers: mean and standard deviation. Fitted to nearly all labels of
#: 36 splits of three graphs (`benchmarks.on_top.run priors`), of which two are reported on
#: other splits; docs/results/on-top.md shows priors from other graphs.
PRIOR = {
    "log_scale": (-0.9, 0.7),
    "neighbors": (0.8, 0.4),
    "labels": (0.3, 0.4),
    "agreement": (-0.2, 0.3),
    "offsets": (0.0, 0.7),
}
#: A walk goes on with this probability, for so many steps at most.
GO_ON, STEPS = 0.9, 20
#: So much of a known label's weight is spread over all of them, where few are in reach.
SHRINK = 0.01
#: Agreement with neighbours at which the scores count as the scale says.
USUAL = 0.75


class PooledScores(nn.Module):
    r"""
    What a classifier says of a node, what it says of the node's neighbours, and which labels are
    known around, as one distribution over the node's labels: a logarithmic pool [1] of ``4 + C``
    numbers.

    .. math::

        P_i &= \mathrm{softmax}\left( \big( s + \eta \, (A_i - \tfrac{3}{4}) \big) \frac{x_i}{t}
               + a \, m_i + \lambda \, \ell_i + b \right) \\
        A_i &= \sum_k p_{ik} \frac{1}{|n(i)|} \sum_{j \in n(i)} p_{jk}, \qquad
               p_i = \mathrm{softmax} \frac{x_i}{t} \\
        m_i &= \log \Big( \frac{1}{|n(i)|} \sum_{j \in n(i)} p_j + 10^{-3} \Big) \\
        \ell_{ik} &= \log \frac{R_{ik} + \tau \pi_k}{\sum_l R_{il} + \tau} - \log \pi_k, \qquad
        R = (1 - g) \sum_{r=0}^{19} g^r W^r Y + g^{20} W^{20} Y

    of scores :math:`x`, ``(N, C)``, and their temperature :math:`t`, where a step of the walk
    :math:`W` goes to any of :math:`n(i)` (in proportion to edge weights, if there are any),
    :math:`Y` has a one for the label of every node where it is known and zeros elsewhere,
    :math:`\pi` is the share of each label, :math:`g = .9` and :math:`\tau = .01`. The third term is
    what label propagation [2] says of a label above its share; where no label is known it is zero.
    :math:`A_i` is how far a node and its neighbours agree: the scores of a graph network are surer
    there than they should be, and :math:`\eta < 0` makes them less so, as temperatures of every
    node do [4]. With :math:`s = 1` and :math:`a = \lambda = \eta = 0` this is temperature scaling
    with a bias [3], and without the offsets :math:`b` temperature scaling.

    >>> hood = Neighborhood(torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]]), num_nodes=3)
    >>> pool, scores = PooledScores(2), torch.zeros(3, 2)
    >>> known = torch.tensor([True, False, False])
    >>> terms = pool.terms(hood, scores, torch.tensor([1, -1, -1]), known)
    >>> terms.shape
    torch.Size([4, 3, 2])
    >>> probs = pool(terms)[:, 1]  # the nearer to the known label, the likelier
    >>> bool((probs[:-1] > probs[1:]).all())
    True

    [1] Christian Genest, James V. Zidek (1986) "Combining Probability Distributions: A Critique and
    an Annotated Bibliography", Statistical Science 1, https://doi.org/10.1214/ss/1177013825.

    [2] Dengyong Zhou et al. (2003) "Learning with Local and Global Consistency", NeurIPS.

    [3] Amr Alexandari, Anshul Kundaje, Avanti Shrikumar (2020) "Maximum Likelihood with
    Bias-Corrected Calibration is Hard-To-Beat at Label Shift Adaptation", ICML.

    [4] Hans Hao-Hsun Hsu, Yuesong Shen, Christian Tomani, Daniel Cremers (2022) "What Makes Graph
    Neural Networks Miscalibrated?", NeurIPS.

    :param int num_classes: ``C``.
    """

    temperature: Tensor  #: :math:`t`, not among the numbers: that of temperature scaling
    log_scale: Tensor  #: :math:`\log s`
    neighbors: Tensor  #: :math:`a`
    labels: Tensor  #: :math:`\lambda`
    agreement: Tensor  #: :math:`\eta`
    offsets: Tensor  #: ``(C,)``: :math:`b`

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.register_buffer("temperature", torch.ones(()))
        for name, (mean, _) in PRIOR.items():
            size = (num_classes,) if name == "offsets" else ()
            self.register_parameter(name, nn.Parameter(torch.full(size, mean)))

    def forward(self, terms: Tensor) -> Tensor:
        """
        :param Tensor terms: ``(4, N, C)``, of :meth:`terms`.
        :return: ``(N, C)``: :math:`P`.
        """
        numbers = [self.log_scale.exp(), self.neighbors, self.labels, self.agreement]
        weights = torch.stack(numbers).to(terms)
        return (torch.tensordot(weights, terms, 1) + self.offsets.to(terms)).softmax(-1)

    def extra_repr(self) -> str:
        numbers = {"scale": self.log_scale.exp(), "neighbors": self.neighbors}
        numbers |= {"labels": self.labels, "agreement": self.agreement}
        numbers |= {"temperature": self.temperature}
        return ", ".join(f"{name}={number.item():.4g}" for name, number in numbers.items())

    @torch.no_grad()
    def terms(
        self,
        hood: Neighborhood,
        scores: Tensor,
        y: Tensor,
        known: Tensor,
        edge_weight: Tensor | None = None,
    ) -> Tensor:
        """
        :math:`x / t`, :math:`m`, :math:`\\ell` and :math:`(A - \\tfrac{3}{4}) \\, x / t`.

        :param Neighborhood hood: all rows; sources that are no nodes have no part in it.
        :param Tensor scores: ``(N, C)`` logits.
        :param Tensor y: ``(N,)`` labels, read where known.
        :param Tensor known: ``(N,)`` boolean mask, which may select nothing.
        :param Tensor edge_weight: ``(num_edges,)`` weights of the walk's steps, default all alike.
        :return: ``(4, N, C)``. Cost: :math:`O(E C)`, 21 times.
        :raises ValueError: for a part of the rows, and for a mask that is not boolean.
        """
        around = self.surroundings(hood, scores, y, known, edge_weight)
        found = scores.new_empty(4, *scores.shape)
        for rows in row_blocks(around.walk.ptr, 1):
            found[:, rows] = around.terms(rows)
        return found

    @torch.no_grad()
    def surroundings(
        self,
        hood: Neighborhood,
        scores: Tensor,
        y: Tensor,
        known: Tensor,
        edge_weight: Tensor | None = None,
    ) -> Surroundings:
        """What :meth:`terms` are made of, for some rows at a time; the parameters are the same."""
        check_all_rows(hood)
        check_mask(known, hood.num_nodes, hood.device, "known", empty=True)
        walk, temperature = Walk.of(hood, edge_weight), self.temperature
        labels = propagated(walk, y, known, scores)
        return Surroundings(walk, scores, temperature, (scores / temperature).softmax(-1), labels)


class Surroundings(NamedTuple):
    """What a pool knows of the nodes and of those around."""

    walk: Walk
    scores: Tensor  #: ``(N, C)``
    temperature: Tensor
    probs: Tensor  #: ``(N, C)``: :math:`p`
    labels: Tensor  #: ``(N, C)``: :math:`\ell`

    def terms(self, rows: slice) -> Tensor:
        """``(4, R, C)``, of the given rows. Cost: :math:`O(E_R C)`."""
        scaled, nearby = self.scores[rows] / self.temperature, self.walk.step(rows, self.probs)
        agree = (self.probs[rows] * nearby).sum(-1, keepdim=True) - USUAL
        return torch.stack([scaled, (nearby + 1e-3).log(), self.labels[rows], agree * scaled])


def propagated(walk: Walk, y: Tensor, known: Tensor, like: Tensor) -> Tensor:
    r"""``(N, C)``: :math:`\ell`, what the known labels around a node say above their shares."""
    labels, num_classes = torch.zeros_like(like), like.shape[1]
    labels[known] = one_hot(y[known], num_classes).to(labels)
    share = (labels.sum(0) + 1) / (labels.sum() + num_classes)
    reached = labels
    for _ in range(STEPS):
        reached = GO_ON * (walk @ reached) + (1 - GO_ON) * labels
    total = reached.sum(-1, keepdim=True)
    return ((reached + SHRINK * share) / (total + SHRINK)).log() - share.log()
