# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""What rooms share: stored rows, tables, seconds, a loop of fits, communities of a graph."""
