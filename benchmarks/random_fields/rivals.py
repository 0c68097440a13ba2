# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
What fields_compared.py sets beside the NMM on grids: mean fields of chains, and two estimates of
log Z by message passing. Those that draw pixels one by one are in fields_ordered.py.

1. L. K. Saul and M. I. Jordan, Exploiting tractable substructures in intractable networks, NIPS
   1995: the structured mean field.
2. J. S. Yedidia, W. T. Freeman and Y. Weiss, Constructing free-energy approximations and
   generalized belief propagation algorithms, IEEE Transactions on Information Theory 51, 2005.
3. M. J. Wainwright, T. S. Jaakkola and A. S. Willsky, A new class of upper bounds on the log
   partition function, IEEE Transactions on Information Theory 51, 2005.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import minimum_spanning_tree
from torch import Tensor

from pyro_nmm.models import PairwiseMRF, grid_edges


class Chains(NamedTuple):
    """Marginals ``(N, C)``, and E[log q - log p*] of each start ``(S,)``, sorted."""

    marginals: Tensor
    losses: Tensor


class Messages(NamedTuple):
    """An estimate of log Z, marginals ``(N, C)``, and the last change of any message."""

    log_z: float
    marginals: Tensor
    change: float


def grid_tables(field: PairwiseMRF, height: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Unary terms ``(H, W, C)``, and strengths across ``(H, W - 1)`` and down ``(H - 1, W)``."""
    if not torch.equal(field.edges, grid_edges(height, width)):
        raise ValueError(f"field must have the edges of a grid of {height} x {width}")
    strength = field.strength.expand(field.num_edges).double()
    across, down = strength.split([height * (width - 1), (height - 1) * width])
    unary = field.unary.double().view(height, width, -1)
    return unary, across.view(height, width - 1), down.view(height - 1, width)


def chain_marginals(unary: Tensor, pairwise: Tensor) -> tuple[Tensor, Tensor]:
    """
    Forward and backward sums over chains, exact.

    :param Tensor unary: ``(..., L, C)``.
    :param Tensor pairwise: ``(..., L - 1, C, C)``, the earlier label first.
    :return: marginals ``(..., L, C)`` and log Z ``(...)``.
    """
    length = unary.shape[-2]
    forward, backward = [unary[..., 0, :]], [torch.zeros_like(unary[..., 0, :])]
    for n in range(1, length):
        step = (forward[-1].unsqueeze(-1) + pairwise[..., n - 1, :, :]).logsumexp(-2)
        forward.append(step + unary[..., n, :])
        ahead = (backward[-1] + unary[..., length - n, :]).unsqueeze(-2)
        backward.append((ahead + pairwise[..., length - n - 1, :, :]).logsumexp(-1))
    beliefs = torch.stack(forward, -2) + torch.stack(backward[::-1], -2)
    return beliefs.softmax(-1), forward[-1].logsumexp(-1)


@torch.no_grad()
def chain_mean_field(
    field: PairwiseMRF,
    shape: tuple[int, int],
    starts: Tensor | None = None,
    *,
    down: bool = False,
    num_random: int = 4,
    num_sweeps: int = 2000,
    tolerance: float = 1e-8,
) -> Chains:
    r"""
    The structured mean field [1] whose parts are the grid's rows, each an exact chain:

    .. math::

        q(y) = \prod_r q_r(y_r), \qquad
        q_r(y_r) \propto \exp \Big( \sum_{i \in r} \big( u_i + \sum_{j \notin r} w_{ij} \phi \,
        q_j \big)(y_i) + \sum_{(i, j) \in r} w_{ij} \phi(y_i, y_j) \Big)

    Rows without an edge between them, every other one, are updated at once: coordinate ascent. Its
    starts are those of :func:`~pyro_nmm.guides.mean_field`: evidence, interactions that rise
    slowly, every label everywhere, random fields, and the caller's.

    :param starts: ``(S, N, C)`` further starts, probabilities of the pixels.
    :param down: columns are the parts, instead of rows.
    :return: marginals of the best start, and losses of all. Cost: :math:`O(S P C^2)` a sweep.
    """
    unary, along, between = grid_tables(field, *shape)
    if down:
        unary, along, between = unary.transpose(0, 1), between.T, along.T
    rows, length, classes = unary.shape
    phi = field.interaction.double()
    tables = along[..., None, None] * phi
    parts = [torch.arange(first, rows, 2) for first in range(min(rows, 2))]

    def outside(q: Tensor, share: float = 1.0) -> Tensor:
        """What rows above and below add to the fields of each."""
        message, sent = q @ phi, torch.zeros_like(q)
        sent[:, 1:] += share * between.unsqueeze(-1) * message[:, :-1]
        sent[:, :-1] += share * between.unsqueeze(-1) * message[:, 1:]
        return sent

    def sweep(q: Tensor, share: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
        """New marginals, the fields from outside that gave them, and every row's log Z."""
        q, used, log_z = q.clone(), torch.zeros_like(q), q.new_zeros(q.shape[:2])
        for part in parts:
            used[:, part] = outside(q, share)[:, part]
            found = chain_marginals(unary[part] + used[:, part], share * tables[part])
            q[:, part], log_z[:, part] = found
        return q, used, log_z

    one = torch.eye(classes, dtype=unary.dtype)[:, None, None].expand(-1, rows, length, -1)
    noise = torch.randn(num_random, rows, length, classes, dtype=unary.dtype)
    annealed = unary.softmax(-1)[None]
    q = torch.cat([annealed, one, (4 * noise).softmax(-1)])
    for share in torch.linspace(0, 1, 101).tolist():
        annealed = sweep(annealed, share)[0]
    q = torch.cat([q, annealed])
    if starts is not None:
        given = starts.double().view(len(starts), *shape, classes)
        q = torch.cat([q, given.transpose(1, 2) if down else given])
    for _ in range(num_sweeps):
        before, (q, used, log_z) = q, sweep(q)
        if (q - before).abs().max() < tolerance:
            break
    # E[log q] has the fields that gave each row, E[log p*] those of the rows as they are now.
    own = (q * used).sum((-2, -1)) - log_z
    losses = own.sum(-1) - (q * outside(q)).sum((-3, -2, -1)) / 2
    best = q[losses.argmin()]
    best = best.transpose(0, 1) if down else best
    return Chains(best.reshape(-1, classes), losses.sort().values)


def resistances(edges: Tensor, num_nodes: int) -> Tensor:
    """
    ``(P,)``: how often each edge is in a spanning tree that is drawn uniformly, its resistance
    between its ends if all edges are resistors of one ohm (Kirchhoff's theorem).
    """
    laplacian = torch.zeros(num_nodes, num_nodes, dtype=torch.double)
    first, second = edges
    for here, there in (edges, edges.flip(0)):
        laplacian.index_put_((here, there), -torch.ones(len(here)).double(), accumulate=True)
        laplacian.index_put_((here, here), torch.ones(len(here)).double(), accumulate=True)
    inverse = torch.linalg.pinv(laplacian, hermitian=True)
    return inverse[first, first] + inverse[second, second] - 2 * inverse[first, second]


def spanning_tree(edges: Tensor, weight: Tensor, num_nodes: int) -> Tensor:
    """``(P,)``: ones on the spanning tree of the largest sum of weights, zeros elsewhere."""
    cost = 1 + weight.max() - weight  # positive, for a zero would be no edge
    shape = num_nodes, num_nodes
    tree = minimum_spanning_tree(coo_matrix((cost.numpy(), edges.numpy()), shape=shape)).tocoo()
    inside = torch.tensor(tree.row * num_nodes + tree.col)
    return torch.isin(edges[0] * num_nodes + edges[1], inside).double()


@torch.no_grad()
def propagate(
    field: PairwiseMRF,
    appearance: Tensor | float = 1.0,
    start: Tensor | None = None,
    *,
    damping: float = 0.5,
    num_iterations: int = 5000,
    tolerance: float = 1e-10,
) -> tuple[Messages, Tensor, Tensor]:
    r"""
    Belief propagation whose edges appear with probabilities :math:`\rho`: tree-reweighted [3], and
    plain loopy belief propagation if they are one. In logarithms, with :math:`\theta_t` the unary
    and :math:`\theta_{st}` the pair terms [3],

    .. math::

        M_{ts}(x_s) = \log \sum_{x_t} \exp \Big( \frac{\theta_{st}(x_s, x_t)}{\rho_{st}} +
        \theta_t(x_t) + \sum_{v} \rho_{vt} M_{vt}(x_t) - M_{st}(x_t) \Big)

    and at a fixed point, with pseudo-marginals :math:`\tau` and mutual information :math:`I`,

    .. math::

        \log Z \approx \langle \tau, \theta \rangle + \sum_s H(\tau_s) - \sum_{st} \rho_{st}
        I(\tau_{st}) .

    For :math:`\rho` of spanning trees it is an upper bound [3]; for :math:`\rho = 1` it
    is the Bethe approximation [2], exact on trees.

    :param start: ``(2 P, C)`` messages along ``edges``, then against them. Default: zeros.
    :return: the estimate, mutual information of the edges, and messages to go on from.
    """
    (first, second), phi = field.edges, field.interaction.double()
    unary, strength = field.unary.double(), field.strength.expand(field.num_edges).double()
    rho = torch.as_tensor(appearance, dtype=torch.double).expand(field.num_edges)
    tables = (strength / rho)[:, None, None] * phi  # symmetric, so both directions have the same
    tail, head = torch.cat([first, second]), torch.cat([second, first])
    both, twice = torch.cat([tables, tables]), torch.cat([rho, rho]).unsqueeze(-1)
    messages = unary.new_zeros(len(tail), unary.shape[1]) if start is None else start

    def beliefs(messages: Tensor) -> Tensor:
        return unary.index_add(0, head, twice * messages)

    def before(messages: Tensor) -> Tensor:
        """What is known at every edge's tail, without its head's message."""
        return beliefs(messages)[tail] - messages.roll(len(first), 0)

    change = torch.inf
    for _ in range(num_iterations):
        new = (both + before(messages).unsqueeze(-1)).logsumexp(-2)
        new = damping * messages + (1 - damping) * (new - new.logsumexp(-1, keepdim=True))
        change, messages = (new - messages).abs().max().item(), new
        if change < tolerance:
            break
    single = beliefs(messages).log_softmax(-1)
    known = before(messages)
    pair = tables + known[: len(first)].unsqueeze(-1) + known[len(first) :].unsqueeze(-2)
    pair = pair.flatten(1).log_softmax(-1).view_as(tables)
    # A pair's own marginals, so that its information is never negative before convergence.
    apart = pair.logsumexp(-1, keepdim=True) + pair.logsumexp(-2, keepdim=True)
    information = (pair.exp() * (pair - apart)).sum((-2, -1))
    energy = (single.exp() * unary).sum() + (pair.exp() * strength[:, None, None] * phi).sum()
    entropy = torch.special.entr(single.exp()).sum() - (rho * information).sum()
    return Messages((energy + entropy).item(), single.exp(), change), information, messages


def bethe(field: PairwiseMRF) -> Messages:
    """
    The Bethe approximation of log Z [2]: the largest, which is that of the lowest free energy,
    among the fixed points that loopy belief propagation reaches from no messages and from
    messages of one label everywhere; and of those that converge, if any does.
    """
    one = 5 * torch.eye(field.num_classes, dtype=torch.double)
    starts = [None, *(row.expand(2 * field.num_edges, -1) for row in one)]
    found = [propagate(field, start=start)[0] for start in starts]
    return max(found, key=lambda each: (each.change < 1e-6, each.log_z))


def tree_reweighted(field: PairwiseMRF, num_updates: int = 20) -> Messages:
    """
    The tree-reweighted upper bound on log Z [3]. Appearances begin as those of a uniformly drawn
    spanning tree and go by conditional gradients, which lower the bound, towards the tree that
    has the most mutual information [3].
    """
    rho = resistances(field.edges, field.num_nodes)
    best, information, messages = propagate(field, rho)
    for step in range(num_updates):
        tree = spanning_tree(field.edges, information, field.num_nodes)
        new = rho + (tree - rho) / (step + 3)
        found, information_there, there = propagate(field, new, messages)
        rho, information, messages = new, information_there, there
        best = min(best, found, key=lambda each: (each.change > 1e-6, each.log_z))
    return best
