# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""What all distributions share: batches without copies, messages, and no traces."""

import torch
from pyro.distributions.torch_distribution import TorchDistribution
from torch import Size, Tensor

from pyro_nmm.arguments import expect
from pyro_nmm.provenance import untracked


def flatten(value: Tensor, batch_shape: Size, event_dim: int = 1) -> Tensor:
    """``value`` with one batch dimension, of size one if the whole ``batch_shape`` shares it."""
    batch = value.dim() - event_dim
    event = value.shape[batch:]
    # Size(): a tensor that tracks provenance has a plain tuple for its shape.
    if Size(value.shape[:batch]).numel() == 1:
        return value.reshape(1, *event)
    # Stated, not -1: of no elements torch cannot tell how many rows there are.
    return value.expand(*batch_shape, *event).reshape(Size(batch_shape).numel(), *event)


class GraphDistribution(TorchDistribution):
    """Distributions whose parameters keep their batch shape: :meth:`expand` copies nothing."""

    arg_constraints: dict = {}  # checked in the constructors, with messages that name the fix
    shown: tuple[str, ...] = ()  # attributes that repr states: sizes and settings

    def __init__(
        self, batch_shape: Size, event_shape: Size, *, validate_args: bool | None = None
    ) -> None:
        if torch.jit.is_tracing():
            raise NotImplementedError(
                f"{type(self).__name__} cannot be traced by torch.jit, because draws depend on the "
                f"data: use TraceGraph_ELBO instead of JitTraceGraph_ELBO"
            )
        super().__init__(batch_shape, event_shape, validate_args=validate_args)

    def __repr__(self) -> str:
        stated = [f"{name}={getattr(self, name)}" for name in self.shown]
        if self.batch_shape:
            stated.append(f"batch_shape={tuple(self.batch_shape)}")
        return f"{type(self).__name__}({', '.join(stated)})"

    def _plain(self, value: Tensor) -> tuple[Tensor, frozenset]:
        """A validated value and its provenance."""
        (value,), provenance = untracked(value)
        if self._validate_args:
            self._validate_sample(value)
        return value, provenance

    def _labels(self, value: Tensor) -> Tensor:
        """Integers of any type, or whole numbers, as ``torch.long``, as ``Categorical`` does."""
        expect("value", value)
        # Before the comparisons, which wrap around for small types.
        value = value if value.is_floating_point() else value.long()
        if self._validate_args:
            # Torch cannot check a value without elements: zeros of its event shape replace it.
            shape = *(max(1, size) for size in value.shape[:-1]), *value.shape[-1:]
            self._validate_sample(value if value.numel() else value.new_zeros(shape))
        return value.long()

    def enumerate_support(self, expand: bool = True) -> Tensor:
        raise NotImplementedError(
            f"{type(self).__name__} has too many values to enumerate in Pyro: use TraceGraph_ELBO, "
            f"or NeighborMixture.log_prob and condition for exact sums of small graphs"
        )

    def expand(self, batch_shape, _instance=None):
        new = self._get_checked_instance(type(self), _instance)
        new.__dict__.update(self.__dict__)
        new._batch_shape = torch.broadcast_shapes(Size(batch_shape), self.batch_shape)
        if new._batch_shape != Size(batch_shape):
            raise ValueError(f"cannot expand batch_shape {self.batch_shape} to {batch_shape}")
        return new
