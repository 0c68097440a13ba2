# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Checkpoints of runs: written whole or not at all, and refused by other runs."""

import contextlib
import dataclasses
import hashlib
import os
import re
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy


class Checkpoint:
    """
    The file of a run, or none.

    :param parts: modules, optimisers and the like by name.
    :param settings: values by name. A run of others refuses the file.
    """

    def __init__(
        self, path: str | Path | None, parts: Mapping[str, Any], settings: Mapping[str, object]
    ) -> None:
        self.path, self.parts = as_path(path), parts
        self.settings = {} if self.path is None else dict(fingerprint(parts, settings))

    def read(self) -> dict | None:
        """The state, or ``None`` if there is no file."""
        if self.path is None or (state := load_checkpoint(self.path)) is None:
            return None
        there = state.get("settings") if isinstance(state, dict) else None
        cure = f"remove it or give another path (it is {self.path}*)"
        if not isinstance(there, dict):
            raise ValueError(f"checkpoint {self.path} holds no run of this kind: {cure}")
        pairs = {name: (there.get(name), self.settings.get(name)) for name in self.settings | there}
        differences = [f"{name} ({old} there, {new} here)"
                       for name, (old, new) in pairs.items() if old != new]  # fmt: skip
        if differences:
            seed = "to resume, set the same pyro.set_rng_seed before both runs"
            what = f"is of another run, which differs in {', '.join(differences[:6])}"
            raise ValueError(f"checkpoint {self.path} {what}: {cure}; {seed}")
        return state

    def restore(self, state: Mapping[str, Any]) -> None:
        """Set the parts and torch's generators."""
        for name, part in self.parts.items():
            part.load_state_dict(state[name])
        torch.set_rng_state(state["generators"][0])
        torch.cuda.set_rng_state_all(state["generators"][1 : 1 + torch.cuda.device_count()])

    def write(self, **state: Any) -> None:
        """Save the state, the parts and the generators."""
        if self.path is not None:
            state |= {name: part.state_dict() for name, part in self.parts.items()}
            state["generators"] = [torch.get_rng_state(), *torch.cuda.get_rng_state_all()]
            save_checkpoint(state | {"settings": self.settings}, self.path)


def as_path(checkpoint: str | Path | None) -> Path | None:
    """Refuse what is no file's path."""
    if checkpoint is None:
        return None
    if not isinstance(checkpoint, str | os.PathLike) or not Path(checkpoint).name:
        raise ValueError(f"checkpoint must be the path of a file, got {checkpoint!r}")
    return Path(checkpoint)


def save_checkpoint(state: dict, path: Path) -> None:
    """
    Write a state under a temporary name and rename it. The one before stays as
    ``<name>.previous``. If two processes save to one path, the later save stays.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileNotFoundError):  # the first save
            path.replace(path.with_name(path.name + ".previous"))
        temporary.replace(path)
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):  # torch.save hides a full disk behind its own
            raise error.__context__ from None
        raise
    finally:
        temporary.unlink(missing_ok=True)


def load_checkpoint(path: Path) -> Any:
    """
    The newest readable checkpoint, or ``None`` if there is none. An unreadable one is renamed to
    ``<name>.unreadable``, with a warning, if the previous one is readable.
    """
    path, unreadable = Path(path), []
    for file in (path, path.with_name(path.name + ".previous")):
        try:
            with zipfile.ZipFile(file) as archive:  # torch.load compares no checksums
                summed = any(entry.CRC for entry in archive.infolist())
                if summed and (damaged := archive.testzip()):
                    raise ValueError(f"{damaged} does not match its checksum")
            state = torch.load(file, weights_only=True, map_location="cpu")
        except FileNotFoundError:
            continue
        except (OSError, MemoryError):  # they may pass
            raise
        except Exception as error:  # noise can make torch.load raise almost anything
            warnings.warn(f"checkpoint {file} cannot be read ({error})", stacklevel=2)
            unreadable.append(file)
            continue
        for damaged_file in unreadable:  # or the next save would replace the readable one
            damaged_file.replace(damaged_file.with_name(damaged_file.name + ".unreadable"))
        return state
    if unreadable:
        names = " and ".join(map(str, unreadable))
        raise RuntimeError(f"no readable checkpoint: {names} cannot be read; remove to start anew")
    return None


def fingerprint(
    parts: Mapping[str, Any], settings: Mapping[str, object]
) -> Iterator[tuple[str, str]]:
    """
    Name and text of every setting, plain attribute of a module and number of an optimiser, of the
    seed and the weights.

    >>> module, rate = nn.Dropout(0.3), torch.optim.SGD([torch.zeros(1)], 0.1)
    >>> lines = dict(fingerprint({"module": module, "optimizer": rate}, {"data": "mine"}))
    >>> lines["data"], lines["module.p"], lines["optimizer.lr"]
    ("'mine'", '0.3', '[0.1]')
    """
    yield "seed", str(torch.initial_seed())
    for name, value in settings.items():
        yield name, _text(value)
    for name, part in parts.items():
        if isinstance(part, torch.optim.Optimizer):
            yield name, type(part).__qualname__
            for key in part.defaults:
                yield f"{name}.{key}", _text([group[key] for group in part.param_groups])
        if isinstance(part, nn.Module):
            yield "initial weights", _text(part.state_dict())
            frozen = [key for key, value in part.named_parameters() if not value.requires_grad]
            yield "frozen parameters", _text(frozen)
            for place, inner in part.named_modules(prefix=name):
                yield place, type(inner).__qualname__
                for key, value in vars(inner).items():
                    # Private ones are torch's tables and what layers keep from call to call.
                    if not key.startswith("_") and key != "training":
                        yield f"{place}.{key}", _text(value)


def _text(value: object) -> str:
    """The same of equal values in every process; of tensors and long texts a digest."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        value = torch.tensor(value)
    if isinstance(value, Tensor):
        return "uninitialized" if is_lazy(value) else _tensor(value)
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, set | frozenset):
        value = sorted(value, key=repr)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        text = type(value).__qualname__ + _text(fields)
    elif isinstance(value, Mapping):
        text = "{" + ", ".join(f"{key!r}: {_text(item)}" for key, item in value.items()) + "}"
    elif isinstance(value, list | tuple):
        text = "[" + ", ".join(map(_text, value)) + "]"
    elif re.search(r"\b0x[0-9a-f]+", text := repr(value)):  # an address
        text = getattr(value, "__qualname__", type(value).__qualname__)
    return text if len(text) <= 80 else _digest(text.encode())


def _tensor(value: Tensor) -> str:
    value = value.detach().cpu()
    if value.layout != torch.strided:
        entries = value.to_sparse_coo().coalesce()
        return _text((value.shape, entries.indices(), entries.values()))
    # Bytes, because NumPy knows no bfloat16; a copy, because one entry may have stride zero.
    plain = value.as_subclass(Tensor).resolve_conj().resolve_neg().flatten()
    plain = plain.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    return _digest(f"{value.dtype} {tuple(value.shape)}".encode(), plain.numpy().data)


def _digest(*contents: bytes | memoryview) -> str:
    return "#" + hashlib.sha256(b"".join(contents)).hexdigest()[:16]
