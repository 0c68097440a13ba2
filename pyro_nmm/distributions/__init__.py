# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

from pyro_nmm.distributions.conditionals import EvidenceConditional, OrderedConditional
from pyro_nmm.distributions.factors import ChosenLabels, NeighborChoice
from pyro_nmm.distributions.inner_product import InnerProductGraph
from pyro_nmm.distributions.memberships import MembershipMixture
from pyro_nmm.distributions.neighbor_mixture import NeighborMixture

__all__ = [
    "ChosenLabels", "EvidenceConditional", "InnerProductGraph", "MembershipMixture",
    "NeighborChoice", "NeighborMixture", "OrderedConditional",
]  # fmt: skip
