# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Values computed once: attributes of objects that do not change, and a loop's last answer."""

import functools
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

R = TypeVar("R")


def derived(function: Callable[[Any], R]) -> functools.cached_property[R]:
    """A ``cached_property`` computed with gradients and outside of inference mode."""

    @functools.wraps(function)
    def compute(self: Any) -> R:
        with torch.inference_mode(False), torch.enable_grad():
            return function(self)

    return functools.cached_property(compute)


class LastCall:
    """The last answer to a question that a training loop asks at every step. Questions are the same
    if they are about the same unchanged tensors, held weakly, and equal other values. Nothing is
    kept in inference mode, whose tensors have no version counter. Threads may share an object.
    """

    def __init__(self) -> None:
        self._entry: tuple[tuple, Any] | None = None

    def get(self, question: tuple, compute: Callable[[], Any]) -> Any:
        entry = self._entry  # one look: another thread may put another entry there
        if entry and len(entry[0]) == len(question) and all(map(_matches, entry[0], question)):
            return entry[1]
        answer = compute()
        self.put(question, answer)
        return answer

    def put(self, question: tuple, answer: Any) -> None:
        """Keep an answer that was computed elsewhere."""
        tensors = [value for value in question if isinstance(value, Tensor)]
        if not torch.is_inference_mode_enabled() and not any(t.is_inference() for t in tensors):
            self._entry = tuple(map(_key, question)), answer

    def __reduce__(self) -> tuple:
        return LastCall, ()


def _key(value: Any) -> tuple:
    return (weakref.ref(value), value._version) if isinstance(value, Tensor) else (value,)


def _matches(key: tuple, value: Any) -> bool:
    if isinstance(value, Tensor):
        known = len(key) == 2 and key[0]() is value
        return known and not value.is_inference() and key[1] == value._version
    return len(key) == 1 and key[0] == value
