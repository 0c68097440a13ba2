# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import torch
from torch import Tensor, nn

from pyro_nmm import Neighborhood


class FreeNMM(nn.Module):
    r"""
    An NMM whose ``alpha`` and attention are parameters themselves, one set for one graph: the
    paper's NMM-:math:`\alpha, L`, for approximating a distribution without amortization.

    .. math::

        \alpha_j = \exp(a_j), \qquad \text{logits}_{ij} \text{ free}

    It starts near given marginals :math:`m`, with
    :math:`\alpha_j = \kappa \, ((1 - \epsilon) m_j + \epsilon / C)` and
    :math:`\text{logits}_{ij} = \gamma \, \delta(i = j)`.

    >>> hood = Neighborhood.grid(3, 3)
    >>> network = FreeNMM(hood, num_classes=2)
    >>> alpha, logits = network(hood)
    >>> alpha.shape, logits.shape
    (torch.Size([9, 2]), torch.Size([49]))

    :param Neighborhood hood: The neighbourhoods.
    :param int num_classes: ``C``.
    :param Tensor marginals: ``(N, C)``, :math:`m`, for example of a mean field. Default uniform.
    :param float kappa: :math:`\kappa`.
    :param float gamma: :math:`\gamma`; as it grows, nodes become independent.
    :param float epsilon: :math:`\epsilon`: labels that the marginals rule out could not return.
    """

    def __init__(
        self,
        hood: Neighborhood,
        num_classes: int,
        marginals: Tensor | None = None,
        *,
        kappa: float = 4.0,
        gamma: float = 2.0,
        epsilon: float = 0.02,
    ) -> None:
        super().__init__()
        shape = hood.num_nodes, num_classes
        if marginals is None:
            marginals = torch.full(shape, 1 / num_classes, device=hood.device)
        if marginals.shape != shape:
            raise ValueError(
                f"marginals must have shape {shape}, one row of probabilities per node, got "
                f"{tuple(marginals.shape)}"
            )
        start = kappa * ((1 - epsilon) * marginals.detach() + epsilon / num_classes)
        self.log_alpha = nn.Parameter(start.log())
        self.logits = nn.Parameter(gamma * (hood.source == hood.target).to(start))

    def forward(self, hood: Neighborhood, *inputs) -> tuple[Tensor, Tensor]:
        """``alpha`` of shape ``(N, C)`` and ``logits`` of shape ``(num_edges,)``."""
        return self.log_alpha.exp(), self.logits
