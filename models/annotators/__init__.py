# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Answers of annotators who disagree: their model, the consensus, and accuracies."""

from pyro_nmm.models.annotators.consensus import Consensus
from pyro_nmm.models.annotators.model import Annotators
from pyro_nmm.models.annotators.quality import accuracy, information

__all__ = [
    "Annotators",
    "Consensus",
    "accuracy",
    "information",
]
