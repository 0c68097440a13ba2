# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Batch dimensions on the left, flattened to the one that the algorithms see."""

from __future__ import annotations

import torch
from pyro.distributions.torch_distribution import TorchDistribution
from torch import Size, Tensor


def flatten(value: Tensor, batch_shape: Size, event_dim: int = 1) -> Tensor:
    """
    ``value``, broadcast to ``batch_shape``, with one batch dimension: of size one where
    the whole batch shares it, so that shared work is done once.
    """
    batch = value.dim() - event_dim
    event = value.shape[batch:]
    # Size(): a tensor that tracks provenance has a plain tuple for its shape.
    if Size(value.shape[:batch]).numel() == 1:
        return value.reshape(1, *event)
    return value.expand(*batch_shape, *event).reshape(-1, *event)


class GraphDistribution(TorchDistribution):
    """
    What the distributions here share: parameters keep their own batch shape and are
    broadcast when used, so that :meth:`expand` copies nothing and shared work stays shared.
    """

    arg_constraints: dict = {}  # checked in the constructors, with messages that name the fix

    def expand(self, batch_shape, _instance=None):
        new = self._get_checked_instance(type(self), _instance)
        new.__dict__.update(self.__dict__)
        new._batch_shape = torch.broadcast_shapes(Size(batch_shape), self.batch_shape)
        if new._batch_shape != Size(batch_shape):
            raise ValueError(f"cannot expand batch_shape {self.batch_shape} to {batch_shape}")
        return new
