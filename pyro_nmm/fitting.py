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
from torch.nn.parameter import is_lazy
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
        for each in (*value.parameters(), *value.buffers()):
            if is_lazy(each) or each.is_inference():
                torch.utils.swap_tensors(each, copy.deepcopy(each))
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
