# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""What a joint distribution of labels can be asked and marginals cannot: of a ``Posterior``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pyro_nmm.blocks import blocks
from pyro_nmm.edges import as_mask
from pyro_nmm.neighborhood import Neighborhood
from pyro_nmm.ops.label_draws import draw_from_urns
from pyro_nmm.ops.sampling import pick
from pyro_nmm.validation import check_integers, check_nodes


def draws(posterior: Any, number: int, nodes: Tensor) -> Tensor:
    """``(number, K)``: joint draws of the labels of some nodes; see :meth:`Posterior.sample`."""
    p, seen = posterior, posterior.observed[nodes]
    component = p.components.drawn(number)
    rows, known = p.hood.take(nodes[~seen]), p.components.labels_of(component)
    known, channel = known.expand(number, -1), p.channel.of(rows.edge)
    value = known.new_empty(number, len(nodes))
    value[:, seen] = p.shown_by(component)[..., p.place[nodes[seen]]]
    attention = rows.softmax(p.logits.index_select(0, rows.edge))[None]
    for part in blocks(number if rows.num_rows else 0, 4 * rows.num_edges):
        old = p.components.choices[component[part]]
        uniforms = attention.new_empty(len(old), rows.num_rows, dtype=torch.double).uniform_()
        new = rows.source[pick(rows, attention, uniforms)]
        choices = torch.cat([old, new], 1)
        labels = draw_from_urns(p.components.alpha, choices, known[part])[:, len(p.nodes) :]
        value[part, ~seen] = channel.draw(rows, new, labels)
    return value


def counts(posterior: Any, sets: Sequence[Tensor], label: int, num_samples: int = 1000) -> Tensor:
    """Draws of how many nodes of each set have a label; see :meth:`Posterior.counts`."""
    check_integers(0, label=label)
    check_integers(1, num_samples=num_samples)
    if label >= posterior.num_classes:
        raise ValueError(f"label must lie in 0..{posterior.num_classes - 1}, got {label}")
    hood = posterior.hood
    if isinstance(sets, Tensor) and sets.dim() == 1:
        raise ValueError("sets must be a sequence of sets of nodes: give [nodes] for a single one")
    members = torch.stack([as_mask(nodes, hood.num_nodes, hood.device) for nodes in sets])
    union = members.any(0).nonzero()[:, 0]
    # Products of zeros and ones are exact in single precision, and linear in all members.
    inside = members[:, union].T.float().to_sparse()
    found = []
    for part in blocks(num_samples, 4 * len(union)):
        number = len(range(num_samples)[part])
        hits = (posterior.sample((number,), union) == label).float()
        found.append(torch.sparse.mm(inside.T, hits.T).T.round().long())
    return torch.cat(found)


def information_gain(posterior: Any, nodes: Tensor) -> Tensor:
    """What asking for a node's label tells; see :meth:`Posterior.information_gain`."""
    check_nodes(posterior.hood, nodes)
    probs = posterior.marginals()
    own = torch.special.entr(probs).sum(-1)
    pairs = sharing(posterior.hood, nodes)
    # A pair of which one label is known tells nothing. With evidence alone, no label is known.
    if not posterior.latent:
        pairs = pairs[:, ~posterior.observed[pairs].any(0)]
    mutual = own.new_zeros(pairs.shape[1])
    for part in blocks(pairs.shape[1], posterior.num_classes**2):
        table = posterior.pairwise(pairs[:, part])
        joint = torch.special.entr(table).sum((-1, -2))
        alone = torch.special.entr(table.sum(-1)) + torch.special.entr(table.sum(-2))
        mutual[part] = (alone.sum(-1) - joint).clamp(min=0)
    return own.scatter_add(0, pairs[0], mutual)[nodes]


def sharing(hood: Neighborhood, nodes: Tensor) -> Tensor:
    """``(2, P)``: each of some nodes with every other node that shares a source with it."""
    order = hood.source.argsort(stable=True)
    degree = hood.source.bincount(minlength=hood.num_sources)
    first = degree.cumsum(0) - degree
    rows = hood.take(nodes)
    number = degree[rows.source]
    start = (first[rows.source] - number.cumsum(0) + number).repeat_interleave(number)
    place = start + torch.arange(len(start), device=start.device)
    pairs = torch.stack([rows.target.repeat_interleave(number), hood.target[order[place]]])
    return pairs[:, pairs[0] != pairs[1]].unique(dim=1)
