# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Old name of :mod:`pyro_nmm.arguments` and :mod:`pyro_nmm.graph_arguments`."""

from pyro_nmm.arguments import *  # noqa: F403
from pyro_nmm.graph_arguments import *  # noqa: F403
