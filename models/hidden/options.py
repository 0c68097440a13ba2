# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from pyro_nmm.arguments import check_integers, check_positive
from pyro_nmm.checkpoints import as_path


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
    :param Path checkpoint: start ``k`` is saved every ``save_every`` steps as ``<checkpoint>.k``,
        and the save before as ``<checkpoint>.k.previous``. Interrupted and called again after the
        same seed, a fit ends with the same values, bit for bit on a CPU. A checkpoint of other
        data, parameters or steps is refused, but plain attributes alone are compared.
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
        as_path(self.checkpoint)
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
