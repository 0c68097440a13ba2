# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The two loops that fit: until validation stops it, or for a number of steps."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pyro
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from pyro_nmm.guides.fitting.checkpoints import (
    generators,
    resume,
    save_checkpoint,
    set_generators,
)
from pyro_nmm.guides.fitting.fingerprint import fingerprint
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


def run_steps(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
    backward: Callable[[int], float],
    *,
    num_steps: int,
    checkpoint: Path | None = None,
    save_every: int = 100,
    settings: Mapping[str, object] = {},
    progress: Callable[[range], Iterable[int]] = iter,
) -> list[float]:
    """
    A number of steps, with a schedule of the learning rate. Interrupted and called again with the
    same arguments it goes on, as :func:`train` does, of which the other parameters are.

    :param schedule: of the optimiser's rates.
    :param backward: computes gradients in a step, with them at zero, and returns the loss.
    :return: every step's loss. The module is in training mode.
    :raises ValueError: for a loss that is not finite, weights that are NaN, which are not saved,
        and a checkpoint of another run.
    """
    check_integers(1, num_steps=num_steps, save_every=save_every)
    losses: list[float] = []
    here: dict[str, str] = {}
    if checkpoint is not None:
        here = fingerprint(module, optimizer, {**settings, "num_steps": num_steps})
        if (state := resume(checkpoint, here)) is not None:
            module.load_state_dict(state["module"])
            optimizer.load_state_dict(state["optimizer"])
            schedule.load_state_dict(state["schedule"])
            losses = state["losses"]
            set_generators(state["generators"])
    module.train()
    for step in progress(range(len(losses), num_steps)):
        optimizer.zero_grad()
        losses.append(backward(step))
        check_loss(losses[-1], f"step {step}")
        optimizer.step()
        schedule.step()
        if len(losses) % save_every and len(losses) < num_steps:
            continue
        check_weights(module, f"step {step}")
        if checkpoint is not None:
            state = {"settings": here, "module": module.state_dict(),
                     "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict(),
                     "losses": losses, "generators": generators()}  # fmt: skip
            save_checkpoint(state, checkpoint)
    return losses


@contextmanager
def unvalidated() -> Iterator[None]:
    """Around Pyro's steps: what was checked before need not be again, and NaN is our error."""
    with warnings.catch_warnings(), pyro.validation_enabled(False):
        warnings.filterwarnings("ignore", "Encountered (NaN|.*inf)")
        yield


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
