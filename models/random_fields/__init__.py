# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Markov random fields, which an NMM approximates, and the network that does it for many."""

from pyro_nmm.models.random_fields.convolution import ConvolutionalNMM
from pyro_nmm.models.random_fields.marginal_field import MarginalField, RandomField
from pyro_nmm.models.random_fields.mean_field import (
    MeanFieldCorrection,
    independent,
    mean_field,
)
from pyro_nmm.models.random_fields.pairwise import (
    PairwiseMRF,
    annealed_log_normalizer,
    check_field,
    coarse_to_fine,
    coarseness,
    grid_edges,
    ising,
    ising_posterior,
    potts,
)

__all__ = [
    "ConvolutionalNMM",
    "MarginalField",
    "MeanFieldCorrection",
    "PairwiseMRF",
    "RandomField",
    "annealed_log_normalizer",
    "check_field",
    "coarse_to_fine",
    "coarseness",
    "grid_edges",
    "independent",
    "ising",
    "ising_posterior",
    "mean_field",
    "potts",
]
