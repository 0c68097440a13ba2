# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Attributes that follow from an object that does not change, computed once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def derived(function: Callable[[Any], Any]) -> functools.cached_property:
    """
    A ``cached_property`` that serves every later caller, whatever the mode of the first one: it is
    computed with gradients, and outside of inference mode, whose tensors no training step can use.
    """

    @functools.wraps(function)
    def compute(self):
        with torch.inference_mode(False), torch.enable_grad():
            return function(self)

    return functools.cached_property(compute)
