# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""StackedNMM on top of trained classifiers, beside other ways to calibrate them."""

from benchmarks.on_top.data import (
    MOST_PAIRS,
    epochs,
    heterophilous,
    load,
    network,
    shuffled,
    some_pairs,
    trained,
)

__all__ = ["MOST_PAIRS", "epochs", "heterophilous", "load", "network", "shuffled", "some_pairs"]
__all__ += ["trained"]
