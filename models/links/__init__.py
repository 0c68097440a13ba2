# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Communities and links of a graph."""

from pyro_nmm.models.links.dglfrm import DGLFRM

__all__ = ["DGLFRM"]
