# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

from pyro_nmm.distributions.chosen_labels import ChosenLabels
from pyro_nmm.distributions.evidence_conditional import EvidenceConditional
from pyro_nmm.distributions.inner_product import InnerProductGraph
from pyro_nmm.distributions.membership_mixture import MembershipMixture
from pyro_nmm.distributions.neighbor_choice import NeighborChoice
from pyro_nmm.distributions.neighbor_mixture import NeighborMixture
from pyro_nmm.distributions.ordered_conditional import OrderedConditional

__all__ = [
    "ChosenLabels",
    "EvidenceConditional",
    "InnerProductGraph",
    "MembershipMixture",
    "NeighborChoice",
    "NeighborMixture",
    "OrderedConditional",
]
