# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Image denoising: U-Nets, and NMMs over their pixels."""
