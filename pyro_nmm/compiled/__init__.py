# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Compiled loops (numba); `pyro_nmm.backend` says whether they run."""
