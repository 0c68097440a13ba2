# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Pyro's provenance across kernels. A result without it biases ``TraceGraph_ELBO`` silently."""

from typing import Any

from pyro.ops.provenance import extract_provenance


def untracked(*values: Any) -> tuple[tuple[Any, ...], frozenset]:
    """
    Values without their provenance, and its union for ``track_provenance`` of the result. Tracking
    is slow, and custom autograd functions lose the gradient of a tracked tensor.
    """
    return extract_provenance(values)  # type: ignore[return-value]
