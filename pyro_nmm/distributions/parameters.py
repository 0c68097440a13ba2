# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The parameters of a Neighbor Mixture as one value, which is checked when it is made."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Size, Tensor

from pyro_nmm.arguments import expect
from pyro_nmm.caching import derived
from pyro_nmm.model_arguments import (
    check_all_rows,
    check_alpha,
    check_hood,
    check_label_range,
    check_labels,
    check_logits,
    check_scores,
    in_single,
)
from pyro_nmm.neighborhood import Neighborhood
from pyro_nmm.relabel import KEEP, Channel, check_relabel


@dataclass(frozen=True, eq=False)
class Parameters:
    """Parameters of the rows of ``hood``. :meth:`of` checks them, and other code trusts them."""

    hood: Neighborhood
    alpha: Tensor  #: ``(..., N, C)``
    logits: Tensor  #: ``(..., hood.num_edges)``
    channel: Channel = KEEP  #: what the edges of ``hood`` make of labels

    @classmethod
    def of(
        cls, hood: Neighborhood, alpha: Tensor, logits: Tensor, relabel: Any = None
    ) -> "Parameters":
        """Checked parameters of a whole graph."""
        check_hood(hood)
        what, size = "source" if hood.bipartite else "node", hood.num_sources
        shape, note = ("...", size, ("C", 2)), f"one row per {what} and C >= 2 labels"
        alpha = in_single(expect("alpha", alpha, shape, kind="float", like=hood, note=note))
        logits = check_logits(hood, logits)
        if alpha.dtype != logits.dtype:
            both = f"{alpha.dtype} and {logits.dtype}"
            raise ValueError(f"alpha and logits must have the same dtype, got {both}")
        check_all_rows(hood)
        return cls(hood, alpha, logits, check_relabel(hood, relabel, alpha.shape[-1]))

    def check_values(self) -> None:
        """Refuse bad values. Follows ``validate_args``, because it reads the data."""
        check_alpha(self.alpha)
        check_scores(self.hood, self.logits)
        self.channel.check_values()

    @property
    def num_classes(self) -> int:
        return self.alpha.shape[-1]

    @property
    def batch_shape(self) -> Size:
        batches = self.alpha.shape[:-2], self.logits.shape[:-1], self.channel.batch_shape
        return torch.broadcast_shapes(*batches)

    @derived
    def attention(self) -> Tensor:
        r"""``(..., num_edges)``: :math:`L_{ij}`."""
        return self.hood.softmax(self.logits)

    @derived
    def plain(self) -> "Parameters":
        """Without gradients."""
        parts = self.alpha.detach(), self.logits.detach(), self.channel.detach()
        return Parameters(self.hood, *parts)

    def of_rows(self, rows: Neighborhood) -> "Parameters":
        """The parameters of some rows, whose edges are numbered as in ``hood``."""
        if rows is self.hood:
            return self
        logits = self.logits.index_select(-1, rows.edge)
        return Parameters(rows, self.alpha, logits, self.channel.of(rows.edge))

    def evidence(self, y: Tensor, observed: Tensor | None = None) -> Tensor:
        r"""``(..., num_edges, C)``: :math:`\log p(y_i \mid u_i)` of labels ``(..., N)``."""
        y = check_labels(self.hood, y, self.hood.num_nodes)
        rows = self.hood.restrict(observed)
        check_label_range(rows, y.index_select(-1, rows.nodes), self.num_classes)
        y = y if observed is None else y.where(observed, 0)
        return self.channel.evidence(self.hood, y)
