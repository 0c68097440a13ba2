# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""An NMM on a trained classifier: ``table`` of inputs, ``formula``, ``fit``, ``stages``, class."""

from pyro_nmm.models.stacked.fit import temperature_scaling
from pyro_nmm.models.stacked.formula import PooledScores
from pyro_nmm.models.stacked.model import StackedNMM
from pyro_nmm.models.stacked.stages import random_blocks

__all__ = [
    "PooledScores",
    "StackedNMM",
    "random_blocks",
    "temperature_scaling",
]
