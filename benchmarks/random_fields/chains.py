# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
The structured mean field of L. K. Saul and M. I. Jordan, Exploiting tractable substructures in
intractable networks, NIPS 1995, whose parts are the rows of a grid.
"""

import torch
from torch import Tensor

from pyro_nmm.models import PairwiseMRF


def transposed(field: PairwiseMRF, shape: tuple[int, int]) -> PairwiseMRF:
    """The field of the transposed grid, whose rows are the columns."""
    pixels = torch.arange(field.num_nodes).view(shape).T.flatten()
    edges = pixels.argsort()[field.edges]
    return PairwiseMRF(edges, field.unary[pixels], field.strength, field.interaction)


@torch.enable_grad()
def chain_marginals(unary: Tensor, pairwise: Tensor) -> tuple[Tensor, Tensor]:
    """
    Exact marginals ``(..., L, C)`` and log Z ``(...)`` of chains.

    :param Tensor unary: ``(..., L, C)``.
    :param Tensor pairwise: ``(..., L - 1, C, C)``, the earlier label first.
    """
    unary = unary.clone().requires_grad_()
    total, *rest = unary.unbind(-2)
    for each, table in zip(rest, pairwise.unbind(-3), strict=True):
        total = (total.unsqueeze(-1) + table).logsumexp(-2) + each
    log_z = total.logsumexp(-1)
    return torch.autograd.grad(log_z.sum(), unary)[0], log_z.detach()


@torch.no_grad()
def chain_mean_field(field: PairwiseMRF, width: int, num_random: int = 4):
    """
    Marginals ``(N, C)`` and the loss E[log q - log p*] of the best product of rows, each an exact
    chain of ``width`` pixels, by coordinate ascent.

    Every other row is updated at once. The starts are those of
    :func:`~pyro_nmm.guides.mean_field`: evidence, interactions that rise slowly, every label
    everywhere, and random fields. A sweep costs :math:`O(S P C^2)`.
    """
    rows, classes, (tail, head) = field.num_nodes // width, field.num_classes, field.edges
    unary, strength = field.unary.double(), field.strength.expand(field.num_edges).double()
    phi, inside = field.interaction.double(), tail // width == head // width
    along = strength[inside][tail[inside].argsort()].view(rows, width - 1)
    tables, zeros = along[..., None, None] * phi, torch.zeros_like(unary)
    between = PairwiseMRF(field.edges[:, ~inside], zeros, strength[~inside], phi)
    unary = unary.view(rows, width, classes)

    def outside(q: Tensor) -> Tensor:
        """What the rows above and below add to the unary terms of each row."""
        return between.local_logits(q.flatten(1, 2)).view_as(q)

    def sweep(q: Tensor, share: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
        """New marginals, the terms from outside that they rest on, and log Z of every row."""
        q, used, log_z = q.clone(), torch.zeros_like(q), q.new_zeros(q.shape[:2])
        for part in (slice(first, None, 2) for first in range(min(rows, 2))):
            used[:, part] = share * outside(q)[:, part]
            found = chain_marginals(unary[part] + used[:, part], share * tables[part])
            q[:, part], log_z[:, part] = found
        return q, used, log_z

    labels = torch.eye(classes).to(unary)[:, None, None].expand(-1, rows, width, -1)
    noise = torch.randn(num_random, *unary.shape, dtype=unary.dtype)
    annealed = evidence = unary.softmax(-1)[None]
    for share in torch.linspace(0, 1, 101).tolist():
        annealed = sweep(annealed, share)[0]
    q = torch.cat([evidence, labels, (4 * noise).softmax(-1), annealed])
    for _ in range(2000):
        before, (q, used, log_z) = q, sweep(q)
        if (q - before).abs().max() < 1e-8:
            break
    # E[log q] has the terms from outside that gave each row, E[log p*] those of the last rows.
    own = (q * used).sum((-2, -1)) - log_z
    losses = own.sum(-1) - (q * outside(q)).sum((-3, -2, -1)) / 2
    best = losses.argmin()
    return q[best].flatten(0, 1), losses[best].item()
