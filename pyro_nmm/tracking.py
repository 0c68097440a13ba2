# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Provenance, by which Pyro knows which costs depend on which samples, across our kernels."""

from __future__ import annotations

from typing import Any

from pyro.ops.provenance import extract_provenance
from torch import Tensor


def untracked(*tensors: Tensor) -> tuple[tuple[Tensor, ...], frozenset]:
    """
    Tensors without their provenance, and its union for ``track_provenance`` of the result.
    Pyro's tracking of one operation takes longer than most operations here, and autograd
    functions of our own lose the gradient of a tracked tensor.
    """
    plain: Any
    plain, provenance = extract_provenance(tensors)
    return plain, provenance
