# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""``compiled``: the compiled CPU loops, or ``None`` without numba (the ``fast`` extra)."""

import warnings
from types import ModuleType

import torch

compiled: ModuleType | None
try:
    from pyro_nmm import compiled  # type: ignore[no-redef]
except Exception as error:  # a broken numba raises anything: SystemError, OSError, ...
    compiled = None
    if not (isinstance(error, ModuleNotFoundError) and error.name == "numba"):
        warnings.warn(
            f"numba is installed, but the compiled loops do not load ({type(error).__name__}: "
            f"{error}). PyTorch runs instead, on a CPU about ten times slower. Install versions of "
            f"numba and numpy that fit (pip install --upgrade numba), or uninstall numba.",
            RuntimeWarning,
            stacklevel=2,
        )


def loops_on(device: torch.device) -> ModuleType | None:
    """The compiled loops, if they run on a device."""
    return compiled if device.type == "cpu" else None
