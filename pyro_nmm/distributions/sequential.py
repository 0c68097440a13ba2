# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Labels predicted one after the other, each given those before."""

from typing import NamedTuple

import torch
from torch import Tensor

from pyro_nmm import backend, blocks
from pyro_nmm.distributions.components import Components
from pyro_nmm.neighborhood import Neighborhood, compact
from pyro_nmm.ops.counts import Groups, Places, indicator
from pyro_nmm.ops.sampling import BLOCK, pick, unchanged


class _Inputs(NamedTuple):
    """Inputs of the predictions; the sources of ``rows`` are numbered ``0..M - 1``."""

    rows: Neighborhood  #: in the order of the predictions
    attention: Tensor  #: ``(rows.num_edges,)``
    alpha: Tensor  #: ``(M, C)``
    weights: Tensor  #: ``(T,)``
    uniforms: Tensor  #: ``(T, rows.num_rows)`` float64
    counts: Tensor  #: ``(M, T, C + 1)`` int32, by label and at all; predictions are added


@torch.no_grad()
def predict_in_turn(
    hood: Neighborhood, logits: Tensor, components: Components, order: Tensor, generator=None
) -> Tensor:
    r"""``(n,)``: labels of unobserved nodes in an order ``(n,)``, by the rule at the end of the
    paper's section 3.6. Node ``i`` takes the mode of :math:`p(y_i \mid y_\tau, \hat y_{<i})`, and
    each of the ``T`` components draws a choice for it, which changes the counts of later nodes.
    Cost: :math:`O(T E C)`, and memory of :math:`O(T M C)` for ``M`` neighbours.
    """
    rows, sources = compact(hood.take(order))
    attention = rows.softmax(logits.index_select(0, rows.edge))
    alpha, num_classes = components.alpha[sources], components.alpha.shape[-1]
    shape = len(components), len(order)
    uniforms = torch.rand(shape, dtype=torch.double, device=order.device, generator=generator)
    size = len(sources), len(components), num_classes + 1
    counts = torch.zeros(size, dtype=torch.int32, device=order.device)
    place, occurs = Places(sources).find(components.choices)
    labels = components.labels.expand_as(place)[occurs]
    _count(counts, occurs.nonzero()[:, 0], place[occurs], labels)
    inputs = _Inputs(rows, attention, alpha, components.weights, uniforms, counts)
    if loops := backend.loops_on(order.device):
        return loops.predict(*inputs)
    return _predict_by_sweeps(inputs)


def _count(counts: Tensor, component: Tensor, place: Tensor, label: Tensor) -> None:
    num_components, size = counts.shape[1:]
    first = (place * num_components + component) * size
    index = torch.cat([first + label, first + size - 1])
    counts.view(-1).index_add_(0, index, torch.ones_like(index, dtype=counts.dtype))


def _predict_by_sweeps(inputs: _Inputs) -> Tensor:
    """:func:`predict_in_turn` as fixed points of blocks, see :mod:`pyro_nmm.ops.sampling`."""
    rows, counts = inputs.rows, inputs.counts
    _, num_components, size = counts.shape
    component = torch.arange(num_components, device=rows.device)[:, None]
    limit = BLOCK.get(rows.device.type, rows.num_rows)
    first, parts = 0, []
    while first < rows.num_rows:
        # As many rows as a temporary has room for, and one at least.
        edges = rows.ptr[first] + blocks.NUMBERS // (num_components * size)
        last = int(torch.searchsorted(rows.ptr, edges, right=True)) - 1
        last = min(max(last, first + 1), first + limit, rows.num_rows)
        labels, places = _predict_block(inputs, torch.arange(first, last, device=rows.device))
        _count(counts, component.expand_as(places).flatten(), places.flatten(),
               labels.expand_as(places).flatten())  # fmt: skip
        parts.append(labels)
        first = last
    return torch.cat(parts)


def _predict_block(inputs: _Inputs, block: Tensor) -> tuple[Tensor, Tensor]:
    """The labels ``(n,)`` of a block of rows, and the chosen sources ``(T, n)``."""
    rows = inputs.rows.take(block)
    attention, uniforms = inputs.attention[rows.within], inputs.uniforms[:, block]
    before = inputs.counts[rows.source].permute(2, 1, 0)
    alpha = inputs.alpha[rows.source]
    above, below = alpha.T[:, None] + before[:-1], alpha.sum(-1) + before[-1]
    groups = Groups(rows.source[None], rows.num_sources)
    labels, edges = torch.full_like(block, -1), torch.full_like(uniforms, -1, dtype=torch.long)
    chosen, sweep = torch.zeros_like(below, dtype=torch.int32), 0
    while True:
        total, weight = below + groups.earlier(chosen), []
        for k in range(len(above)):
            same = groups.earlier(chosen * (labels == k)[rows.row])
            weight.append(attention * (above[k] + same) / total)
        new_labels = torch.stack([inputs.weights @ rows.sum(w) for w in weight], -1).argmax(-1)
        edge_label = new_labels[rows.row].expand(1, *chosen.shape)
        new_edges = pick(rows, torch.stack(weight).gather(0, edge_label)[0], uniforms)
        sweep += 1
        if unchanged(sweep, (new_labels, labels), (new_edges, edges)):
            return labels, rows.source[edges]
        labels, edges = new_labels, new_edges
        chosen = indicator(edges, rows.num_edges)
