# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import torch
from torch import Tensor

from pyro_nmm import Neighborhood
from pyro_nmm.edges import check_edge_index
from pyro_nmm.validation import check_all_rows


def edge_weights(hood: Neighborhood, edge_index: Tensor, edge_weight: Tensor) -> Tensor:
    r"""
    A graph's edge weights, as PyG has them, in the order of its neighbourhoods, as
    :class:`~pyro_nmm.models.StackedNMM` takes them. The weights of an edge that is listed twice
    are added; a self-loop without a weight gets the mean of those into its node, or 1 if there are
    none, so that the unit of the weights does not matter. An edge from a community gets 1.

    >>> edge_index = torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]])
    >>> hood = Neighborhood(edge_index, num_nodes=3)
    >>> edge_weights(hood, edge_index, torch.tensor([4.0, 4.0, 2.0, 2.0]))
    tensor([4., 4., 4., 3., 2., 2., 2.])

    :param Neighborhood hood: all rows.
    :param Tensor edge_index: ``(2, E)`` the edges that ``hood`` is made of.
    :param Tensor edge_weight: ``(E,)`` positive numbers.
    :return: ``(num_edges,)``. Cost: :math:`O(E \log E)`.
    :raises ValueError: for other shapes or numbers, and if the two are not the same edges.
    """
    check_all_rows(hood)
    check_edge_index(edge_index, hood.num_nodes)
    if edge_weight.shape != edge_index.shape[1:]:
        raise ValueError(
            f"edge_weight must have shape ({edge_index.shape[1]},), one weight per edge of "
            f"edge_index, got {tuple(edge_weight.shape)}"
        )
    check_weights(edge_weight)
    source, target = edge_index.long()
    place = places(hood, source, target)
    found = edge_weight.new_zeros(hood.num_edges).index_add(0, place, edge_weight)
    other = ((found == 0) & (hood.source < hood.num_nodes) & (hood.source != hood.target)).sum()
    if (hood.source[place] != source).any() or (hood.target[place] != target).any() or other:
        raise ValueError(
            "edge_index and hood must be of the same edges: give the edge_index that hood is of"
        )
    given, lone = found > 0, hood.source == hood.target
    number = hood.sum((given & ~lone).to(found))
    mean = hood.sum(found.masked_fill(lone, 0)) / number.clamp(min=1)
    fill = mean.where(number > 0, 1.0).index_select(0, hood.row)
    return found.where(given, fill.where(lone, 1.0))


def places(hood: Neighborhood, source: Tensor, target: Tensor) -> Tensor:
    """``(E,)``: the edges of a whole graph between these ends; any edge where there is none."""
    keys = hood.target * hood.num_sources + hood.source  # they ascend, as rows and sources do
    wanted = target * hood.num_sources + source
    return torch.searchsorted(keys, wanted).clamp(max=hood.num_edges - 1)


def check_weights(edge_weight: Tensor) -> None:
    good = edge_weight.is_floating_point() and bool(edge_weight.isfinite().all())
    if not good or not bool((edge_weight > 0).all()):
        raise ValueError(
            "edge_weight must be finite positive floating-point numbers: leave out the edges "
            "whose weight is zero"
        )
