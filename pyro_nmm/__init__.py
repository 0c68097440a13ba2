# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The Neighbor Mixture Model: correlated node labels in Pyro."""

from importlib.util import find_spec

from pyro_nmm.distributions.averaged_posterior import AveragedPosterior
from pyro_nmm.distributions.conditional_kinds import EvidenceConditional, OrderedConditional
from pyro_nmm.distributions.factors import ChosenLabels, NeighborChoice
from pyro_nmm.distributions.memberships import MembershipMixture
from pyro_nmm.distributions.neighbor_mixture import NeighborMixture
from pyro_nmm.distributions.posterior import Posterior
from pyro_nmm.edges import as_neighborhood, edge_values
from pyro_nmm.neighborhood import Neighborhood

if find_spec("pyro_nmm.models") is None:
    cure = "start Python in another folder, or install by pip install --editable ."
    raise ImportError(f"a checkout's folder pyro_nmm hides the installed package: {cure}")

__version__ = "0.3.0"

__all__ = [
    "AveragedPosterior", "ChosenLabels", "EvidenceConditional",
    "MembershipMixture", "NeighborChoice", "NeighborMixture", "Neighborhood", "OrderedConditional",
    "Posterior", "as_neighborhood", "edge_values",
]  # fmt: skip
