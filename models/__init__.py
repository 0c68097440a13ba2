# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Pyro programs, and the networks that feed them."""

from pyro_nmm.models.networks import NMMNetwork
from pyro_nmm.models.nmm import nmm

__all__ = ["NMMNetwork", "nmm"]
