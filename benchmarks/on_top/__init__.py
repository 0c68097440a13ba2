# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""StackedNMM on top of trained classifiers, beside other ways to calibrate them."""

from benchmarks.on_top.data import load, network, shuffled, some_pairs, trained

__all__ = ["load", "network", "shuffled", "some_pairs", "trained"]
