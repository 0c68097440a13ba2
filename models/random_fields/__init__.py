# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Markov random fields, which an NMM approximates."""

from pyro_nmm.models.random_fields.annealing import annealed_log_normalizer
from pyro_nmm.models.random_fields.marginal_field import MarginalField, RandomField
from pyro_nmm.models.random_fields.pairwise import (
    PairwiseMRF,
    check_field,
    coarse_to_fine,
    coarseness,
    grid_edges,
    ising,
    ising_posterior,
    potts,
)

__all__ = [
    "MarginalField",
    "PairwiseMRF",
    "RandomField",
    "annealed_log_normalizer",
    "check_field",
    "coarse_to_fine",
    "coarseness",
    "grid_edges",
    "ising",
    "ising_posterior",
    "potts",
]
