# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Fits: options as keywords, any gradient mode, the loop of steps or epochs, and LBFGS."""

import copy
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.nn.parameter import is_lazy
from torch_geometric.data import Data

from pyro_nmm.arguments import check_integers, check_positive
from pyro_nmm.checkpoints import Checkpoint

P = ParamSpec("P")
R = TypeVar("R")


def with_gradients(fit: Callable[P, R]) -> Callable[P, R]:
    """
    A fit that switches gradients on and inference mode off. The caller's mode is as before
    afterwards. Arguments made in inference mode become :func:`ordinary`.

    >>> @with_gradients
    ... def slope(x):
    ...     return torch.autograd.grad(x.requires_grad_().square(), x)[0]
    >>> with torch.inference_mode():
    ...     slope(torch.tensor(3.0))
    tensor(6.)

    """

    @functools.wraps(fit)
    def run(*args: P.args, **options: P.kwargs) -> R:
        with torch.inference_mode(False), torch.enable_grad():
            return fit(*ordinary(args), **ordinary(options))

    return run


def ordinary(value: Any) -> Any:
    """
    A value through which gradients pass. Tensors made in inference mode are copied, in tuples,
    dictionaries, distributions and PyG's ``Data`` too. Parameters and buffers of modules stay the
    same objects, because an optimiser may hold them.
    """
    if isinstance(value, nn.Module):
        for name, tensor in (*value.named_parameters(), *value.named_buffers()):
            if tensor.data.is_inference():  # of a lazy parameter too
                _replace(tensor, f"{name} of {type(value).__name__}")
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


def _replace(tensor: Tensor, name: str) -> None:
    """An ordinary tensor in the same object."""
    try:
        torch.utils.swap_tensors(tensor, copy.deepcopy(tensor))
    except RuntimeError:  # of weak references, such as those of Pyro's store
        cure = "make the network outside of inference mode, or pass copy.deepcopy(network)"
        raise ValueError(
            f"{name} was made in torch.inference_mode() and used there, so it cannot learn: {cure}"
        ) from None


def with_options(fit: Callable[..., R]) -> Callable[..., R]:
    """
    A fit that takes the fields of its last argument, a frozen data class, as keywords. Its
    signature has them in place of that argument.

    >>> @dataclass(frozen=True)
    ... class Steps:
    ...     num_steps: int = 10
    ...     lr: float = 0.1
    >>> @with_options
    ... def fit(network, *, steps: Steps = Steps()):
    ...     return steps
    >>> inspect.signature(fit)
    <Signature (network, *, num_steps: int = 10, lr: float = 0.1)>
    >>> fit(None, lr=0.2)
    Steps(num_steps=10, lr=0.2)

    """
    *arguments, last = inspect.signature(fit).parameters.values()
    options = {
        field.name: last.replace(
            name=field.name, default=getattr(last.default, field.name), annotation=field.type
        )
        for field in fields(last.default)
    }

    @functools.wraps(fit)
    def run(*args: Any, **keywords: Any) -> R:
        changes = {name: keywords.pop(name) for name in options if name in keywords}
        if changes:
            keywords[last.name] = replace(keywords.get(last.name, last.default), **changes)
        return fit(*args, **keywords)

    signature = inspect.Signature([*arguments, *options.values()])
    run.__signature__ = signature  # type: ignore[attr-defined]
    return run


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

    def also(self, **settings: object) -> "Run":
        """The same with more settings."""
        return replace(self, settings=settings | self.named_settings)

    @property
    def named_settings(self) -> dict[str, object]:
        """Settings by name, also if they are one text."""
        settings = self.settings
        return dict(settings) if isinstance(settings, Mapping) else {"settings": settings}


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
        return train(
            module, optimizer, backward, num_epochs=self.num_steps, schedule=schedule,
            options=self.also(num_steps=self.num_steps, **settings),
        )  # fmt: skip


@with_options
@with_gradients
def train(
    module: nn.Module, optimizer: torch.optim.Optimizer, backward: Callable[[int], float],
    validate: Callable[[], tuple[float, ...]] | None = None, *, num_epochs: int, patience: int = 0,
    schedule: torch.optim.lr_scheduler.LRScheduler | None = None, options: Run = Run(),
) -> list:  # fmt: skip
    r"""
    Steps until the validation score has not improved for ``patience`` epochs; then ``module`` has
    the parameters and buffers of the best epoch. Without ``validate``, a number of steps. Called
    with a larger ``num_epochs`` a validated run continues.

    :param nn.Module module: everything that learns or remembers.
    :param backward: computes gradients in a step, with them at zero, and returns the loss.
    :param validate: returns numbers, compared in turn; larger is better.
    :param options: keywords of :class:`Run`.
    :return: the score of every epoch, and the module is in evaluation mode; or the loss of every
        step, and the module is in training mode.
    :raises ValueError: if a checkpoint is of another or a longer run; and if a loss or a score is
        not finite, or a weight NaN: such an epoch is not stored.
    """
    check_integers(1, num_epochs=num_epochs)
    check_integers(0, patience=patience)
    unit = "step" if validate is None else "epoch"
    best = None if validate is None else copy.deepcopy(module.state_dict())
    history: list = []
    parts: dict[str, Any] = {"module": module, "optimizer": optimizer}
    parts |= {} if schedule is None else {"schedule": schedule}
    saved = Checkpoint(options.checkpoint, parts, options.named_settings)
    if (state := saved.read()) is not None:
        best, history = state["best"], state["history"]
        epochs = range(len(history)) if validate else ()
        late = any(epoch - _best_epoch(history[:epoch]) > patience for epoch in epochs)
        if late or len(history) > num_epochs:
            raise ValueError(
                f"checkpoint {saved.path} holds {len(history)} {unit}s, more than "
                f"{num_epochs=} and {patience=} allow"
            )
        saved.restore(state)
        _check_weights(module, f"reading {saved.path}", "remove the checkpoint")
    stored = len(history)
    for step in options.progress(range(stored, num_epochs)):
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
        due = (step + 1) % options.save_every == 0
        if validate is not None or due or step + 1 == num_epochs:
            _check_weights(module, f"{unit} {step}")
        history.append(loss if validate is None else _score(module, validate, step))
        if validate is not None and _best_epoch(history) == step:
            best = copy.deepcopy(module.state_dict())
        if due:
            saved.write(best=best, history=history)
            stored = len(history)
    if len(history) > stored:
        saved.write(best=best, history=history)
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


def _check_weights(
    module: nn.Module, after: str, cure: str = "lower lr, or mend its gradient"
) -> None:
    """A loss may be finite where its gradient is not."""
    for name, value in module.named_parameters():
        if not is_lazy(value) and value.isnan().any():
            raise ValueError(f"{name} holds NaN after {after}: {cure}")
