# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Node classification: NMMs beside their backbones, temperature scaling, StackedNMM and SPN."""

from benchmarks.nodes.fits import (
    DEFAULT,
    backbone,
    chosen,
    evaluate,
    load,
    nmm_network,
    node_scores,
    pair_log_probs,
)

__all__ = ["DEFAULT", "backbone", "chosen", "evaluate", "load", "nmm_network", "node_scores"]
__all__ += ["pair_log_probs"]
