# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Libraries that only some data need."""

import importlib
from types import ModuleType


def extra(module: str, what: str) -> ModuleType:
    """A module of the ``examples`` extra; if it is missing, an error says which data need it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        needed = module.partition(".")[0]
        raise ImportError(
            f"{what} need {needed}, which cannot be imported ({error}): pip install "
            f"pyro-nmm[examples]"
        ) from error
