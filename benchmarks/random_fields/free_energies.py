# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
Rivals that minimise a free energy, which approximates -log Z: from above by the structured mean
field, close to it by the Bethe approximation, from below by tree-reweighted message passing.
"""

import time
from typing import NamedTuple

import numpy as np
import torch
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import minimum_spanning_tree
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
    Exact marginals ``(..., L, C)`` and log Z ``(...)`` of chains with unary terms ``(..., L, C)``
    and pairwise terms ``(..., L - 1, C, C)``, the earlier label first.
    """
    unary = unary.clone().requires_grad_()
    total, *rest = unary.unbind(-2)
    for each, table in zip(rest, pairwise.unbind(-3), strict=True):
        total = (total.unsqueeze(-1) + table).logsumexp(-2) + each
    log_z = total.logsumexp(-1)
    return torch.autograd.grad(log_z.sum(), unary)[0], log_z.detach()


@torch.no_grad()
def chain_mean_field(field: PairwiseMRF, width: int, num_random: int = 4) -> tuple[Tensor, float]:
    """
    Marginals ``(N, C)`` and the loss E[log q - log p*] of the best product of rows, each an exact
    chain of ``width`` pixels (L. K. Saul and M. I. Jordan, Exploiting tractable substructures in
    intractable networks, NIPS 1995). Every other row is updated at once, from the starts of
    :func:`~pyro_nmm.guides.mean_field`.
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


def loopy(field: PairwiseMRF) -> tuple[Tensor | None, float | None]:
    """Marginals of two labels by PGMax, and seconds; neither if PGMax is not installed."""
    try:
        from pgmax import fgraph, fgroup, infer, vgroup
    except ImportError:
        return None, None
    began = time.perf_counter()
    nodes = vgroup.NDVarArray(num_states=2, shape=(field.num_nodes,))
    graph = fgraph.FactorGraph(variable_groups=nodes)
    tables = field.strength.expand(field.num_edges)[:, None, None] * field.interaction
    pairs = {"variables_for_factors": [[nodes[i], nodes[j]] for i, j in field.edges.T.tolist()]}
    graph.add_factors(fgroup.PairwiseFactorGroup(**pairs, log_potential_matrix=tables.numpy()))
    program = infer.build_inferer(graph.bp_state, backend="bp")
    state = program.init(evidence_updates={nodes: field.unary.numpy()})
    state = program.run(state, num_iters=300, damping=0.5, temperature=1.0)
    marginals = infer.get_marginals(program.get_beliefs(state))[nodes]
    return torch.tensor(np.array(marginals)), time.perf_counter() - began


class Messages(NamedTuple):
    """A fixed point of message passing."""

    log_z: float  #: estimate of log Z
    marginals: Tensor  #: ``(N, C)``
    change: float  #: last change of any message
    information: Tensor  #: ``(P,)``, mutual information of the ends of edges
    messages: Tensor  #: ``(2 P, C)``, along ``edges``, then against them


@torch.no_grad()
def propagate(
    field: PairwiseMRF, appearance: Tensor | float = 1.0, start: Tensor | None = None
) -> Messages:
    r"""
    Tree-reweighted belief propagation, whose edges appear with probabilities :math:`\rho`. At a
    fixed point, with pseudo-marginals :math:`\tau` and mutual information :math:`I`,

    .. math::

        \log Z \approx \langle \tau, \theta \rangle + \sum_s H(\tau_s) - \sum_{st} \rho_{st}
        I(\tau_{st}) ,

    an upper bound for :math:`\rho` of spanning trees. :math:`\rho = 1` is loopy belief
    propagation, and the Bethe approximation, exact on trees.

    :param start: ``(2 P, C)`` messages. Default: zeros.
    """
    unary, phi = field.unary.double(), field.interaction.double()
    strength, count = field.strength.expand(field.num_edges).double(), field.num_edges
    rho = torch.as_tensor(appearance, dtype=torch.double).expand(count)
    tables = (strength / rho)[:, None, None] * phi  # symmetric, so both directions have the same
    tail, head = torch.cat([field.edges, field.edges.flip(0)], 1)
    both, twice = tables.repeat(2, 1, 1), rho.repeat(2).unsqueeze(-1)
    messages = unary.new_zeros(2 * count, field.num_classes) if start is None else start

    def beliefs(messages: Tensor) -> tuple[Tensor, Tensor]:
        """Of nodes, and of every edge's tail without its head's message."""
        found = unary.index_add(0, head, twice * messages)
        return found, found[tail] - messages.roll(count, 0)

    for _ in range(5000):
        new = (both + beliefs(messages)[1].unsqueeze(-1)).logsumexp(-2).log_softmax(-1)
        new = (messages + new) / 2
        change, messages = (new - messages).abs().max().item(), new
        if change < 1e-10:
            break
    single, ends = beliefs(messages)
    single = single.softmax(-1)
    pair = tables + ends[:count].unsqueeze(-1) + ends[count:].unsqueeze(-2)
    pair = pair.flatten(1).log_softmax(-1).view_as(tables)
    # With a pair's own marginals, mutual information is not negative even before convergence.
    apart = pair.logsumexp(-1, keepdim=True) + pair.logsumexp(-2, keepdim=True)
    information = (pair.exp() * (pair - apart)).sum((-2, -1))
    energy = (single * unary).sum() + (pair.exp() * strength[:, None, None] * phi).sum()
    entropy = torch.special.entr(single).sum() - (rho * information).sum()
    return Messages((energy + entropy).item(), single, change, information, messages)


def bethe(field: PairwiseMRF) -> Messages:
    """
    The Bethe approximation of log Z (Yedidia, Freeman and Weiss 2005, "Constructing free-energy
    approximations and generalized belief propagation algorithms"): the best of the fixed points
    from no messages and from messages of one label everywhere, those that converge before others.
    """
    one = 5 * torch.eye(field.num_classes, dtype=torch.double)
    starts = [None, *(row.expand(2 * field.num_edges, -1) for row in one)]
    found = [propagate(field, start=start) for start in starts]
    return max(found, key=lambda each: (each.change < 1e-6, each.log_z))


def resistances(edges: Tensor, num_nodes: int) -> Tensor:
    """
    ``(P,)``: probability that a uniformly drawn spanning tree contains an edge, which is the
    resistance between its ends if all edges are resistors of one ohm (Kirchhoff's theorem).
    """
    each = torch.eye(num_nodes, dtype=torch.double)
    ends = each[edges[0]] - each[edges[1]]
    return (ends @ torch.linalg.pinv(ends.T @ ends, hermitian=True) * ends).sum(-1)


def spanning_tree(edges: Tensor, weight: Tensor, num_nodes: int) -> Tensor:
    """``(P,)``: ones on the spanning tree of the largest sum of weights, zeros elsewhere."""
    cost = 1 + weight.max() - weight  # positive, for a zero would be no edge
    shape = num_nodes, num_nodes
    tree = minimum_spanning_tree(coo_matrix((cost.numpy(), edges.numpy()), shape=shape)).tocoo()
    inside = torch.tensor(tree.row * num_nodes + tree.col)
    return torch.isin(edges[0] * num_nodes + edges[1], inside).double()


def tree_reweighted(field: PairwiseMRF, num_updates: int = 20) -> Messages:
    """
    The tree-reweighted upper bound on log Z (Wainwright, Jaakkola and Willsky 2005, "A new class of
    upper bounds on the log partition function"). Appearances begin at those of a uniformly drawn
    spanning tree; conditional gradients, which lower the bound, move them towards the tree of
    the most mutual information.
    """
    rho = resistances(field.edges, field.num_nodes)
    found = [propagate(field, rho)]
    for step in range(num_updates):
        tree = spanning_tree(field.edges, found[-1].information, field.num_nodes)
        rho = rho + (tree - rho) / (step + 3)
        found.append(propagate(field, rho, found[-1].messages))
    return min(found, key=lambda each: (each.change > 1e-6, each.log_z))
