# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The Neighbor Mixture Model: correlated node labels in Pyro."""

from pyro_nmm.concentrations import GaussianConcentrations, LogisticConcentrations
from pyro_nmm.distributions import (
    ChosenLabels,
    EvidenceConditional,
    InnerProductGraph,
    MembershipMixture,
    NeighborChoice,
    NeighborMixture,
    OrderedConditional,
)
from pyro_nmm.distributions.averaged_posterior import AveragedPosterior
from pyro_nmm.distributions.posterior import Posterior
from pyro_nmm.neighborhood import Neighborhood
from pyro_nmm.ops.intervals import Intervals

__version__ = "0.2.0"

__all__ = [
    "AveragedPosterior",
    "ChosenLabels",
    "EvidenceConditional",
    "GaussianConcentrations",
    "InnerProductGraph",
    "Intervals",
    "LogisticConcentrations",
    "MembershipMixture",
    "NeighborChoice",
    "NeighborMixture",
    "Neighborhood",
    "OrderedConditional",
    "Posterior",
]
