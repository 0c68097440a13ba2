# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Checkpoints: a fit that is killed and started again ends with the same bits."""

import hashlib
import os
import re
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.parameter import is_lazy


def save_checkpoint(state: dict, path: str | Path) -> None:
    """Write a state to a temporary file and rename it, so that the file is always complete.

    :raises OSError: if the file cannot be written. An older one stays.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        with temporary.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        error.filename = error.filename or str(path)  # which a full disk leaves out
        raise
    finally:
        temporary.unlink(missing_ok=True)


def load_checkpoint(path: str | Path) -> dict | None:
    """The saved state, on the CPU, or ``None`` without a file.

    :raises ValueError: for a file that is no checkpoint.
    """
    try:
        return torch.load(path, weights_only=True, map_location="cpu")
    except FileNotFoundError:
        return None
    except Exception as error:  # almost any, for a file of another kind
        cure = "remove it, or give another path"
        raise ValueError(f"checkpoint {path} cannot be read ({error}): {cure}") from error


class Checkpoint:
    """A run's parts, with a ``state_dict`` each, and its random numbers, in a file or nowhere."""

    def __init__(
        self, path: str | Path | None, parts: Mapping[str, Any], settings: Mapping
    ) -> None:
        self.path, self.parts = path, parts
        if path is not None:
            layers = [repr(layer) for layer in parts["module"].modules()]
            starts = [part.state_dict() for part in parts.values()]
            self.digest = digest(torch.initial_seed(), layers, starts, settings)

    def resume(self) -> list[float]:
        """The losses of the steps in the file, whose state the parts take; without a file none."""
        if self.path is None or (state := load_checkpoint(self.path)) is None:
            return []
        if not isinstance(state, dict) or state.get("digest") != self.digest:
            same = "to resume, use the same seed, initial weights, data and options"
            cure = "else remove it, or give another path"
            raise ValueError(f"checkpoint {self.path} is of another run: {same}; {cure}")
        for name, part in self.parts.items():
            part.load_state_dict(state[name])
        torch.set_rng_state(state["generators"][0])
        torch.cuda.set_rng_state_all(state["generators"][1 : 1 + torch.cuda.device_count()])
        return state["losses"]

    def save(self, losses: list[float]) -> None:
        """Save the state after the steps with these losses."""
        if self.path is not None:
            state: dict[str, Any] = {name: part.state_dict() for name, part in self.parts.items()}
            state["generators"] = [torch.get_rng_state(), *torch.cuda.get_rng_state_all()]
            save_checkpoint(state | {"digest": self.digest, "losses": losses}, self.path)


def digest(*values: object) -> str:
    """Hash of values: contents of tensors, arrays and containers, and the ``repr`` of others."""
    return hashlib.sha256(b"\n".join(_contents(values))).hexdigest()


def _contents(value: Any) -> Iterator[bytes]:
    if isinstance(value, np.ndarray):
        value = torch.tensor(value) if value.dtype.kind in "biufc" else value.tolist()
    if isinstance(value, Tensor) and value.layout != torch.strided:
        entries = value.detach().to_sparse_coo().coalesce()
        value = value.shape, entries.indices(), entries.values()
    if isinstance(value, Tensor) and not is_lazy(value):
        flat = value.detach().cpu().as_subclass(Tensor).flatten().contiguous()
        flat = flat.as_strided(flat.shape, (1,))  # also of one element that was expanded
        yield f"{value.dtype} {tuple(value.shape)}".encode()
        yield flat.view(torch.uint8).numpy().tobytes()
    elif isinstance(value, Mapping | list | tuple):
        yield str(len(value)).encode()
        for item in value.items() if isinstance(value, Mapping) else value:
            yield from _contents(item)
    else:  # an address is another one in every process
        yield re.sub(" at 0x[0-9a-f]+", "", repr(value)).encode()
