# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Compiled loops of the processor. Functions import them, because numba takes long to import."""

import torch

#: Types of devices whose draws and sweeps are loops. Elsewhere tensor code takes fewer calls.
DEVICES = {"cpu"}


def runs_on(device: torch.device) -> bool:
    """Whether loops draw on a device."""
    return device.type in DEVICES
