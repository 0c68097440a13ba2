# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Pyro models, and the modules that give them their parameters."""

from pyro_nmm.models.annotators import (
    Annotators,
    Consensus,
    accuracy,
    information,
)
from pyro_nmm.models.counts import nmm_counts
from pyro_nmm.models.dglfrm import DGLFRM
from pyro_nmm.models.hidden import (
    Emission,
    FieldPrior,
    HiddenField,
    NormalEmission,
    fit_field,
    hidden_field,
    leave_one_out,
)
from pyro_nmm.models.networks import (
    Compatibility,
    FreeNMM,
    NMMNetwork,
    Parameters,
    compatibility,
)
from pyro_nmm.models.nmm import nmm
from pyro_nmm.models.plates import node_plate
from pyro_nmm.models.random_fields import (
    ConvolutionalNMM,
    MarginalField,
    MeanFieldCorrection,
    PairwiseMRF,
    annealed_log_normalizer,
    coarse_to_fine,
    grid_edges,
    ising,
    ising_posterior,
    potts,
)
from pyro_nmm.models.stacked import (
    PooledScores,
    StackedNMM,
    random_blocks,
    temperature_scaling,
)

__all__ = [
    "DGLFRM", "Annotators", "Compatibility", "Consensus", "ConvolutionalNMM",
    "Emission", "FieldPrior", "FreeNMM", "HiddenField", "MarginalField", "MeanFieldCorrection",
    "NMMNetwork", "NormalEmission", "PairwiseMRF", "Parameters", "PooledScores", "StackedNMM",
    "accuracy",
    "annealed_log_normalizer", "coarse_to_fine", "compatibility", "fit_field",
    "grid_edges", "hidden_field", "information", "ising", "ising_posterior", "leave_one_out",
    "nmm", "nmm_counts", "node_plate", "potts", "random_blocks",
    "temperature_scaling",
]  # fmt: skip
