# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Cost without a clock: the numbers that operations of PyTorch write, and calls to a device."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Work(TorchDispatchMode):
    """
    ``total`` numbers written, and those of the ``largest`` tensor. What an operation writes into
    one of its arguments is as much as it reads from the others.
    """

    def __init__(self):
        super().__init__()
        self.total = self.largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else [result]:
            if not isinstance(value, torch.Tensor) or _is_view(function, value, args):
                continue
            in_place = [a for a in args if isinstance(a, torch.Tensor) and a is not value]
            if len(in_place) < sum(isinstance(a, torch.Tensor) for a in args):
                self.total += max((a.numel() for a in in_place), default=value.numel())
            else:
                self.total += value.numel()
                self.largest = max(self.largest, value.numel())
        return result


def _is_view(function, value, args):
    """Whether a result is a part of an argument, which is not written, or sparse."""
    if value.layout is not torch.strided:
        return True
    tensors = [a for a in args if isinstance(a, torch.Tensor) and a.layout is torch.strided]
    place = value.untyped_storage().data_ptr()
    inside = value.numel() and any(t.untyped_storage().data_ptr() == place for t in tensors)
    return inside and not function._schema.is_mutable


ATEN = torch.ops.aten
#: Operations whose result the processor needs, so that it waits for the device.
WAITS = {
    ATEN._local_scalar_dense.default,
    ATEN.bincount.default,
    ATEN.equal.default,
    ATEN.is_nonzero.default,
    ATEN.masked_select.default,
    ATEN.nonzero.default,
    ATEN._unique2.default,
    ATEN.unique_consecutive.default,
    ATEN.unique_dim.default,
}


def _tensors(values):
    return [t for t in tree_leaves(values) if isinstance(t, torch.Tensor)]


class Launches(TorchDispatchMode):
    """``calls`` to a device, but for views, and ``waits`` of the processor for it."""

    def __init__(self):
        super().__init__()
        self.calls = self.waits = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        if all(t.device.type == "cpu" for t in _tensors((args, kwargs, result))):
            return result  # work of the processor itself
        name = function._schema.name.removeprefix("aten::")
        self.calls += not (function.is_view or name in ("detach", "alias", "_unsafe_view"))
        if function in (ATEN.index.Tensor, ATEN.index_put_.default):
            waits = any(each is not None and each.dtype == torch.bool for each in args[1])
        elif function is ATEN.repeat_interleave.Tensor:
            waits = kwargs.get("output_size") is None
        elif function is ATEN._to_copy.default:
            waits = torch.device(kwargs.get("device") or "meta").type == "cpu"
        elif function is ATEN.copy_.default:
            waits = args[0].device.type == "cpu"
        else:
            waits = function in WAITS
        self.waits += waits
        return result


class Capture(Launches):
    """Refuses what a CUDA graph refuses: waits, and shapes that depend on values."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = super().__torch_dispatch__(function, types, args, kwargs)
        if self.waits:
            raise RuntimeError(f"{function} waits for the device")
        return result
