# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Compiled loops (numba). Where draws and sweeps have code for devices, too, this runs them on the
processor."""

import torch

from pyro_nmm.compiled.coupling import coupled
from pyro_nmm.compiled.draws import anneal, draw, meet, sweep
from pyro_nmm.compiled.joint import joint
from pyro_nmm.compiled.loops import entropy, find, predict, ranks

__all__ = [
    "anneal", "coupled", "draw", "entropy", "find", "joint", "meet", "predict", "ranks",
    "runs_on", "sweep",
]  # fmt: skip

#: Types of devices whose draws and sweeps are loops. Elsewhere tensor code takes fewer calls.
DEVICES = {"cpu"}


def runs_on(device: torch.device) -> bool:
    """Whether loops draw on a device."""
    return device.type in DEVICES
