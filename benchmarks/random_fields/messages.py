# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
Loopy belief propagation by PGMax, and two estimates of log Z: the Bethe approximation (Yedidia,
Freeman and Weiss 2005, "Constructing free-energy approximations and generalized belief propagation
algorithms") and the tree-reweighted upper bound (Wainwright, Jaakkola and Willsky 2005, "A new
class of upper bounds on the log partition function").
"""

import time
from typing import NamedTuple

import numpy as np
import torch
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import minimum_spanning_tree
from torch import Tensor

from pyro_nmm.models import PairwiseMRF


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

    change = torch.inf
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
    The Bethe approximation of log Z: the lowest free energy among the fixed points reached from no
    messages and from messages of one label everywhere; of those that converge, if any does.
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
    The tree-reweighted upper bound on log Z. Appearances begin at those of a uniformly drawn
    spanning tree; conditional gradients, which lower the bound, move them towards the tree of
    the most mutual information.
    """
    rho = resistances(field.edges, field.num_nodes)
    best = found = propagate(field, rho)
    for step in range(num_updates):
        tree = spanning_tree(field.edges, found.information, field.num_nodes)
        rho = rho + (tree - rho) / (step + 3)
        found = propagate(field, rho, found.messages)
        best = min(best, found, key=lambda each: (each.change > 1e-6, each.log_z))
    return best
