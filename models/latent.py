# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The path of ``pyro_nmm.models.hidden`` and ``pyro_nmm.models.annotators`` before version 0.3."""

import importlib
import warnings
from typing import Any


def __getattr__(name: str) -> Any:
    for room in ("hidden", "annotators"):
        module = importlib.import_module(f"pyro_nmm.models.{room}")
        if name in module.__all__:
            where = f"pyro_nmm.models.latent has moved: import {name} from {module.__name__}"
            warnings.warn(where, DeprecationWarning, stacklevel=2)
            return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
