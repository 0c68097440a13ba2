# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""One matrix for the labels of neighbours: counted, or learned by edges that relabel."""

from typing import Any

import torch
from torch import Tensor, nn

from pyro_nmm import Neighborhood
from pyro_nmm.arguments import as_set, as_tensor, check_integers, check_positive, expect, expect_all
from pyro_nmm.graph_arguments import check_hood
from pyro_nmm.models.networks import Parameters


def between_nodes(hood: Neighborhood, matrix: Tensor) -> Tensor:
    """``(num_edges, C, C)``: a matrix ``(C, C)`` for edges between two nodes, else the identity."""
    _check_nodes(hood)
    keep = torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
    return torch.stack([keep, matrix]).index_select(0, (hood.source != hood.target).long())


def _check_nodes(hood: Neighborhood) -> None:
    check_hood(hood)
    if hood.bipartite:
        raise ValueError("hood has sources that are no nodes: give relabel for every edge instead")


def compatibility(
    hood: Neighborhood, y: Tensor, observed: Tensor, num_classes: int, strength: float = 1.0
) -> Tensor:
    r"""
    Frequency of label :math:`k` among neighbours of nodes with label :math:`u`, from the edges
    between observed nodes: the compatibility matrix of Zhu et al. (2021, "Graph Neural Networks
    with Heterophily", AAAI), as :class:`StackedNMM` takes it.

    .. math::

        H_{uk} = \frac{n_{uk} + \text{strength} \cdot p_k}{n_u + \text{strength}} ,

    where :math:`n_{uk}` counts edges from label :math:`u` to label :math:`k`, and :math:`p_k` is
    the share of label :math:`k` among the observed nodes, with one count more for every label.

    >>> edges = torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]])  # labels 0 - 1 - 0
    >>> hood, y = Neighborhood(edges, num_nodes=3), torch.tensor([0, 1, 0])
    >>> compatibility(hood, y, torch.ones(3, dtype=torch.bool), num_classes=2)
    tensor([[0.2000, 0.8000],
            [0.8667, 0.1333]])

    :param Tensor y: ``(N,)`` labels, read where ``observed``, a mask ``(N,)`` or node ids.
    :param float strength: weight of the prior for every label, in edges; positive.
    :return: ``(C, C)``, rows sum to one. Cost: :math:`O(E)`.
    """
    _check_nodes(hood)
    check_positive(strength=strength)
    check_integers(2, num_classes=num_classes)
    observed = as_set(observed, hood.num_nodes, hood.device, "observed")
    y, shape = as_tensor("y", y, hood.device, masked=-1), (hood.num_nodes,)
    y = expect("y", y, shape, kind="labels", like=hood, note="one label per node").long()
    good = ~observed | (y >= 0) & (y < num_classes)
    expect_all("y", y, good, f"hold labels 0..{num_classes - 1} where observed")
    both = observed[hood.source] & observed[hood.target] & (hood.source != hood.target)
    source, target = hood.source[both], hood.target[both]
    counts = torch.bincount(y[source] * num_classes + y[target], minlength=num_classes**2)
    counts = counts.view(num_classes, num_classes).to(torch.get_default_dtype())
    share = torch.bincount(y[observed], minlength=num_classes) + 1.0
    prior = strength * share / share.sum()
    return (counts + prior) / (counts.sum(1, keepdim=True) + strength)


class Compatibility(nn.Module):
    r"""
    A network whose edges relabel, for heterophilous graphs: a label that a node borrows from
    another one passes through one learned stochastic matrix ``(C, C)``.

    .. math::

        T_{ij} = \mathrm{softmax}(W) \; (i \ne j), \qquad T_{ii} = I

    >>> from pyro_nmm.models import FreeNMM
    >>> hood = Neighborhood.grid(1, 3)
    >>> network = Compatibility(FreeNMM(hood, num_classes=2), num_classes=2)
    >>> alpha, logits, relabel = network(hood)
    >>> relabel.shape
    torch.Size([7, 2, 2])

    :param nn.Module network: a :class:`~pyro_nmm.models.ParameterNetwork` whose edges keep labels.
    """

    def __init__(self, network: nn.Module, num_classes: int) -> None:
        super().__init__()
        check_integers(2, num_classes=num_classes)
        self.network = network
        #: ``(C, C)``: :math:`W`, from a neighbour's label. Fits from the identity would stay there.
        self.scores = nn.Parameter(torch.zeros(num_classes, num_classes))

    def forward(self, hood: Neighborhood, *inputs: Any) -> Parameters:
        """``alpha`` and ``logits`` of the network, and ``relabel``, ``(num_edges, C, C)``."""
        _check_nodes(hood)
        alpha, logits = self.network(hood, *inputs)
        return Parameters(alpha, logits, between_nodes(hood, self.scores.softmax(-1)))
