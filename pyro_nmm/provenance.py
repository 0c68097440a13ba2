# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
Pyro's provenance, which says on which samples a tensor depends, across our kernels.

``TraceGraph_ELBO`` charges a sample with the costs whose tensors carry its name. A function that
takes tracked tensors and returns untracked ones biases the gradient without an error.
"""

from typing import Any

from pyro.ops.provenance import extract_provenance


def untracked(*values: Any) -> tuple[tuple[Any, ...], frozenset]:
    """
    Values without their provenance, and its union for ``track_provenance`` of the result. Tracking
    one operation takes longer than most operations here, and custom autograd functions lose the
    gradient of a tracked tensor.
    """
    return extract_provenance(values)  # type: ignore[return-value]
