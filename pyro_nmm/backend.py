# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
``compiled`` is the module of compiled CPU loops, or ``None`` without numba (the ``fast`` extra).
Set it to ``None`` to run the tensor code on the CPU as well.
"""

import warnings
from types import ModuleType

compiled: ModuleType | None
try:
    from pyro_nmm.compiled import loops as compiled  # type: ignore[no-redef]
except Exception as error:  # a broken numba raises anything: SystemError, OSError, ...
    compiled = None
    if not (isinstance(error, ModuleNotFoundError) and error.name == "numba"):
        warnings.warn(
            "numba is installed, but the compiled loops do not load "
            f"({type(error).__name__}: {error}). Everything runs in PyTorch instead, on a CPU "
            "about ten times slower. Install versions of numba and numpy that fit "
            "(pip install --upgrade numba), or uninstall numba.",
            RuntimeWarning,
            stacklevel=2,
        )
