# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Pyro models, and the modules that give them their parameters."""

from pyro_nmm.models.annealing import annealed_log_normalizer
from pyro_nmm.models.annotators import Annotators
from pyro_nmm.models.compatibility import Compatibility, compatibility
from pyro_nmm.models.convolution import ConvolutionalNMM
from pyro_nmm.models.copying import CopyingAnnotators
from pyro_nmm.models.denoiser import Denoiser
from pyro_nmm.models.dglfrm import DGLFRM
from pyro_nmm.models.edge_weights import edge_weights
from pyro_nmm.models.emissions import NormalEmission, PoissonEmission
from pyro_nmm.models.field_fit import fit_field, sample_field
from pyro_nmm.models.hidden_field import Emission, FieldPrior, HiddenField, hidden_field
from pyro_nmm.models.leave_one_out import leave_one_out
from pyro_nmm.models.marginal_field import MarginalField
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
from pyro_nmm.models.pooled import PooledScores
from pyro_nmm.models.quality import accuracy, information
from pyro_nmm.models.stacked import StackedNMM
from pyro_nmm.models.stacked_blocks import marginals_in_blocks
from pyro_nmm.models.temperature import temperature_scaling
from pyro_nmm.models.unet import UNet

__all__ = [
    "DGLFRM",
    "Annotators",
    "Compatibility",
    "ConvolutionalNMM",
    "CopyingAnnotators",
    "Denoiser",
    "Emission",
    "FieldPrior",
    "FreeNMM",
    "HiddenField",
    "MarginalField",
    "NMMNetwork",
    "NormalEmission",
    "PairwiseMRF",
    "ParameterNetwork",
    "PoissonEmission",
    "PooledScores",
    "StackedNMM",
    "UNet",
    "accuracy",
    "annealed_log_normalizer",
    "coarse_to_fine",
    "compatibility",
    "edge_weights",
    "fit_field",
    "grid_edges",
    "hidden_field",
    "information",
    "ising",
    "ising_posterior",
    "leave_one_out",
    "marginals_in_blocks",
    "nmm",
    "potts",
    "sample_field",
    "temperature_scaling",
]
