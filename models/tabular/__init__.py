# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""A scikit-learn classifier with a StackedNMM on top. It needs the extra ``examples``."""

from pyro_nmm.models.tabular.classifier import NeighborMixtureClassifier

__all__ = ["NeighborMixtureClassifier"]
