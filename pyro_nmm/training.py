# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Early stopping and checkpoints, for any module, loss and optimiser."""

from __future__ import annotations

import copy
import math
import os
import pickle
import shutil
import struct
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import nn

#: What torch.load raises for a file that was cut short or is none of its own.
UNREADABLE = (RuntimeError, EOFError, OSError, ValueError, pickle.UnpicklingError, struct.error)


def train(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    backward: Callable[[], float],
    validate: Callable[[], tuple[float, ...]],
    *,
    num_epochs: int,
    patience: int,
    checkpoint: Path | None = None,
    save_every: int = 20,
    settings: str = "",
    progress: Callable[[range], Iterable[int]] = iter,
) -> list[tuple[float, ...]]:
    r"""
    Steps until the validation score has not improved for ``patience`` epochs; then ``module``
    has the parameters and buffers of the best epoch,

    .. math::

        e^\star = \arg\max_e \, \text{score}_e .

    Interrupted at any moment and called again with the same arguments, it ends with the same
    parameters, bit for bit on a CPU: a checkpoint holds the module, the optimiser, the best
    epoch and the state of torch's generators.

    :param nn.Module module: everything that learns or remembers.
    :param optimizer: of its parameters.
    :param backward: computes gradients, with them at zero, and returns the loss.
    :param validate: returns numbers, compared in turn; larger is better.
    :param Path checkpoint: where to save, every ``save_every`` epochs; the one before is kept
        beside it as ``<name>.previous`` and used if the newest cannot be read.
    :param str settings: what the run depends on; resuming under other settings is an error.
    :param progress: wraps the range of epochs, for example ``tqdm``.
    :return: the score of every epoch. The module is in evaluation mode.
    :raises ValueError: if a checkpoint belongs to other settings.
    :raises RuntimeError: if neither checkpoint can be read.
    """
    best, scores = copy.deepcopy(module.state_dict()), []
    if checkpoint is not None and (state := load_checkpoint(checkpoint)) is not None:
        if state["settings"] != settings:
            raise ValueError(
                f"checkpoint {checkpoint} was made with settings {state['settings']!r}, not "
                f"{settings!r}: remove it or give another path"
            )
        module.load_state_dict(state["module"])
        optimizer.load_state_dict(state["optimizer"])
        best, scores = state["best"], [tuple(score) for score in state["scores"]]
        set_generators(state["generators"])
    for epoch in progress(range(len(scores), num_epochs)):
        if epoch - _best_epoch(scores) > patience:
            break
        module.train()
        optimizer.zero_grad()
        backward()
        optimizer.step()
        module.eval()
        with torch.no_grad():
            scores.append(tuple(validate()))
        if any(math.isnan(score) for score in scores[-1]):
            raise ValueError(
                f"validate returned {scores[-1]} in epoch {epoch}: look for NaN in the loss, or "
                f"for a validation mask that selects no node"
            )
        if _best_epoch(scores) == epoch:
            best = copy.deepcopy(module.state_dict())
        if checkpoint is not None and len(scores) % save_every == 0:
            state = {
                "settings": settings,
                "module": module.state_dict(),
                "optimizer": optimizer.state_dict(),
                "best": best,
                "scores": scores,
                "generators": generators(),
            }
            save_checkpoint(state, checkpoint)
    module.load_state_dict(best)
    module.eval()
    return scores


def _best_epoch(scores: list[tuple[float, ...]]) -> int:
    return max(range(len(scores)), key=lambda e: (scores[e], -e), default=0)


def generators() -> list:
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return [torch.get_rng_state(), *cuda]


def set_generators(states: list) -> None:
    torch.set_rng_state(states[0])
    if len(states) > 1 and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(states[1:])


def save_checkpoint(state: dict, path: Path) -> None:
    """Writes under a temporary name and renames, and keeps the one before."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    if path.exists():
        # A copy, so that a valid file is under the path at every moment.
        shutil.copyfile(path, path.with_name(path.name + ".previous"))
    temporary.replace(path)


def load_checkpoint(path: Path) -> dict | None:
    """
    The newest readable checkpoint, or ``None`` if there is none; a warning tells of an
    unreadable one.
    """
    candidates = [Path(path), Path(path).with_name(Path(path).name + ".previous")]
    found = [p for p in candidates if p.exists()]
    for p in found:
        try:
            state = torch.load(p, weights_only=True, map_location="cpu")
            if p is not candidates[0]:
                # The next save would copy it over the readable one.
                candidates[0].unlink(missing_ok=True)
            return state
        except UNREADABLE as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            warnings.warn(f"checkpoint {p} cannot be read ({reason})", stacklevel=2)
    if found:
        names = " and ".join(str(p) for p in found)
        raise RuntimeError(f"no readable checkpoint: {names} cannot be read; remove to start anew")
    return None
