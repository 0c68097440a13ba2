# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Fits in any gradient mode of their caller."""

import copy
import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.distributions import Distribution
from torch_geometric.data import Data

P = ParamSpec("P")
R = TypeVar("R")


def with_gradients(fit: Callable[P, R]) -> Callable[P, R]:
    """
    A fit that switches gradients on and inference mode off. The caller's mode is as before
    afterwards. Arguments made in inference mode become :func:`ordinary`.

    >>> @with_gradients
    ... def slope(x):
    ...     return torch.autograd.grad(x.requires_grad_().square(), x)[0]
    >>> with torch.inference_mode():
    ...     slope(torch.tensor(3.0))
    tensor(6.)

    """

    @functools.wraps(fit)
    def run(*args: P.args, **options: P.kwargs) -> R:
        with torch.inference_mode(False), torch.enable_grad():
            return fit(*ordinary(args), **ordinary(options))

    return run


def ordinary(value: Any) -> Any:
    """
    A value through which gradients pass. Tensors made in inference mode are copied, in tuples,
    dictionaries, distributions and PyG's ``Data`` too. Parameters and buffers of modules stay the
    same objects, because an optimiser may hold them.
    """
    if isinstance(value, nn.Module):
        for name, each in (*value.named_parameters(), *value.named_buffers()):
            if each.data.is_inference():  # of a lazy parameter too
                _replace(each, f"{name} of {type(value).__name__}")
    elif isinstance(value, Tensor):
        return value.clone() if value.is_inference() else value
    elif isinstance(value, Data):
        return copy.copy(value).apply(ordinary)
    elif isinstance(value, Distribution):
        value = copy.copy(value)
        vars(value).update(ordinary(vars(value)))
    elif type(value) is dict:
        return {name: ordinary(each) for name, each in value.items()}
    elif isinstance(value, tuple):
        parts = map(ordinary, value)
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value


def _replace(tensor: Tensor, name: str) -> None:
    """An ordinary tensor in the same object."""
    try:
        torch.utils.swap_tensors(tensor, copy.deepcopy(tensor))
    except RuntimeError:  # of weak references, such as those of Pyro's store
        cure = "make the network outside of inference mode, or pass copy.deepcopy(network)"
        raise ValueError(
            f"{name} was made in torch.inference_mode() and used there, so it cannot learn: {cure}"
        ) from None
