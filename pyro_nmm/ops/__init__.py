# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Kernels: tensors in, tensors out; no distributions."""
