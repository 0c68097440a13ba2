# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""A scikit-learn classifier with a StackedNMM on top. It needs the extra ``examples``."""

from pyro_nmm.datasets import extra

extra("sklearn", "tables")  # first, because its error names the extra

from pyro_nmm.models.tabular.classifier import NeighborMixtureClassifier  # noqa: E402

__all__ = ["NeighborMixtureClassifier"]
