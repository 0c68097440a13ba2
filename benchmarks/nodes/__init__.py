# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Node classification: NMMs beside their backbones, temperature scaling, StackedNMM and SPN."""

from benchmarks.nodes.fits import (
    BACKBONES,
    DEFAULT,
    backbone,
    chosen,
    evaluate,
    load,
    nmm_network,
    node_scores,
    pair_log_probs,
)

__all__ = ["BACKBONES", "DEFAULT", "backbone", "chosen", "evaluate", "load", "nmm_network"]
__all__ += ["node_scores", "pair_log_probs"]
