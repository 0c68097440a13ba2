# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Measurements of the documentation; `python -m benchmarks.report` prints them."""
