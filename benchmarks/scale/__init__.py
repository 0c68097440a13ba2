# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Noise and speed of a step, large graphs, and training by mini-batches."""
