# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Pyro models, and the modules that give them their parameters."""

from pyro_nmm.models.networks import NMMNetwork
from pyro_nmm.models.nmm import nmm
from pyro_nmm.models.stacked import StackedNMM

__all__ = ["NMMNetwork", "StackedNMM", "nmm"]
