# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Annotators whose errors nobody simulated: people, and weak classifiers on a graph."""
