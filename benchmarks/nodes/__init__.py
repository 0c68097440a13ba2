# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Node classification: NMMs beside their backbones, temperature scaling, StackedNMM and SPN."""

from benchmarks.nodes.fits import backbone, chosen, evaluate, load, nmm_network, node_scores
from benchmarks.nodes.spn import Field, Messages

__all__ = ["Field", "Messages", "backbone", "chosen", "evaluate", "load", "nmm_network"]
__all__ += ["node_scores"]
