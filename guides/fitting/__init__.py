# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The loops that fit."""
