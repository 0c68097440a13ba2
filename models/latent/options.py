# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pyro_nmm.checkpoints import (
    fingerprint,
    generators,
    restore_generators,
    resume,
    save_checkpoint,
)
from pyro_nmm.validation import check_integers, check_positive


@dataclass(frozen=True)
class FieldRun:
    """
    Options of :func:`fit_field`.

    :param int num_starts: fits, of which one is kept: the first with flat attention, others along a
        feature of the edges or against it. One is often enough if answers name labels.
    :param int num_steps: of expectation maximisation. Take more if :attr:`HiddenField.chains`
        disagree.
    :param int num_draws: of each of ``num_chains`` chains of Gibbs sweeps, after the fit.
    :param float lr: of the prior's parameters.
    :param progress: wraps the range of steps, for example ``tqdm``.
    :param Path checkpoint: where start ``k`` is saved every ``save_every`` steps, as
        ``<checkpoint>.k``. Interrupted and called again after the same seed, a fit ends with the
        same values, bit for bit on a CPU. A checkpoint of other data or options is refused.
    """

    num_starts: int = 5
    num_steps: int = 120
    num_chains: int = 4
    num_draws: int = 50
    lr: float = 0.1
    progress: Callable[[range], Iterable[int]] = iter
    checkpoint: str | Path | None = None
    save_every: int = 20

    def __post_init__(self) -> None:
        check_positive(lr=self.lr)
        names = "num_starts", "num_steps", "num_chains", "num_draws", "save_every"
        check_integers(1, **{name: getattr(self, name) for name in names})


@dataclass(frozen=True)
class FieldSampling:
    """Options of :func:`sample_field`; chains sweep ``num_sweeps`` times before they are drawn."""

    num_chains: int = 4
    num_draws: int = 50
    num_sweeps: int = 20

    def __post_init__(self) -> None:
        check_integers(1, **vars(self))


@dataclass(frozen=True)
class Saved:
    """The file of one start of a fit, or none."""

    path: Path | None
    every: int
    parts: dict[str, Any]
    settings: dict[str, str]

    @classmethod
    def of(
        cls, how: FieldRun, start: int, prior: nn.Module, optimizer: torch.optim.Optimizer,
        **settings: object,
    ) -> "Saved":  # fmt: skip
        parts = {"prior": prior, "optimizer": optimizer}
        if how.checkpoint is None:
            return cls(None, how.save_every, parts, {})
        path = Path(how.checkpoint)
        settings |= {"start": start, "num_steps": how.num_steps, "num_chains": how.num_chains}
        here = fingerprint(prior, optimizer, settings)
        return cls(path.with_name(f"{path.name}.{start}"), how.save_every, parts, here)

    def load(self) -> Mapping[str, Any] | None:
        """The stored state, after parts and generators have been set to it."""
        if self.path is None or (state := resume(self.path, self.settings)) is None:
            return None
        for name, part in self.parts.items():
            part.load_state_dict(state[name])
        restore_generators(state["generators"])
        return state

    def save(self, steps: int, last: bool, **state: Any) -> None:
        if self.path is not None and (last or steps % self.every == 0):
            state |= {name: part.state_dict() for name, part in self.parts.items()}
            state |= {"settings": self.settings, "steps": steps, "generators": generators()}
            save_checkpoint(state, self.path)
