# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Pyro models, and the modules that give them their parameters."""

from pyro_nmm.models.annealing import annealed_log_normalizer
from pyro_nmm.models.compatibility import Compatibility, compatibility
from pyro_nmm.models.convolution import ConvolutionalNMM
from pyro_nmm.models.denoiser import Denoiser
from pyro_nmm.models.dglfrm import DGLFRM
from pyro_nmm.models.markov_random_field import (
    PairwiseMRF,
    coarse_to_fine,
    grid_edges,
    ising,
    ising_posterior,
    potts,
)
from pyro_nmm.models.networks import FreeNMM, NMMNetwork, ParameterNetwork
from pyro_nmm.models.nmm import nmm
from pyro_nmm.models.stacked import StackedNMM, temperature_scaling
from pyro_nmm.models.unet import UNet

__all__ = [
    "DGLFRM",
    "Compatibility",
    "ConvolutionalNMM",
    "Denoiser",
    "FreeNMM",
    "NMMNetwork",
    "PairwiseMRF",
    "ParameterNetwork",
    "StackedNMM",
    "UNet",
    "annealed_log_normalizer",
    "coarse_to_fine",
    "compatibility",
    "grid_edges",
    "ising",
    "ising_posterior",
    "nmm",
    "potts",
    "temperature_scaling",
]
