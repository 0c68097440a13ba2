# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Link prediction: DGLFRM and NMM-DGLFRM beside Katz's index, VGAE and GraphSAGE."""
