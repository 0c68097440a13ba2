# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
A Potts field of one coupling on top of marginals, with the known labels clamped, by loopy belief
propagation: what dependence of the simplest kind adds to a calibrated classifier.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F
from torch_geometric.data import Data
from torch_geometric.utils import scatter

from benchmarks.on_top.rivals import by_likelihood
from pyro_nmm import Neighborhood


class Potts:
    """
    :param Tensor probs: ``(N, C)`` of every node by itself.
    """

    def __init__(self, hood: Neighborhood, probs: Tensor, y: Tensor, known: Tensor) -> None:
        edges = hood.source != hood.target
        self.source, self.target = hood.source[edges], hood.target[edges]
        self.logits = probs.clamp(min=1e-6).log()
        size = hood.num_nodes
        key, back = self.source * size + self.target, self.target * size + self.source
        order = key.argsort()
        self.back = order[torch.searchsorted(key[order], back)]
        sure = F.one_hot(y.where(known, 0), probs.shape[1]).bool()
        self.clamped, self.known = torch.where(sure, 0.0, -30.0), known[:, None]

    def messages(self, log_scale: Tensor, coupling: Tensor, steps: int = 20):
        """Logarithms of what nodes believe, and of the messages along edges."""
        own = (self.logits * log_scale.exp()).log_softmax(-1)
        own = torch.where(self.known, self.clamped, own)
        gain, sent = F.softplus(coupling).expm1(), own.new_zeros(len(self.source), own.shape[1])
        for step in range(steps):
            believed = own + scatter(sent, self.target, dim_size=len(own))
            new = (gain * (believed[self.source] - sent[self.back]).softmax(-1)).log1p()
            new = new.log_softmax(-1)
            sent = new if step < 5 else (sent + new) / 2
        return own + scatter(sent, self.target, dim_size=len(own)), sent

    def marginals(self, log_scale: Tensor, coupling: Tensor) -> Tensor:
        return self.messages(log_scale, coupling)[0].softmax(-1)


def potts(data: Data, hood: Neighborhood, probs: Tensor, known: Tensor, held: Tensor) -> Tensor:
    """The temperature and the coupling by the held-out nodes."""
    field = Potts(hood, probs, data.y, known)
    return by_likelihood(field.marginals, [0.0, -1.0], data.y, held, steps=30)[0]
