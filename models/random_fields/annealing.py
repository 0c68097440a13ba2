# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The normalizer of a field of any width, by annealed importance sampling."""

import math
from itertools import pairwise

import torch
from torch import Tensor

from pyro_nmm.arguments import as_tensor, check_integers, expect, expect_all
from pyro_nmm.models.random_fields.pairwise import PairwiseMRF, check_field


@torch.no_grad()
def annealed_log_normalizer(
    field: PairwiseMRF, start: Tensor, num_steps: int = 1000, num_chains: int = 16
) -> tuple[Tensor, Tensor]:
    r"""
    An estimate of :math:`\log Z` of a Markov random field of any width, and its standard error, in
    nats: annealed importance sampling (Neal 2001, Statistics and Computing).

    .. math::

        \hat Z = \frac1M \sum_m \prod_t
            \left( \frac{p^*(y_t^{(m)})}{q(y_t^{(m)})} \right)^{\beta_t - \beta_{t - 1}},
        \qquad y_t \sim \text{a Gibbs sweep of } q^{1 - \beta_t} (p^*)^{\beta_t}

    :math:`E[\hat Z] = Z`, so :math:`\log \hat Z` is too low on average. Cost: :math:`O(M K
    (P C + N C^2))` a step, with ``K`` colours of the graph.

    >>> from pyro_nmm.models import grid_edges, ising
    >>> field = ising(grid_edges(3, 3), coupling=0.3, field=torch.zeros(9))
    >>> estimate, error = annealed_log_normalizer(field, torch.full((9, 2), 0.5), 100, 256)
    >>> bool((estimate - field.log_normalizer()).abs() < 4 * error)
    True

    :param Tensor start: ``(N, C)`` marginals of :math:`q`, positive, for example a mean field's.
    :param int num_steps: temperatures :math:`\beta_t`, evenly from 0 to 1, one sweep each.
    :param int num_chains: ``M``.
    """
    check_field(field)
    start = as_tensor("start", start, field.unary.device)
    expect("start", start, tuple(field.unary.shape))
    expect_all("start", start, start.isfinite() & (start >= 0), "be finite and not negative")
    check_integers(1, num_steps=num_steps)
    check_integers(2, num_chains=num_chains)
    start = start.to(field.unary)
    log_q = start.clamp(min=1e-6).log().log_softmax(-1)
    classes = torch.eye(field.num_classes, dtype=start.dtype, device=start.device)
    y = torch.distributions.Categorical(logits=log_q).sample((num_chains,))
    weights = torch.zeros(num_chains, dtype=torch.double, device=start.device)
    colors, betas = field.colors(), torch.linspace(0, 1, num_steps + 1).tolist()
    nodes = torch.arange(field.num_nodes, device=start.device)
    for before, beta in pairwise(betas):
        ratio = field._log_potential(y).double() - log_q[nodes, y].double().sum(-1)
        weights += (beta - before) * ratio
        for color in colors:
            logits = (1 - beta) * log_q + beta * field.local_logits(classes[y])
            logits = logits.index_select(1, color)
            y[:, color] = torch.distributions.Categorical(logits=logits).sample()
    log_z = weights.logsumexp(0) - math.log(num_chains)
    return log_z, (weights - log_z).exp().std() / math.sqrt(num_chains)
