# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""A classifier's scores and known labels on a graph, checked once."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from pyro_nmm import Neighborhood
from pyro_nmm.arguments import as_set, as_tensor, expect, is_kind
from pyro_nmm.labels import in_label_order
from pyro_nmm.model_arguments import check_hood, check_label_range, in_single
from pyro_nmm.neighborhood import edges_between

Part = TypeVar("Part")


@dataclass(frozen=True)
class GraphScores:
    """A classifier's scores on a graph, and the known labels. :meth:`of` checks them."""

    hood: Neighborhood
    scores: Tensor  #: ``(N, C)`` finite logits, at least in single precision
    y: Tensor  #: ``(N,)`` labels, read where known
    known: Tensor  #: ``(N,)`` mask of the labels in the pool
    evidence: Tensor  #: ``(N,)`` mask of the labels that are evidence about choices

    @classmethod
    def of(
        cls, hood: Neighborhood, scores: Any, y: Any = None, known: Any = None, new: Any = None
    ) -> "GraphScores":
        """Of tensors or arrays. Without ``y`` no label is known; ``new`` ones are evidence."""
        check_hood(hood)
        if hood.bipartite:
            cure = "take Neighborhood(edge_index, num_nodes), whose sources are nodes"
            raise ValueError(f"hood has sources that are no nodes: {cure}")
        scores = as_scores(scores, hood.num_nodes, hood.device)
        none = torch.zeros(hood.num_nodes, dtype=torch.bool, device=hood.device)
        if y is None or known is None:
            return cls(hood, scores, none.long(), none, none)
        y = as_tensor("y", y, hood.device, masked=-1)
        if y.dim() == 2 and y.shape[1] == 1:  # as OGB has labels
            y = y[:, 0]
        note = "one label per node"
        y = expect("y", y, (hood.num_nodes,), kind="labels", like=hood, note=note).long()
        known = as_set(known, hood.num_nodes, hood.device, "known", empty=True)
        if new is not None:
            known, none = disjoint_masks(hood, known=known, new=new)
        if (every := known | none).any():
            rows = hood.restrict(every)
            cure = "count labels from 0, and leave unlabelled nodes out of train, held_out, known"
            check_label_range(rows, y[rows.nodes], scores.shape[1], "scores have", cure)
        return cls(hood, scores, y, known, none)


def as_scores(scores: Any, num_nodes: int | None, device: torch.device | None = None) -> Tensor:
    """``(N, C)`` finite logits."""
    scores = as_tensor("scores", in_label_order(scores), device)
    note = "one row of logits per node and C >= 2 labels"
    expect("scores", scores, ("N" if num_nodes is None else num_nodes, ("C", 2)), note=note)
    scores = scores.to(torch.get_default_dtype()) if is_kind(scores, "integers") else scores
    if not scores.is_floating_point() or not scores.isfinite().all():
        raise ValueError(
            f"scores must be finite floating-point logits, got {int((~scores.isfinite()).sum())} "
            f"entries that are not finite, of {scores.dtype}: for log(0), clamp probabilities"
        )
    return in_single(scores)


def disjoint_masks(hood: Neighborhood, **sets: Any) -> tuple[Tensor, Tensor]:
    """Masks of two disjoint sets of nodes. The first may be empty."""
    check_hood(hood)
    first, second = (
        as_set(nodes, hood.num_nodes, hood.device, name, empty=place == 0)
        for place, (name, nodes) in enumerate(sets.items())
    )
    if (first & second).any():
        raise ValueError(
            f"{' and '.join(sets)} must be disjoint, because a classifier is overconfident where "
            f"it was trained, but both hold node {int((first & second).nonzero()[0])}"
        )
    return first, second


def side_by_side(parts: Sequence[Part]) -> Part:
    """The disjoint union of graphs with tables of nodes."""
    from torch_geometric.utils import cumsum

    fields = {name: [getattr(part, name) for part in parts] for name in vars(parts[0])}
    hoods = fields.pop("hood")
    first = cumsum(torch.tensor([hood.num_nodes for hood in hoods])).tolist()
    nodes, source = (
        torch.cat([getattr(hood, name) + n for hood, n in zip(hoods, first, strict=False)])
        for name in ("nodes", "source")
    )
    ptr = cumsum(torch.cat([hood.ptr.diff() for hood in hoods]))
    tables = {k: torch.cat(each, -2 if each[0].dim() > 1 else 0) for k, each in fields.items()}
    kind: Any = type(parts[0])
    return kind(hood=Neighborhood.of_rows(first[-1], nodes, ptr, source), **tables)


def warn_user(scores: Tensor, hood: Neighborhood) -> None:
    """Warn of probabilities, and of a graph of which nodes read half of their neighbours."""
    if (scores >= 0).all() and ((scores.sum(-1) - 1).abs() < 1e-3).all():
        cure = "Give logits, for example scores.clamp(min=1e-6).log()"
        warnings.warn(f"scores look like probabilities: each row sums to one. {cure}", stacklevel=5)
    edges = (hood.source != hood.target).nonzero()[:, 0]
    some = edges[:: max(1, len(edges) // 1000)]
    if len(some) and (edges_between(hood, hood.target[some], hood.source[some]) < 0).all():
        cure = "if edges have no direction, pass torch_geometric.utils.to_undirected(edge_index)"
        warnings.warn(f"hood has each edge in one direction only: {cure}", stacklevel=5)
