# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Hidden label fields, and clusterings of a tissue."""

from benchmarks.latent.annotators import (
    AnnotatedPotts,
    Found,
    majority,
    spread_labels,
)

__all__ = ["AnnotatedPotts", "Found", "majority", "spread_labels"]
