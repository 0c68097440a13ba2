# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Pyro's provenance across kernels. A result without it biases ``TraceGraph_ELBO`` silently."""

from typing import Any

from pyro.ops.provenance import extract_provenance


def untracked(*values: Any) -> tuple[tuple[Any, ...], frozenset]:
    """Values without their provenance, and its union for ``track_provenance`` of the result."""
    # Custom autograd functions lose the gradient of a tracked tensor. One by one, because Pyro
    # flattens and rebuilds a tuple, which takes six times as long.
    parts, sites = zip(*map(extract_provenance, values), strict=True)
    return parts, frozenset().union(*sites)


def posterior_values(*values: Any) -> tuple[Any, ...]:
    """Values of a posterior, which keeps no provenance: those that have any are refused."""
    plain, sites = untracked(*values)
    if sites:
        names = ", ".join(sorted(map(str, sites)))
        raise ValueError(
            f"a posterior loses track of the sites that its values depend on, here {names}, and "
            f"TraceGraph_ELBO would be biased, and render_model lack edges: use Trace_ELBO, or "
            f"sample the labels as a site"
        )
    return plain
