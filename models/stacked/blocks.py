# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from pyro_nmm import Neighborhood
from pyro_nmm.blocks import row_blocks
from pyro_nmm.models.stacked.communities import check_hood
from pyro_nmm.models.stacked.fit import num_classes_of
from pyro_nmm.models.stacked.inputs import check_known, labels_of, mask_of, scores_of, weights_of
from pyro_nmm.models.stacked.module import StackedNMM
from pyro_nmm.models.stacked.parameters import attention, concentrations
from pyro_nmm.ops.marginals import node_marginals
from pyro_nmm.relabel import as_channel
from pyro_nmm.validation import check_all_rows


@torch.no_grad()
def marginals_in_blocks(
    stacked: StackedNMM,
    hood: Neighborhood,
    scores: Tensor,
    y: Tensor,
    known: Tensor,
    *,
    edge_weight: Tensor | None = None,
    progress: Callable[[list[slice]], Iterable[slice]] = iter,
) -> Iterator[tuple[slice, Tensor]]:
    r"""
    The marginals of a fitted :class:`~pyro_nmm.models.StackedNMM` given the known labels, a block
    of nodes after the other, for graphs whose edges fit into memory once but not several times:

    .. math::

        p(y_i = k \mid \text{known}) = \sum_{j \in n(i)} L_{ij}
            \frac{\alpha_{jk}}{\sum_l \alpha_{jl}} .

    They are those of ``stacked.posterior(...).marginals()``. Nothing is stored for each edge:
    attention is made, used and dropped with its block, of these nodes and of their neighbours.
    ``scores`` and the arrays of ``hood`` may be memory-mapped files, and so may what the blocks are
    written to.

    >>> hood = Neighborhood(torch.tensor([[0, 1, 1, 2, 2, 3], [1, 0, 2, 1, 3, 2]]), num_nodes=4)
    >>> scores = torch.tensor([[3.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 3.0]])
    >>> y, known = torch.tensor([0, 0, 1, 1]), torch.tensor([True, False, False, True])
    >>> stacked, probs = StackedNMM(num_classes=2), torch.zeros(4, 2)
    >>> for nodes, block in marginals_in_blocks(stacked, hood, scores, y, known):
    ...     probs[nodes] = block
    >>> probs.argmax(-1)
    tensor([0, 0, 1, 1])

    Cost: :math:`O(E C)` time, 22 times; memory for ``hood``, for five tables ``(N, C)``, the scores
    among them, and for one block of :math:`2^{24}` numbers.

    :param StackedNMM stacked: with a pool; without one known labels are conditioned on, by draws,
        see :meth:`~pyro_nmm.models.StackedNMM.posterior`.
    :param progress: wraps the list of blocks, for example ``tqdm``.
    :return: slices of nodes, and their marginals, ``(size of the slice, C)``. The other parameters
        are those of :meth:`~pyro_nmm.models.StackedNMM.mixture`.
    :raises ValueError: for ``pool=False``, and as :meth:`~pyro_nmm.models.StackedNMM.mixture` does.
    """
    if stacked.pool is None:
        raise ValueError("stacked has pool=False, whose posterior needs draws: use posterior()")
    check_all_rows(hood)
    check_hood(hood, stacked.communities)
    scores, edge_weight = scores_of(hood, scores), weights_of(hood, edge_weight)
    y, known = labels_of(hood, y), mask_of(hood, known, "known", empty=True)
    num_classes = num_classes_of(stacked, scores)
    check_known(hood, y, known, num_classes)
    return _blocks(stacked, hood, scores, y, known, num_classes, edge_weight, progress)


@torch.no_grad()
def _blocks(stacked, hood, scores, y, known, num_classes, edge_weight, progress):
    around = stacked.pool.surroundings(hood, scores, y, known, edge_weight)
    probs = torch.empty_like(around.probs)
    for rows in row_blocks(around.walk.ptr, num_classes):
        probs[rows] = stacked.pool(around.terms(rows))
    del around
    alpha, vectors = concentrations(stacked, hood, probs)
    for rows in progress(list(row_blocks(hood.ptr, num_classes))):
        near = hood.take(torch.arange(rows.start, rows.stop, device=hood.device))
        weight = None if edge_weight is None else edge_weight[near.edge]
        logits, *relabel = attention(stacked, near, vectors, weight)
        found = node_marginals(near, alpha, near.softmax(logits), *map(as_channel, relabel))
        labels, kept = y[rows], known[rows]
        found[kept] = one_hot(labels[kept], num_classes).to(found)
        yield rows, found
