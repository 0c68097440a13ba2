# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
A device in Python alone, for tests of placement without a GPU. A tensor on it holds a CPU tensor,
computes with it, and refuses to meet CPU tensors of more than zero dimensions, as on CUDA.

It finds tensors that were made on the wrong device. It says nothing about kernels, streams or time.
The registration is a private function of PyTorch 2.13. Tests are skipped if it is missing, and on a
machine with CUDA: PyTorch 2.11 computes gradients on one kind of device in a process.
"""

import functools
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode

from pyro_nmm.blocks import BLOCK_EACH

NAME = "simulated"
#: Operations that take tensors of two devices.
MOVES = torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default


#: What PyTorch asks the module ``torch.simulated``; draws come from the CPU's generator.
MODULE = SimpleNamespace(
    is_initialized=lambda: True,
    is_available=lambda: True,
    current_device=lambda: 0,
    device_count=lambda: 1,
    _is_in_bad_fork=lambda: False,
    manual_seed_all=lambda seed: None,
    get_amp_supported_dtype=lambda: [torch.float],
    get_rng_state=lambda device=None: torch.empty(0, dtype=torch.uint8),
    set_rng_state=lambda state, device=None: None,
)


@functools.cache
def register() -> str | None:
    """Register the device once a process; the reason if PyTorch cannot."""
    setup = getattr(backend_registration, "_setup_privateuseone_for_python_backend", None)
    if torch.cuda.is_available():
        return "tests run on CUDA"
    if setup is None:
        return "PyTorch has no _setup_privateuseone_for_python_backend, which is private"
    try:
        setup(NAME, backend_module=MODULE)
    except Exception as error:
        return f"PyTorch does not register a device in Python: {error}"
    BLOCK_EACH.add(NAME)  # so that calls are those of CUDA
    return None


class OnDevice(torch.Tensor):
    """A tensor of which PyTorch believes that it is on the device."""

    held: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, held):
        kind = {"dtype": held.dtype, "device": torch.device(NAME, 0)}
        if held.layout == torch.strided:
            kind |= {"strides": held.stride(), "storage_offset": held.storage_offset()}
        return torch.Tensor._make_wrapper_subclass(cls, held.size(), **kind)

    @property
    def layout(self):
        """The layout that is held. PyTorch itself sees a strided tensor."""
        return self.held.layout

    def __init__(self, held):
        self.held = held

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return computed(function, args, kwargs or {})

    def as_subclass(self, cls):
        """Pyro's provenance keeps the tensor itself; of its own it has a shape only."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta").as_subclass(cls)

    def tolist(self):
        return self.cpu().tolist()

    def __repr__(self):
        return f"OnDevice({self.held})"


def held_by(value, found):
    """The tensors that are held, in lists of arguments; ``found`` gets the tensors themselves."""
    if isinstance(value, torch.Tensor):
        found.append(value)
        return value.held if isinstance(value, OnDevice) else value
    if isinstance(value, (list, tuple)):
        return type(value)([held_by(part, found) for part in value])
    return value


def computed(function, args, kwargs):
    """An operation on the tensors that are held, with a result on the device that it belongs to."""
    tensors: list = []
    arguments = held_by(args, tensors)
    options = {name: held_by(value, tensors) for name, value in kwargs.items()}
    there = any(isinstance(each, OnDevice) for each in tensors)
    if there and function not in MOVES:
        for each in tensors:
            if not isinstance(each, OnDevice) and each.dim():
                shape = tuple(each.shape)
                raise RuntimeError(f"{function}: a tensor of shape {shape} is on cpu, not {NAME}")
    if function is torch.ops.aten.copy_.default:
        there = isinstance(args[0], OnDevice)
    elif kwargs.get("device") is not None:
        there = torch.device(kwargs["device"]).type == NAME
        options["device"] = torch.device("cpu")
    if "pin_memory" in options:
        options["pin_memory"] = None
    found = function(*arguments, **options)
    if function._schema.is_mutable and function._schema.name.endswith("_"):
        return args[0]
    return pytree.tree_map_only(torch.Tensor, OnDevice, found) if there else found


class Operations(TorchDispatchMode):
    """Makes tensors on the device where an operation has no tensor to tell it."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return computed(function, args, kwargs or {})


class Functions(TorchFunctionMode):
    """Numbers and lists of indices become tensors on the CPU first, and then move."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        device = kwargs.get("device")
        made = function in (torch.tensor, torch.as_tensor) and device is not None
        if made and torch.device(device).type == NAME:
            tracked = kwargs.get("requires_grad", False)
            kwargs = {name: kwargs[name] for name in kwargs if name == "dtype"}
            return function(*args, **kwargs).to(device).requires_grad_(tracked)
        if function is torch.Tensor.new_tensor and args[0].device.type == NAME:
            return torch.tensor(args[1], dtype=kwargs.get("dtype", args[0].dtype)).to(NAME)
        if function is torch.Tensor.__getitem__ and args[0].device.type == NAME:
            args = (
                args[0],
                pytree.tree_map_only(
                    list, _moved, args[1], is_leaf=lambda part: isinstance(part, list)
                ),
            )
        return function(*args, **kwargs)


def _moved(index):
    return torch.tensor(index).to(NAME)


@contextmanager
def simulated():
    """Everything inside may use the device; the backward pass stays in this thread."""
    with ExitStack() as stack:
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        stack.enter_context(Operations())
        stack.enter_context(Functions())
        yield torch.device(NAME)
