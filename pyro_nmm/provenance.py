# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
Provenance, by which Pyro knows which costs depend on which samples, across our kernels.

``TraceGraph_ELBO`` charges a sample with the costs whose tensors carry its name. A function that
takes tracked tensors and does not return tracked ones breaks that chain without a word, and
biases the gradient: samplers as much as densities.
"""

from typing import Any

from pyro.ops.provenance import extract_provenance


def untracked(*values: Any) -> tuple[tuple[Any, ...], frozenset]:
    """
    Tensors or concentrations without their provenance, and its union for ``track_provenance`` of
    the result. Pyro's tracking of one operation takes longer than most operations here, and
    autograd functions of our own lose the gradient of a tracked tensor.
    """
    plain: Any
    plain, provenance = extract_provenance(values)
    return plain, provenance
