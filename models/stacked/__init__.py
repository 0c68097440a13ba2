# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
An NMM on top of a trained classifier.

``inputs`` checks the arguments, ``parameters`` declares each parameter with its prior, ``formula``
makes label probabilities, concentrations and attention, ``fit`` has folds and steps, and ``module``
picks the cases.
"""

from pyro_nmm.models.stacked.blocks import marginals_in_blocks
from pyro_nmm.models.stacked.fit import bounded_temperature, temperature_scaling
from pyro_nmm.models.stacked.inputs import edge_weights
from pyro_nmm.models.stacked.module import StackedNMM
from pyro_nmm.models.stacked.pooled import PooledScores

__all__ = [
    "PooledScores",
    "StackedNMM",
    "bounded_temperature",
    "edge_weights",
    "marginals_in_blocks",
    "temperature_scaling",
]
