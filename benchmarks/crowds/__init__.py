# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Annotators with real errors: people, and weak classifiers on a graph."""
