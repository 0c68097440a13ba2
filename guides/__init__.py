# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Pyro guides."""

from pyro_nmm.guides.amortized import AmortizedNMM
from pyro_nmm.guides.ordered import ordered_guide

__all__ = ["AmortizedNMM", "ordered_guide"]
