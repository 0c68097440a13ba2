# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Marginals of a StackedNMM on graphs whose edges fit into memory once only."""

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from pyro_nmm import Neighborhood
from pyro_nmm.blocks import row_blocks
from pyro_nmm.graph_arguments import check_all_rows
from pyro_nmm.models.stacked.inputs import GraphScores
from pyro_nmm.models.stacked.module import StackedNMM
from pyro_nmm.models.stacked.pooled import terms_in_blocks
from pyro_nmm.ops.marginals import node_marginals
from pyro_nmm.relabel import as_channel


@torch.no_grad()
def marginals_in_blocks(
    stacked: StackedNMM, hood: Neighborhood, scores: Tensor, y: Tensor, known: Tensor, *,
    edge_weight: Tensor | None = None,
    progress: Callable[[list[slice]], Iterable[slice]] = iter,
) -> Iterator[tuple[slice, Tensor]]:  # fmt: skip
    r"""
    Marginals of ``stacked.posterior(..., num_draws=0)``, one block of nodes after the other, for
    graphs whose edges fit into memory once but not several times. ``scores`` and the arrays of
    ``hood`` may be memory-mapped files, and the blocks may be written to one.

    >>> hood = Neighborhood(torch.tensor([[0, 1, 1, 2, 2, 3], [1, 0, 2, 1, 3, 2]]), num_nodes=4)
    >>> scores = torch.tensor([[3.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 3.0]])
    >>> y, known = torch.tensor([0, 0, 1, 1]), torch.tensor([True, False, False, True])
    >>> stacked, train = StackedNMM(num_classes=2), torch.tensor([0])
    >>> stacked = stacked.fit(hood, scores, y, train, held_out=torch.tensor([1, 2]), num_steps=20)
    >>> probs = torch.zeros(4, 2)
    >>> for nodes, block in marginals_in_blocks(stacked, hood, scores, y, known):
    ...     probs[nodes] = block
    >>> probs.argmax(-1)
    tensor([0, 0, 1, 1])

    Cost: :math:`O(E C)` time, 22 times; memory for ``hood``, for five tables ``(N, C)``, the scores
    among them, and for one block of :math:`2^{24}` numbers.

    :param StackedNMM stacked: with a pool. Other parameters as for
        :meth:`~pyro_nmm.models.StackedNMM.forward`.
    :param progress: wraps the list of blocks, for example ``tqdm``.
    :return: slices of nodes, and their marginals, ``(size of the slice, C)``.
    :raises ValueError: for ``pool=False``, because its posterior needs draws.
    """
    check_all_rows(hood)
    data = stacked.formula.graph_scores(hood, scores, y, known, edge_weight)
    if stacked.pool is None:
        raise ValueError("stacked has pool=False, whose posterior needs draws: use posterior()")
    stacked.check_fitted()
    probs, temperature = torch.empty_like(data.scores), stacked.pool.temperature
    for rows, terms in terms_in_blocks(data, temperature, probs.shape[1]):
        probs[rows] = stacked.pool(terms)
    return _blocks(stacked, data, probs, progress)


@torch.no_grad()
def _blocks(stacked: StackedNMM, data: GraphScores, probs: Tensor, progress: Callable):
    hood, formula, num_classes = data.hood, stacked.formula, probs.shape[1]
    share, temperature = float(stacked.share), stacked.pool.temperature
    alpha, probs = formula.concentrations(hood, probs)
    for rows in progress(list(row_blocks(hood.ptr, num_classes))):
        near = hood.take(torch.arange(rows.start, rows.stop, device=hood.device))
        weight = None if data.edge_weight is None else data.edge_weight[near.edge]
        logits, *relabel = formula.attention(near, probs, weight)
        found = node_marginals(near, alpha, near.softmax(logits), *map(as_channel, relabel))
        if share < 1:
            found = share * found + (1 - share) * (data.scores[rows] / temperature).softmax(-1)
        labels, known = data.y[rows], data.known[rows]
        found[known] = one_hot(labels[known], num_classes).to(found)
        yield rows, found
