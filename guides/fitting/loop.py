# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Early stopping and checkpoints, for any module, loss and optimiser."""

from __future__ import annotations

import copy
import io
import itertools
import math
import os
import shutil
import uuid
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from pyro_nmm.guides.fitting.fingerprint import differences, fingerprint
from pyro_nmm.validation import check_integers


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
    settings: Mapping[str, object] | str = "",
    progress: Callable[[range], Iterable[int]] = iter,
) -> list[tuple[float, ...]]:
    r"""
    Steps until the validation score has not improved for ``patience`` epochs; then ``module``
    has the parameters and buffers of the best epoch,

    .. math::

        e^\star = \arg\max_e \, \text{score}_e .

    Interrupted at any moment and called again with the same arguments, it ends with the same
    parameters, bit for bit on a CPU: a checkpoint holds the module, the optimiser, the best
    epoch and the state of torch's generators. Called with a larger ``num_epochs`` it goes on.

    What else differs from the run that made a checkpoint is an error: the seed, the module's
    weights at the call and the plain attributes of its parts, the optimiser's numbers, and
    ``settings``. So a script that is started again builds the network anew, from the same seed.
    What functions compute cannot be seen, nor what ``backward`` and ``validate`` close over: name
    it in ``settings``.

    :param nn.Module module: everything that learns or remembers.
    :param optimizer: of its parameters.
    :param backward: computes gradients, with them at zero, and returns the loss.
    :param validate: returns numbers, compared in turn; larger is better.
    :param Path checkpoint: where to save, every ``save_every`` epochs and at the end; the one
        before is kept beside it as ``<name>.previous`` and used if the newest cannot be read,
        which is then renamed to ``<name>.unreadable``.
    :param settings: what else the run depends on, by name, tensors among them; or one text.
    :param progress: wraps the range of epochs, for example ``tqdm``.
    :return: the score of every epoch. The module is in evaluation mode.
    :raises ValueError: if a checkpoint is of another run, of a longer one, or of no run; and if a
        loss or a score is not finite, or a weight NaN: such an epoch is not stored.
    :raises RuntimeError: if neither checkpoint can be read.
    """
    check_integers(1, num_epochs=num_epochs, save_every=save_every)
    check_integers(0, patience=patience)
    best, scores, here = copy.deepcopy(module.state_dict()), [], {}
    if checkpoint is not None:
        named = settings if isinstance(settings, Mapping) else {"settings": settings}
        here = fingerprint(module, optimizer, named)
        if (state := resume(checkpoint, here)) is not None:
            best, scores = state["best"], [tuple(score) for score in state["scores"]]
            if _end(scores, num_epochs, patience) < len(scores):
                raise ValueError(
                    f"checkpoint {checkpoint} holds {len(scores)} epochs, more than {num_epochs=} "
                    f"and {patience=} allow: ask for as many, or give another path"
                )
            module.load_state_dict(state["module"])
            optimizer.load_state_dict(state["optimizer"])
            set_generators(state["generators"])
    stored = len(scores)

    def save() -> None:
        nonlocal stored
        if checkpoint is not None and len(scores) > stored:
            state = {
                "settings": here,
                "module": module.state_dict(),
                "optimizer": optimizer.state_dict(),
                "best": best,
                "scores": scores,
                "generators": generators(),
            }
            save_checkpoint(state, checkpoint)
            stored = len(scores)

    for epoch in progress(range(len(scores), num_epochs)):
        if epoch - _best_epoch(scores) > patience:
            break
        module.train()
        optimizer.zero_grad()
        check_loss(backward(), f"epoch {epoch}")
        optimizer.step()
        check_weights(module, f"epoch {epoch}")
        module.eval()
        with torch.no_grad():
            score = tuple(validate())
        if any(math.isnan(number) for number in score):
            raise ValueError(
                f"validate returned {score} in epoch {epoch}: look for NaN in the loss, or "
                f"for a validation mask that selects no node"
            )
        scores.append(score)
        if _best_epoch(scores) == epoch:
            best = copy.deepcopy(module.state_dict())
        if len(scores) % save_every == 0:
            save()
    save()
    module.load_state_dict(best)
    module.eval()
    return scores


def _end(scores: list[tuple[float, ...]], num_epochs: int, patience: int) -> int:
    """How many of these epochs a run from the start would have."""
    best = 0
    for epoch, score in enumerate(scores[:num_epochs]):
        if epoch - best > patience:
            return epoch
        best = epoch if score > scores[best] else best
    return min(len(scores), num_epochs)


def _best_epoch(scores: list[tuple[float, ...]]) -> int:
    return max(range(len(scores)), key=lambda e: (scores[e], -e), default=0)


def generators() -> list:
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return [torch.get_rng_state(), *cuda]


def set_generators(states: list) -> None:
    torch.set_rng_state(states[0])
    if len(states) > 1 and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(states[1:])


def check_loss(loss: float, when: str) -> None:
    if not math.isfinite(loss):
        raise ValueError(f"the loss is {loss} in {when}: lower lr, or look for NaN in the data")


def check_weights(module: nn.Module, when: str) -> None:
    """A loss may be finite where its gradient is not."""
    for name, value in module.named_parameters():
        if not is_lazy(value) and value.isnan().any():
            raise ValueError(
                f"{name} holds NaN after {when}: lower lr, or look for what has no finite gradient"
            )


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
