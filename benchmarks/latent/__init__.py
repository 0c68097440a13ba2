# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Hidden label fields, and noisy labels by several annotators."""

from benchmarks.latent.annotators import (
    AnnotatedPotts,
    Found,
    grid_mixture,
    majority,
    noisy,
    spread_labels,
)

__all__ = ["AnnotatedPotts", "Found", "grid_mixture", "majority", "noisy", "spread_labels"]
