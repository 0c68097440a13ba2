# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Checkpoints of a run: written whole or not at all, and never taken for another run's."""

import io
import itertools
import os
import shutil
import uuid
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from pyro_nmm.guides.fitting.fingerprint import differences


def generators() -> list:
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return [torch.get_rng_state(), *cuda]


def set_generators(states: list) -> None:
    torch.set_rng_state(states[0])
    if len(states) > 1 and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(states[1:])


def resume(checkpoint: Path, here: Mapping[str, str]) -> dict | None:
    """
    The checkpoint's content, or ``None`` if there is none.

    :param here: the :func:`~pyro_nmm.guides.fitting.fingerprint.fingerprint` of the run that is
        to go on, which the content has as ``"settings"``.
    :raises ValueError: if the checkpoint is of another run, or of none.
    """
    if (state := load_checkpoint(checkpoint)) is None:
        return None
    there = state.get("settings") if isinstance(state, dict) else None
    if not isinstance(there, dict):
        raise ValueError(
            f"checkpoint {checkpoint} holds no run of this kind: it was not saved here, or by an "
            f"earlier version; give another path"
        )
    if found := differences(there, here):
        raise ValueError(
            f"checkpoint {checkpoint} is of another run, which differs in {found}: remove it or "
            f"give another path"
        )
    return state


def save_checkpoint(state: dict, path: Path) -> None:
    """Writes under a temporary name and renames, and keeps the one before."""
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
        if path.exists():
            # A copy, so that a valid file is under the path at every moment.
            shutil.copyfile(path, former)
            former.replace(path.with_name(path.name + ".previous"))
        temporary.replace(path)
    except BaseException:
        for file_left in (temporary, former):
            file_left.unlink(missing_ok=True)
        raise


def load_checkpoint(path: Path) -> Any:
    """
    The newest readable checkpoint, or ``None`` if there is none. An unreadable one is renamed to
    ``<name>.unreadable``, with a warning, if the one before can be read: the next save would copy
    it over that one. An error of the file system is raised, because it may pass.
    """
    newest, unreadable = Path(path), {}
    for candidate in (newest, newest.with_name(newest.name + ".previous")):
        try:
            content = candidate.read_bytes()
        except FileNotFoundError:
            continue
        try:
            state = torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")
        except (OSError, MemoryError):
            raise
        except Exception as error:  # noise can make torch.load raise almost anything
            unreadable[candidate] = str(error).splitlines()[0] if str(error) else repr(error)
            continue
        for bad, reason in unreadable.items():
            kept = bad.rename(_free_name(bad.with_name(bad.name + ".unreadable")))
            warnings.warn(f"checkpoint {bad} cannot be read ({reason}); kept as {kept}",
                          stacklevel=2)  # fmt: skip
        return state
    if unreadable:
        for bad, reason in unreadable.items():
            warnings.warn(f"checkpoint {bad} cannot be read ({reason})", stacklevel=2)
        names = " and ".join(map(str, unreadable))
        raise RuntimeError(f"no readable checkpoint: {names} cannot be read; remove to start anew")
    return None


def _free_name(path: Path) -> Path:
    names = (path.with_name(f"{path.name}.{k}") for k in itertools.count(1))
    return next(p for p in itertools.chain([path], names) if not p.exists())
