# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Labels predicted one after the other, each given those before."""

import torch
from torch import Tensor

from pyro_nmm import compiled
from pyro_nmm.distributions.components import Components
from pyro_nmm.neighborhood import Neighborhood, compact
from pyro_nmm.ops.counts import Places


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
    weights = components.weights
    return compiled.predict(rows, attention, alpha, weights, uniforms, counts)


def _count(counts: Tensor, component: Tensor, place: Tensor, label: Tensor) -> None:
    num_components, size = counts.shape[1:]
    first = (place * num_components + component) * size
    index = torch.cat([first + label, first + size - 1])
    counts.view(-1).index_add_(0, index, torch.ones_like(index, dtype=counts.dtype))
