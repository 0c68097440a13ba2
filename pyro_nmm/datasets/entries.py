# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Checked entries of PyG's data, and libraries that only some data need."""

import importlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from numbers import Integral
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data

from pyro_nmm.arguments import as_tensor

#: Held by the thread whose seed is in torch's global generator.
_SEEDED = threading.RLock()


def extra(module: str, what: str) -> ModuleType:
    """A module of the ``examples`` extra; if it is missing, an error says what needs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        needed, cure = module.partition(".")[0], "pip install '.[examples]' in a checkout"
        raise ImportError(f"{what} need {needed} ({error}): {cure}") from error


@contextmanager
def reading(path: str | Path) -> Iterator[None]:
    """Around the reading of a file: an error that may not name the file becomes one that does."""
    try:
        yield
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # the system's, such as a missing file
        raise ValueError(f"{path} cannot be read: {type(error).__name__}: {error}") from error


@contextmanager
def seeded(seed: Any) -> Iterator[None]:
    """torch's global CPU generator under a seed, for one thread at a time; then as it was."""
    with _SEEDED, torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(as_seed(seed))
        yield


def entry(data: Data, name: str) -> Tensor:
    """A tensor with values that the data hold under a name."""
    value = data.get(name)
    if value is None:
        sparse = name == "edge_index" and "adj_t" in data
        hint = ": to_edge_index of torch_geometric.utils makes one of adj_t.t()"
        raise ValueError(f"data has no {name}{hint if sparse else ''}")
    if not isinstance(value, Tensor):
        hint = ": torch.from_numpy makes one" if isinstance(value, np.ndarray) else ""
        raise ValueError(f"data.{name} must be a tensor, got {type(value)}{hint}")
    if value.is_meta:
        raise ValueError(f"data.{name} is on the meta device, which holds no values")
    return as_tensor(f"data.{name}", value)


def as_seed(seed: Any) -> int:
    """A seed of torch's generators."""
    if not isinstance(seed, Integral):
        raise ValueError(f"seed must be an integer, got {seed!r}")
    return int(seed)
