# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Fits: in any gradient mode, with options as keywords, by steps of Adam or by LBFGS."""

import copy
import functools
import inspect
import math
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ParamSpec, TypedDict, TypeVar

import torch
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.nn.parameter import is_lazy
from torch.optim.lr_scheduler import LambdaLR

from pyro_nmm.arguments import check_integers, check_positive
from pyro_nmm.checkpoints import Checkpoint

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")


def with_gradients(fit: Callable[P, R]) -> Callable[P, R]:
    """A fit with gradients on and inference mode off, whose arguments become :func:`ordinary`."""

    @functools.wraps(fit)
    def run(*args: P.args, **options: P.kwargs) -> R:
        with torch.inference_mode(False), torch.enable_grad():
            return fit(*ordinary(args), **ordinary(options))

    return run


def ordinary(value: Any) -> Any:
    """A value through which gradients pass. Tensors made in inference mode are copied, in tuples,
    dictionaries, distributions and ``Data`` too; a module's change in place, for optimisers.
    """
    from torch_geometric.data import Data

    if isinstance(value, nn.Module):
        for name, tensor in (*value.named_parameters(), *value.named_buffers()):
            if tensor.data.is_inference():  # of a lazy parameter too
                try:
                    torch.utils.swap_tensors(tensor, copy.deepcopy(tensor))
                except RuntimeError:  # of weak references, such as those of Pyro's store
                    what = f"{name} of {type(value).__name__} was made in torch.inference_mode()"
                    raise ValueError(f"{what} and used: pass copy.deepcopy(network)") from None
    elif isinstance(value, Tensor):
        return value.clone() if value.is_inference() else value
    elif isinstance(value, Data):
        return copy.copy(value).apply(ordinary)
    elif isinstance(value, Distribution):
        value = copy.copy(value)
        vars(value).update(ordinary(vars(value)))
    elif type(value) is dict:
        return {name: ordinary(item) for name, item in value.items()}
    elif isinstance(value, tuple):
        parts = map(ordinary, value)
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value


def with_options(fit: Callable[P, R]) -> Callable[P, R]:
    """A fit whose ``options``, a frozen data class, take the fields that are given as keywords. Its
    last two arguments are ``options`` and the keywords, whose types a ``TypedDict`` states.
    """
    *named, last, _ = inspect.signature(fit).parameters.values()
    known = {parameter.name for parameter in (*named, last)}

    @functools.wraps(fit)
    def run(*args: P.args, **keywords: P.kwargs) -> R:
        changes: Any = {name: keywords.pop(name) for name in keywords.keys() - known}
        given: Any = keywords.get(last.name, last.default)
        keywords[last.name] = replace(given, **changes)
        return fit(*args, **keywords)

    return run


def bar(steps: Iterable[S]) -> Iterable[S]:
    """Steps with a bar of their progress, as Pyro's MCMC has; ``TQDM_DISABLE=1`` silences it."""
    from tqdm.auto import tqdm

    silent = True if os.environ.get("TQDM_DISABLE") == "1" else None
    return tqdm(steps, delay=2, disable=silent, leave=False)


def minimise(loss: Callable[[], Tensor], parameters: Iterable[Tensor], max_steps: int) -> None:
    """Change parameters to a minimum of a differentiable function of them, by LBFGS."""
    optimizer = torch.optim.LBFGS(parameters, max_iter=max_steps, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = loss()
        value.backward()
        return value

    with torch.enable_grad():
        optimizer.step(closure)


class StepOptions(TypedDict, total=False):
    """Types of the fields of :class:`Steps`, as keywords of a fit."""

    num_steps: int
    lr: float
    checkpoint: str | Path | None
    save_every: int
    progress: Callable[[range], Iterable[int]]


@dataclass(frozen=True)
class Steps:
    """Options of every fit by steps of an optimiser.

    A fit that is killed and called again with the same arguments ends with the same parameters, bit
    for bit on a CPU. The seed, the initial weights, the data and all options must be the same, so a
    script that is started again builds the network anew.

    :param int num_steps: steps of Adam at the rate ``lr``.
    :param Path checkpoint: where to save, every ``save_every`` steps and at the end. A file of
        other data or options is refused; a function is identified by its name alone.
    :param progress: wraps the range of steps. Default a bar of ``tqdm`` on a terminal or in a
        notebook, after two seconds; ``iter`` shows none, and nor does the environment variable
        ``TQDM_DISABLE=1``.
    :raises ValueError: for numbers that are not positive, and a ``checkpoint`` that is no path.
    """

    num_steps: int = 1000
    lr: float = 0.05
    checkpoint: str | Path | None = None
    save_every: int = 20
    progress: Callable[[range], Iterable[int]] = bar

    def __post_init__(self) -> None:
        check_integers(1, num_steps=self.num_steps, save_every=self.save_every)
        check_positive(lr=self.lr)
        if self.checkpoint is not None:
            path = self.checkpoint
            if not isinstance(path, str | os.PathLike) or not Path(path).name:
                raise ValueError(f"checkpoint must be the path of a file, got {path!r}")

    def train(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        backward: Callable[[int], float],
        rate: Callable[[int], float] = lambda step: 1.0,
        **settings: object,
    ) -> list[float]:
        """The loop of every fit.

        :param nn.Module module: everything that learns or remembers.
        :param backward: computes the gradients of a step, and returns the loss.
        :param rate: of a step, times ``lr``.
        :param settings: what else the run depends on.
        :return: the loss of every step.
        :raises ValueError: if a loss is not finite or a weight is NaN, which is never saved, and if
            the checkpoint is of another run.
        """
        schedule = LambdaLR(optimizer, rate)
        parts = {"module": module, "optimizer": optimizer, "schedule": schedule}
        settings["num_steps"] = self.num_steps
        saved = Checkpoint(self.checkpoint, parts, settings)
        losses = saved.resume()
        for step in self.progress(range(len(losses), self.num_steps)):
            module.train()
            optimizer.zero_grad()
            losses.append(backward(step))
            if not math.isfinite(losses[-1]):
                cure = "lower lr, or look for NaN in the data"
                raise ValueError(f"the loss is {losses[-1]} in step {step}: {cure}")
            optimizer.step()
            schedule.step()
            if (step + 1) % self.save_every == 0 or step + 1 == self.num_steps:
                for name, value in module.named_parameters():  # the gradient may be NaN
                    if not is_lazy(value) and value.isnan().any():
                        cure = "lower lr, or mend its gradient"
                        raise ValueError(f"{name} holds NaN after step {step}: {cure}")
                saved.save(losses)
        return losses
