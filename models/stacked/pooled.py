# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""A logarithmic pool of a node's scores, its neighbours' scores and known labels."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot
from torch_geometric.utils import segment

from pyro_nmm import Neighborhood
from pyro_nmm.arguments import check_each_call, check_integers, expect
from pyro_nmm.blocks import row_blocks
from pyro_nmm.graph_arguments import check_all_rows, check_hood
from pyro_nmm.models.stacked.inputs import GraphScores
from pyro_nmm.models.stacked.parameters import POOL, ParameterPriors
from pyro_nmm.sparse import sparse_csr

#: Probability that the walk takes another step, and its largest number of steps.
DAMPING, STEPS = 0.9, 20
#: Weight of the labels' shares beside the known labels that a walk reaches.
SHRINKAGE = 0.01
#: Agreement at which the scores have the weight ``exp(log_scale)``.
USUAL_AGREEMENT = 0.75


class PooledScores(nn.Module):
    r"""
    Label probabilities of each node from its scores, the scores of its neighbours and the known
    labels around it: a logarithmic pool [1] with ``4 + C`` parameters.

    .. math::

        P_i &= \mathrm{softmax}\left( \big( s + \eta \, (A_i - \tfrac{3}{4}) \big) \frac{x_i}{t}
               + a \, m_i + \lambda \, \ell_i + b \right) \\
        A_i &= \sum_k p_{ik} \frac{1}{|n(i)|} \sum_{j \in n(i)} p_{jk}, \qquad
               p_i = \mathrm{softmax} \frac{x_i}{t} \\
        m_i &= \log \Big( \frac{1}{|n(i)|} \sum_{j \in n(i)} p_j + 10^{-3} \Big) \\
        \ell_{ik} &= \log \frac{R_{ik} + \tau \pi_k}{\sum_l R_{il} + \tau} - \log \pi_k, \qquad
        R = (1 - g) \sum_{r=0}^{19} g^r W^r Y + g^{20} W^{20} Y

    with scores :math:`x`, ``(N, C)``, at temperature :math:`t`. A step of the walk :math:`W` goes
    to a node of :math:`n(i)`, uniformly or in proportion to edge weights. :math:`Y` holds the known
    labels, one-hot, and zeros for other nodes. :math:`\pi` is the share of each label,
    :math:`g = .9` and :math:`\tau = .01`. :math:`\ell` is label propagation [2] relative to the
    shares, and zero if no label is known. Graph networks are overconfident where a node agrees with
    its neighbours, at large :math:`A_i`. A negative :math:`\eta` corrects that, as a temperature
    for each node does [4]. With :math:`s = 1` and :math:`a = \lambda = \eta = 0` this is
    temperature scaling with a bias [3].

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
    """

    temperature: Tensor  #: :math:`t`, set by temperature scaling and not fitted
    log_scale: Tensor  #: :math:`\log s`
    neighbors: Tensor  #: :math:`a`
    labels: Tensor  #: :math:`\lambda`
    agreement: Tensor  #: :math:`\eta`
    offsets: Tensor  #: ``(C,)``: :math:`b`

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        check_integers(2, num_classes=num_classes)
        self.register_buffer("temperature", torch.ones(()))
        for each in POOL:
            size = (num_classes,) if each.name == "offsets" else ()
            self.register_parameter(each.name, nn.Parameter(torch.zeros(size)))
        ParameterPriors(self, POOL, {}).start()

    def forward(self, terms: Tensor) -> Tensor:
        """:math:`P`, ``(N, C)``, of :meth:`terms` ``(4, N, C)``."""
        expect("terms", terms, (4, "N", len(self.offsets)), kind="float")
        check_each_call("terms", terms)
        scalars = [self.log_scale.exp(), self.neighbors, self.labels, self.agreement]
        weights = torch.stack(scalars).to(terms)
        return (torch.tensordot(weights, terms, 1) + self.offsets.to(terms)).softmax(-1)

    def extra_repr(self) -> str:
        names = "neighbors", "labels", "agreement", "temperature"
        found = {"scale": self.log_scale.exp()} | {name: getattr(self, name) for name in names}
        return ", ".join(f"{name}={value.item():.4g}" for name, value in found.items())

    def terms(
        self, hood: Neighborhood, scores: Tensor, y: Tensor, known: Tensor,
        edge_weight: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """
        ``(4, N, C)``: :math:`x / t`, :math:`m`, :math:`\\ell` and
        :math:`(A - \\tfrac{3}{4}) \\, x / t`. Arguments as for :meth:`StackedNMM.forward`. Sources
        that are no nodes are ignored. Cost: :math:`O(E C)`, 21 times.
        """
        check_hood(hood)
        return all_terms(GraphScores.of(hood, scores, y, known, edge_weight), self.temperature)


def all_terms(data: GraphScores, temperature: Tensor) -> Tensor:
    """``(4, N, C)``: :meth:`PooledScores.terms`."""
    found = data.scores.new_empty(4, *data.scores.shape)
    for rows, terms in terms_in_blocks(data, temperature, numbers_each=1):
        found[:, rows] = terms
    return found


@torch.no_grad()
def terms_in_blocks(
    data: GraphScores, temperature: Tensor, numbers_each: int
) -> Iterator[tuple[slice, Tensor]]:
    """Rows whose edges take ``numbers_each`` numbers each, and their terms ``(4, R, C)``."""
    check_all_rows(data.hood)
    probs, labels = (data.scores / temperature).softmax(-1), propagated(data)
    for rows in row_blocks(data.hood.ptr, numbers_each):
        scaled, nearby = data.scores[rows] / temperature, step(data, rows, probs)
        agreement = (probs[rows] * nearby).sum(-1, keepdim=True) - USUAL_AGREEMENT
        smooth = (nearby + 1e-3).log()
        yield rows, torch.stack([scaled, smooth, labels[rows], agreement * scaled])


def propagated(data: GraphScores) -> Tensor:
    r"""``(N, C)``: :math:`\ell`."""
    labels, num_classes = torch.zeros_like(data.scores), data.scores.shape[1]
    labels[data.known] = one_hot(data.y[data.known], num_classes).to(labels)
    share = (labels.sum(0) + 1) / (labels.sum() + num_classes)
    reached = labels
    for _ in range(STEPS):
        reached = walked(data, reached).mul_(DAMPING).add_(labels, alpha=1 - DAMPING)
    total = reached.sum(-1, keepdim=True)
    return ((reached + SHRINKAGE * share) / (total + SHRINKAGE)).log() - share.log()


def walked(data: GraphScores, values: Tensor) -> Tensor:
    """``(N, C)``: means of the values ``(N, C)`` of neighbours, uniformly or by edge weight."""
    found = torch.empty_like(values)
    for rows in row_blocks(data.hood.ptr, 1):
        found[rows] = step(data, rows, values)
    return found


def step(data: GraphScores, rows: slice, values: Tensor) -> Tensor:
    """``(R, C)``: some rows of :func:`walked`. Cost: :math:`O(E_R C)`."""
    hood = data.hood
    ptr = hood.ptr[rows.start : rows.stop + 1]
    edges = slice(int(ptr[0]), int(ptr[-1]))
    source, ptr = hood.source[edges], ptr - ptr[0]
    weight, total = values.new_ones(len(source)), ptr.diff().to(values)
    if data.edge_weight is not None:
        weight = data.edge_weight[edges].to(values)
    if hood.bipartite:  # communities are no neighbours
        weight = weight * (source < hood.num_nodes)
        source = source.clamp(max=hood.num_nodes - 1)
    if data.edge_weight is not None or hood.bipartite:
        total = segment(weight, ptr)
    steps = sparse_csr(ptr, source, weight, (len(ptr) - 1, len(values)))
    return (steps @ values).div_(total[:, None])
