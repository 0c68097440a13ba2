# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

r"""Importance-weighted and sequential Monte Carlo estimates of :math:`\log p(y)`.

The mean weight :math:`\prod_i e^{f_i}` of ``P`` draws of :math:`q(c \mid y)`, the particles, is an
unbiased estimate of :math:`p(y)`. Over many nodes a few particles come to hold all the weight.
Sequential Monte Carlo resamples particles of uneven weights between stages of the order,
systematically [2]; the estimate stays unbiased [1].

[1] Pierre Del Moral, Arnaud Doucet, Ajay Jasra (2006) "Sequential Monte Carlo Samplers", Journal of
the Royal Statistical Society B 68, https://doi.org/10.1111/j.1467-9868.2006.00553.x.
[2] Genshiro Kitagawa (1996) "Monte Carlo Filter and Smoother for Non-Gaussian Nonlinear State Space
Models", Journal of Computational and Graphical Statistics 5,
https://doi.org/10.1080/10618600.1996.10474692.
"""

import math
from collections.abc import Callable, Sequence

import torch
from pyro.ops.provenance import track_provenance
from torch import Tensor

from pyro_nmm.arguments import check_integers, check_mask
from pyro_nmm.graph_arguments import order_to_rows
from pyro_nmm.neighborhood import Neighborhood
from pyro_nmm.ops.stages import Counts, Stages

#: Nodes of a stage, and on a GPU, to which the hundred calls of each stage are much.
STAGE, STAGE_OF_A_GPU = 64, 1024


def stage_size(device: torch.device) -> int:
    return STAGE if device.type == "cpu" else STAGE_OF_A_GPU


def estimate_log_likelihood(
    hood: Neighborhood, make: Callable[[Neighborhood], Stages], observed: Tensor | None,
    given: Tensor | None, num_particles: int, num_stages: int | None, order: Tensor | None,
) -> Tensor:  # fmt: skip
    """:meth:`NeighborMixture.log_likelihood` in double; ``make`` gives the stages of rows."""
    check_integers(1, num_particles=num_particles)
    if num_stages is not None:
        check_integers(1, num_stages=num_stages)
    if given is not None:
        check_mask(given, hood.num_nodes, hood.device, "given")
    if observed is None:
        everything = torch.ones(hood.num_nodes, dtype=torch.bool, device=hood.device)
        observed = everything if given is None else ~given
    check_mask(observed, hood.num_nodes, hood.device)
    if given is not None and (observed & given).any():
        node = (observed & given).nonzero()[0].item()
        raise ValueError(f"observed and given must be disjoint, but both hold node {node}")
    if order is not None:
        order_to_rows(hood, order)

    def arranged(mask: Tensor) -> Tensor:
        nodes = torch.randperm(hood.num_nodes, device=mask.device) if order is None else order
        return nodes[mask[nodes]]

    size = stage_size(hood.device)
    earlier = [] if given is None else list(arranged(given).split(size))
    nodes = arranged(observed)
    num_stages = min(num_stages or math.ceil(len(nodes) / size), len(nodes))
    stages = [*earlier, *nodes.tensor_split(num_stages)]
    draws = make(hood.take(torch.cat(stages)))
    increments = sequential_monte_carlo(draws, [len(stage) for stage in stages], num_particles)
    return increments[len(earlier) :].sum()


@torch.no_grad()
def sequential_monte_carlo(
    draws: Stages, sizes: Sequence[int], num_particles: int, threshold: float = 0.5,
    counts: Counts | None = None,
) -> Tensor:  # fmt: skip
    r"""
    .. math::

        \log \hat p(y_t \mid y_{<t}) = \log \sum_p \bar w_{t-1}^{(p)}
            \prod_{i \in t} e^{f_i^{(p)}}

    for stages ``t`` of ``sizes`` nodes and normalised weights :math:`\bar w` of the particles
    ``p``, in double. By conjugacy a particle is its counts :math:`s`. Resampling exchanges the
    choices since the common ancestor, about ``P`` stages. It copies all counts until particles with
    ``counts`` have a common ancestor, about as long. Cost: :math:`O(P E)` time and memory.

    :param float threshold: Resample if the effective number of particles
        :math:`1 / \sum_p \bar w_p^2` falls below this share of ``P``; 0 never does.
    :param tuple counts: the particles' choices of other nodes, default none.
    """
    ancestors = torch.arange(num_particles if counts else 1, device=draws.rows.device)
    counts = counts or draws.no_counts(num_particles)
    even = torch.full((num_particles,), -math.log(num_particles), dtype=torch.double)
    log_weights = even = even.to(draws.rows.device)
    increments, recent, last = [], [], 0
    for size in sizes:
        first, last = last, last + size
        numbers, terms = draws.draw(counts, first, last, num_particles)
        weighted = log_weights + terms().double().sum(-1)
        increments.append(weighted.logsumexp(0))
        log_weights = weighted - increments[-1]
        draws.add(counts, numbers)
        recent.append(numbers)
        if (2 * log_weights).logsumexp(0) > -math.log(max(threshold * num_particles, 1)):
            parents = _systematic(log_weights)
            if len(ancestors.unique()) > 1:  # particles differ in the given counts too
                counts, ancestors = tuple(table[parents] for table in counts), ancestors[parents]
                recent = [torch.cat(recent, 1)[parents]]
            else:
                recent = [_exchange(draws, counts, torch.cat(recent, 1), parents)]
            log_weights = even
    return track_provenance(torch.stack(increments), draws.provenance)


def _exchange(draws: Stages, counts: Counts, numbers: Tensor, parents: Tensor) -> Tensor:
    """Copy the parents' recent choices; return them from the first that still differs."""
    copied = numbers.index_select(0, parents)
    draws.add(counts, numbers, -1)
    draws.add(counts, copied)
    differs = (copied != copied[:1]).any(0).nonzero()
    return copied[:, int(differs[0]) if len(differs) else copied.shape[1] :]


def _systematic(log_weights: Tensor) -> Tensor:
    """``(P,)`` parents: equally spaced places, jointly shifted, on the cumulative weight."""
    size = len(log_weights)
    shift = torch.rand((), dtype=torch.double, device=log_weights.device)
    places = (torch.arange(size, device=log_weights.device) + shift) / size
    return torch.searchsorted(log_weights.exp().cumsum(0), places).clamp(max=size - 1)
