# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The loop of every fit: until validation stops it, or for a number of steps."""

import copy
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pyro
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from pyro_nmm.arguments import check_integers, check_positive
from pyro_nmm.checkpoints import Saved, as_path, fingerprint
from pyro_nmm.fitting import with_gradients


@dataclass(frozen=True)
class Run:
    """
    How a fit is watched, saved and resumed: options of every fit that takes ``checkpoint``.

    Interrupted at any moment and called again with the same arguments, a fit ends with the same
    parameters, bit for bit on a CPU. A checkpoint of another run is refused: with another seed,
    other initial weights, plain attributes of the module's parts, numbers of the optimiser, or
    ``settings``. So a script that is started again builds the network anew.

    :param Path checkpoint: where to save, every ``save_every`` steps and at the end. The one before
        is kept as ``<name>.previous`` and used if the newest cannot be read. If two processes save
        to one path, the later save stays.
    :param settings: further values on which the run and its functions depend: tensors and numbers
        by name, or one text.
    :param progress: wraps the range of steps or epochs, for example ``tqdm``.
    """

    checkpoint: Path | None = None
    save_every: int = 20
    settings: Mapping[str, object] | str = ""
    progress: Callable[[range], Iterable[int]] = iter

    def __post_init__(self) -> None:
        check_integers(1, save_every=self.save_every)

    def also(self, **settings: object) -> dict[str, Any]:
        """Options of :func:`train`, with more settings."""
        given = self.settings if isinstance(self.settings, Mapping) else {"settings": self.settings}
        options = {each.name: getattr(self, each.name) for each in fields(Run)}
        return options | {"settings": settings | dict(given)}


@dataclass(frozen=True)
class Steps(Run):
    """Options of :class:`Run`, and of a fit by ``num_steps`` of Adam at rate ``lr``."""

    num_steps: int = 1000
    lr: float = 0.05

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integers(1, num_steps=self.num_steps)
        check_positive(lr=self.lr)

    def train(
        self, module: nn.Module, optimizer: torch.optim.Optimizer,
        backward: Callable[[int], float], rate: Callable[[int], float] | None = None,
        **settings: object,
    ) -> list[float]:  # fmt: skip
        """The loss of every step, at the rate ``lr`` times ``rate`` of the step."""
        schedule = None if rate is None else torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
        run = self.also(num_steps=self.num_steps, **settings) | {"schedule": schedule}
        return train(module, optimizer, backward, num_epochs=self.num_steps, **run)


@with_gradients
def train(
    module: nn.Module, optimizer: torch.optim.Optimizer, backward: Callable[[int], float],
    validate: Callable[[], tuple[float, ...]] | None = None, *, num_epochs: int, patience: int = 0,
    schedule: torch.optim.lr_scheduler.LRScheduler | None = None, **run: Any,
) -> list:  # fmt: skip
    r"""
    Steps until the validation score has not improved for ``patience`` epochs; then ``module`` has
    the parameters and buffers of the best epoch. Without ``validate``, a number of steps. Called
    with a larger ``num_epochs`` a validated run continues; ``run`` are the options of :class:`Run`.

    :param nn.Module module: everything that learns or remembers.
    :param backward: computes gradients in a step, with them at zero, and returns the loss.
    :param validate: returns numbers, compared in turn; larger is better.
    :return: the score of every epoch, and the module is in evaluation mode; or the loss of every
        step, and the module is in training mode.
    :raises ValueError: if a checkpoint is of another or a longer run; and if a loss or a score is
        not finite, or a weight NaN: such an epoch is not stored.
    """
    check_integers(1, num_epochs=num_epochs)
    check_integers(0, patience=patience)
    how, unit = Run(**run), "step" if validate is None else "epoch"
    best = None if validate is None else copy.deepcopy(module.state_dict())
    history: list = []
    parts: dict[str, Any] = {"module": module, "optimizer": optimizer}
    parts |= {} if schedule is None else {"schedule": schedule}
    path = as_path(how.checkpoint)
    here = {} if path is None else fingerprint(module, optimizer, how.also()["settings"])
    saved = Saved(path, parts, here)
    if (state := saved.read()) is not None:
        best, history, most = state["best"], state["history"], num_epochs
        if validate is not None:
            history = [tuple(score) for score in history]
            stops = (e for e in range(len(history)) if e - _best_epoch(history[:e]) > patience)
            most = min(next(stops, most), most)
        if len(history) > most:
            raise ValueError(
                f"checkpoint {path} holds {len(history)} {unit}s, more than "
                f"{num_epochs=} and {patience=} allow"
            )
        saved.restore(state)
        _check_weights(module, f"reading {path}", "remove the checkpoint")
    stored = len(history)

    def save() -> None:
        nonlocal stored
        if len(history) > stored:
            saved.write(best=best, history=history)
            stored = len(history)

    for step in how.progress(range(len(history), num_epochs)):
        if validate is not None and step - _best_epoch(history) > patience:
            break
        module.train()
        optimizer.zero_grad()
        loss = backward(step)
        if not math.isfinite(loss):
            cure = "lower lr, or look for NaN in the data"
            raise ValueError(f"the loss is {loss} in {unit} {step}: {cure}")
        optimizer.step()
        if schedule is not None:
            schedule.step()
        due = (step + 1) % how.save_every == 0
        if validate is not None or due or step + 1 == num_epochs:
            _check_weights(module, f"{unit} {step}")
        history.append(loss if validate is None else _score(module, validate, step))
        if validate is not None and _best_epoch(history) == step:
            best = copy.deepcopy(module.state_dict())
        if due:
            save()
    save()
    if best is not None:
        module.load_state_dict(best)
        module.eval()
    return history


@torch.no_grad()
def _score(module: nn.Module, validate: Callable[[], tuple[float, ...]], epoch: int) -> tuple:
    module.eval()
    score = tuple(validate())
    if any(math.isnan(number) for number in score):
        cure = "look for NaN in the loss, or an empty validation mask"
        raise ValueError(f"validate returned {score} in epoch {epoch}: {cure}")
    return score


def _best_epoch(scores: list[tuple[float, ...]]) -> int:
    return max(range(len(scores)), key=lambda e: (scores[e], -e), default=0)


@contextmanager
def unvalidated() -> Iterator[None]:
    """Around Pyro's steps, whose inputs are checked before, and whose NaN is our error."""
    with warnings.catch_warnings(), pyro.validation_enabled(False):
        warnings.filterwarnings("ignore", "Encountered (NaN|.*inf)")
        yield


def _check_weights(
    module: nn.Module, after: str, cure: str = "lower lr, or mend its gradient"
) -> None:
    """A loss may be finite where its gradient is not."""
    for name, value in module.named_parameters():
        if not is_lazy(value) and value.isnan().any():
            raise ValueError(f"{name} holds NaN after {after}: {cure}")
