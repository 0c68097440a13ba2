# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
``compiled`` is the module of compiled CPU loops, or ``None`` without numba (the ``fast``
extra). Set it to ``None`` to run the tensor code on the CPU as well.
"""

from types import ModuleType

compiled: ModuleType | None
try:
    from pyro_nmm import compiled  # type: ignore[no-redef]
except ImportError:
    compiled = None
