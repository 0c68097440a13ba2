# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Tables with few labels: scikit-learn's classifiers alone, with rivals, and with an NMM on top."""
