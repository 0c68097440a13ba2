# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Checkpoints of a run: written whole or not at all, and never taken for another run's."""

import contextlib
import dataclasses
import enum
import glob
import hashlib
import io
import itertools
import os
import shutil
import uuid
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

#: Values whose repr says all, and is the same in every process.
PLAIN = (bool, int, float, complex, str, bytes, type(None), enum.Enum, torch.dtype, torch.device)
#: Seconds after which no process writes a temporary file any more.
ABANDONED = 3600


@dataclasses.dataclass(frozen=True)
class Saved:
    """
    The file of a run, or none.

    :param parts: by name, with ``state_dict`` and ``load_state_dict``.
    :param settings: the :func:`fingerprint` of the run.
    """

    path: Path | None
    parts: Mapping[str, Any]
    settings: Mapping[str, str]

    def read(self) -> dict | None:
        """What was written, or ``None``."""
        if self.path is None or (state := load_checkpoint(self.path)) is None:
            return None
        there = state.get("settings") if isinstance(state, dict) else None
        cure = f"remove it or give another path (it is {self.path}*)"
        if not isinstance(there, dict) or not all(isinstance(v, str) for v in there.values()):
            raise ValueError(f"checkpoint {self.path} holds no run of this kind: {cure}")
        if found := differences(there, self.settings):
            seed = "to resume, set the same pyro.set_rng_seed before both runs"
            what = f"is of another run, which differs in {found}"
            raise ValueError(f"checkpoint {self.path} {what}: {cure}; {seed}")
        return state

    def restore(self, state: Mapping[str, Any]) -> None:
        """Set the parts and torch's generators."""
        for name, part in self.parts.items():
            part.load_state_dict(state[name])
        torch.set_rng_state(state["generators"][0])
        torch.cuda.set_rng_state_all(state["generators"][1 : 1 + torch.cuda.device_count()])

    def write(self, **state: Any) -> None:
        """Save this, the parts and the generators."""
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
    Writes under a temporary name and renames, and keeps the one before. If two processes save to
    one path, the later save stays. Removes temporary files that killed processes left an hour ago.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Names of this process alone: another one may save to the same path.
    unique = uuid.uuid4().hex[:12]
    temporary, former = (path.with_name(f"{path.name}.{unique}.{k}.tmp") for k in (0, 1))
    try:
        with temporary.open("xb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        _remove_abandoned(path, temporary.stat().st_mtime - ABANDONED)
        if path.exists():
            # A copy, so that a valid file is under the path at every moment.
            shutil.copyfile(path, former)
            former.replace(path.with_name(path.name + ".previous"))
        temporary.replace(path)
    except BaseException as error:
        for file_left in (temporary, former):
            file_left.unlink(missing_ok=True)
        if isinstance(error, RuntimeError) and isinstance(error.__context__, OSError):
            raise error.__context__ from None  # torch.save raises it on top of a full disk's error
        raise


def _remove_abandoned(path: Path, before: float) -> None:
    for left in path.parent.glob(f"{glob.escape(path.name)}.{'?' * 12}.[01].tmp"):
        with contextlib.suppress(OSError):  # another process may have removed it
            if left.stat().st_mtime < before:
                left.unlink()


def load_checkpoint(path: Path) -> Any:
    """
    The newest readable checkpoint, or ``None`` if there is none. An unreadable one is renamed to
    ``<name>.unreadable``, with a warning, if the previous one is readable.
    """
    newest, unreadable = Path(path), {}
    for candidate in (newest, newest.with_name(newest.name + ".previous")):
        try:
            content = _undamaged(candidate.read_bytes())
            state = torch.load(content, weights_only=True, map_location="cpu")
        except FileNotFoundError:
            continue
        except (OSError, MemoryError):  # they may pass
            raise
        except Exception as error:  # noise can make torch.load raise almost anything
            unreadable[candidate] = str(error).splitlines()[0] if str(error) else repr(error)
            continue
        for bad, reason in unreadable.items():
            kept = bad.rename(_free_name(bad.with_name(bad.name + ".unreadable")))
            warnings.warn(f"checkpoint {bad} cannot be read ({reason}); kept as {kept}",
                          stacklevel=2)  # fmt: skip
        return state
    for bad, reason in unreadable.items():
        warnings.warn(f"checkpoint {bad} cannot be read ({reason})", stacklevel=2)
    if unreadable:
        names = " and ".join(map(str, unreadable))
        raise RuntimeError(f"no readable checkpoint: {names} cannot be read; remove to start anew")
    return None


def _undamaged(content: bytes) -> io.BytesIO:
    """The same, after a comparison with checksums, which torch.load does not make."""
    file = io.BytesIO(content)
    with zipfile.ZipFile(file) as archive:
        # All are zero after torch.serialization.set_crc32_options(False).
        damaged = any(each.CRC for each in archive.infolist()) and archive.testzip()
    if damaged:
        raise ValueError(f"{damaged} does not match its checksum")
    file.seek(0)
    return file


def _free_name(path: Path) -> Path:
    names = (path.with_name(f"{path.name}.{k}") for k in itertools.count(1))
    return next(p for p in itertools.chain([path], names) if not p.exists())


def fingerprint(
    module: nn.Module, optimizer: torch.optim.Optimizer, settings: Mapping[str, object]
) -> dict[str, str]:
    """
    One line for every setting, plain attribute of a part of the network and number of the
    optimiser, the seed and the weights. Tensors and long texts are digests, functions are names.

    >>> module = nn.Dropout(0.3)
    >>> lines = fingerprint(module, torch.optim.SGD([torch.zeros(1)], 0.1), {"data": "mine"})
    >>> lines["data"], lines["module.p"], lines["optimizer.lr"]
    ("'mine'", '0.3', '[0.1]')
    """
    lines = {name: _text(value) for name, value in settings.items()}
    lines["seed"] = str(torch.initial_seed())
    lines["initial weights"] = _digest(_text(module.state_dict()))
    frozen = [name for name, p in module.named_parameters() if not p.requires_grad]
    lines["frozen parameters"] = _text(frozen)
    for path, part in module.named_modules():
        place = f"module.{path}" if path else "module"
        lines[place] = type(part).__qualname__
        for name, value in vars(part).items():
            # Private ones are torch's tables and what layers keep from call to call.
            if not name.startswith("_") and name != "training":
                lines[f"{place}.{name}"] = _text(value)
    lines["optimizer"] = type(optimizer).__qualname__
    for name in optimizer.defaults:
        lines[f"optimizer.{name}"] = _text([group[name] for group in optimizer.param_groups])
    return lines


def differences(there: Mapping[str, str], here: Mapping[str, str], most: int = 6) -> str:
    names = [n for n in {**there, **here} if there.get(n) != here.get(n)]
    words = []
    for name in names[:most]:
        values = there.get(name, "nothing"), here.get(name, "nothing")
        hidden = any("#" in value for value in values)
        words.append(name if hidden else f"{name} ({values[0]} there, {values[1]} here)")
    return ", ".join(words) + (f" and {len(names) - most} more" if len(names) > most else "")


def _text(value: object) -> str:
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, Tensor):
        return _tensor(value)
    if isinstance(value, np.ndarray):
        plain = value.dtype.kind in "biufc"
        return _tensor(torch.tensor(value)) if plain else _digest(repr(value.tolist()))
    if isinstance(value, PLAIN):
        text = repr(value)
    elif isinstance(value, Mapping):
        text = "{" + ", ".join(f"{key!r}: {_text(v)}" for key, v in value.items()) + "}"
    elif isinstance(value, (list, tuple)):
        text = "[" + ", ".join(map(_text, value)) + "]"
    elif isinstance(value, (set, frozenset)):
        text = "{" + ", ".join(sorted(map(_text, value))) + "}"
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        text = type(value).__qualname__ + _text(fields)
    else:  # of other objects the class; a repr may hold an address
        name = getattr(value, "__qualname__", None)
        text = name if isinstance(name, str) else type(value).__qualname__
    return text if len(text) <= 80 else _digest(text)


def _tensor(value: Tensor) -> str:
    if is_lazy(value):
        return "uninitialized"
    value = value.detach()
    if value.layout == torch.sparse_csr:
        parts = [value.crow_indices(), value.col_indices(), value.values()]
    elif value.layout != torch.strided:
        value = value.to_sparse_coo().coalesce()
        parts = [value.indices(), value.values()]
    else:
        parts = [value.as_subclass(Tensor)]
    digest = hashlib.sha256(f"{value.dtype} {tuple(value.shape)}".encode())
    for part in parts:
        # Bytes, because NumPy knows no bfloat16; a copy, because one entry may have stride zero.
        plain = part.resolve_conj().resolve_neg().cpu().flatten()
        plain = plain.clone(memory_format=torch.contiguous_format)
        digest.update(plain.view(torch.uint8).numpy().data)
    return f"#{digest.hexdigest()[:16]}"


def _digest(text: str) -> str:
    return "#" + hashlib.sha256(text.encode()).hexdigest()[:16]
