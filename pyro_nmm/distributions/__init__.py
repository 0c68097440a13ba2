# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Distributions of choices and labels, and posteriors."""
