# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Fits: options as keywords, any gradient mode, the loop of steps or epochs, checkpoints, LBFGS."""

import contextlib
import copy
import functools
import hashlib
import inspect
import math
import os
import re
import warnings
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.nn.parameter import is_lazy
from torch_geometric.data import Data

from pyro_nmm.arguments import check_integers, check_positive

P = ParamSpec("P")
R = TypeVar("R")


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
        what = f"{name} was made in torch.inference_mode() and used there, so it cannot learn"
        raise ValueError(f"{what}: {cure}") from None


def with_options(fit: Callable[..., R]) -> Callable[..., R]:
    """A fit that takes the fields of its last argument, a frozen data class, as keywords."""
    *arguments, last = inspect.signature(fit).parameters.values()
    options = {}
    for field in fields(last.default):
        default = getattr(last.default, field.name)
        options[field.name] = last.replace(name=field.name, default=default, annotation=field.type)

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
    """How a fit is watched, saved and resumed: options of every fit that takes ``checkpoint``.

    Interrupted at any moment and called again with the same arguments, a fit ends with the same
    parameters, bit for bit on a CPU. A checkpoint of another run is refused: with another seed,
    other initial weights, plain attributes of the module's parts, numbers of the optimiser, or
    ``settings``. So a script that is started again builds the network anew.

    :param Path checkpoint: where to save, every ``save_every`` steps and at the end, by
        :func:`~pyro_nmm.guides.fitting.save_checkpoint`; the one before serves if it is unreadable.
    :param settings: what else the run depends on: tensors and numbers by name, or one text.
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
    r"""Steps until the validation score has not improved for ``patience`` epochs; then ``module``
    has the parameters and buffers of the best epoch. Without ``validate``, a number of steps.
    Called with a larger ``num_epochs`` a validated run continues.

    :param nn.Module module: everything that learns or remembers.
    :param backward: computes gradients in a step, with them at zero, and returns the loss.
    :param validate: returns numbers, compared in turn; larger is better.
    :param options: keywords of :class:`Run`.
    :return: every epoch's score, in evaluation mode; or every step's loss, in training mode.
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
        _check_nan(module, f"reading {saved.path}", "remove the checkpoint")
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
            _check_nan(module, f"{unit} {step}")
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


def _check_nan(module: nn.Module, after: str, cure: str = "lower lr, or mend its gradient") -> None:
    """A loss may be finite where its gradient is not."""
    for name, value in module.named_parameters():
        if not is_lazy(value) and value.isnan().any():
            raise ValueError(f"{name} holds NaN after {after}: {cure}")


class Checkpoint:
    """The file of a run, or none: its parts by name, and settings. A run of others refuses it."""

    def __init__(self, path: str | Path | None, parts: Mapping, settings: Mapping) -> None:
        self.path, self.parts = as_path(path), parts
        self.settings = {} if self.path is None else dict(fingerprint(parts, settings))

    def read(self) -> dict | None:
        """The state, or ``None`` if there is no file."""
        if self.path is None or (state := load_checkpoint(self.path)) is None:
            return None
        there = state.get("settings") if isinstance(state, dict) else None
        cure = f"remove it or give another path (it is {self.path}*)"
        if not isinstance(there, dict):
            raise ValueError(f"checkpoint {self.path} holds no run of this kind: {cure}")
        pairs = {name: (there.get(name), self.settings.get(name)) for name in self.settings | there}
        differences = [f"{name} ({old} there, {new} here)"
                       for name, (old, new) in pairs.items() if old != new]  # fmt: skip
        if differences:
            seed = "to resume, set the same pyro.set_rng_seed before both runs"
            what = f"is of another run, which differs in {', '.join(differences[:6])}"
            raise ValueError(f"checkpoint {self.path} {what}: {cure}; {seed}")
        return state

    def restore(self, state: Mapping[str, Any]) -> None:
        """Set the parts and torch's generators."""
        for name, part in self.parts.items():
            part.load_state_dict(state[name])
        torch.set_rng_state(state["generators"][0])
        torch.cuda.set_rng_state_all(state["generators"][1 : 1 + torch.cuda.device_count()])

    def write(self, **state: Any) -> None:
        """Save the state, the parts and the generators."""
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
    """Write a state aside and rename it; the one before stays as ``<name>.previous``."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileNotFoundError):  # the first save
            path.replace(path.with_name(path.name + ".previous"))
        temporary.replace(path)
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):  # torch.save hides a full disk behind its own
            raise error.__context__ from None
        raise
    finally:
        temporary.unlink(missing_ok=True)


def load_checkpoint(path: Path) -> Any:
    """The newest readable checkpoint, or ``None`` if there is none. An unreadable one is renamed to
    ``<name>.unreadable``, with a warning, if the previous one is readable.
    """
    path, unreadable = Path(path), []
    for file in (path, path.with_name(path.name + ".previous")):
        try:
            with zipfile.ZipFile(file) as archive:  # torch.load compares no checksums
                summed = any(entry.CRC for entry in archive.infolist())
                if summed and (damaged := archive.testzip()):
                    raise ValueError(f"{damaged} does not match its checksum")
            state = torch.load(file, weights_only=True, map_location="cpu")
        except FileNotFoundError:
            continue
        except (OSError, MemoryError):  # they may pass
            raise
        except Exception as error:  # noise can make torch.load raise almost anything
            warnings.warn(f"checkpoint {file} cannot be read ({error})", stacklevel=2)
            unreadable.append(file)
            continue
        for damaged_file in unreadable:  # or the next save would replace the readable one
            damaged_file.replace(damaged_file.with_name(damaged_file.name + ".unreadable"))
        return state
    if unreadable:
        names = " and ".join(map(str, unreadable))
        raise RuntimeError(f"no readable checkpoint: {names} cannot be read; remove to start anew")
    return None


def fingerprint(parts: Mapping, settings: Mapping) -> Iterator[tuple[str, str]]:
    """Name and text of every setting, plain attribute of a part, of the seed and the weights."""
    yield "seed", str(torch.initial_seed())
    for name, value in settings.items():
        yield name, _text(value)
    for name, part in parts.items():
        if isinstance(part, torch.optim.Optimizer):
            yield name, type(part).__qualname__
            for key in part.defaults:
                yield f"{name}.{key}", _text([group[key] for group in part.param_groups])
        if isinstance(part, nn.Module):
            yield "initial weights", _text(part.state_dict())
            frozen = [key for key, value in part.named_parameters() if not value.requires_grad]
            yield "frozen parameters", _text(frozen)
            for place, inner in part.named_modules(prefix=name):
                yield place, type(inner).__qualname__
                for key, value in vars(inner).items():
                    # Private ones are torch's tables and what layers keep from call to call.
                    if not key.startswith("_") and key != "training":
                        yield f"{place}.{key}", _text(value)


def _text(value: object) -> str:
    """The same of equal values in every process; of tensors and long texts a digest."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        value = torch.tensor(value)
    if isinstance(value, Tensor):
        return "uninitialized" if is_lazy(value) else _tensor(value)
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, set | frozenset):
        value = sorted(value, key=repr)
    if is_dataclass(value) and not isinstance(value, type):
        entries = {field.name: getattr(value, field.name) for field in fields(value)}
        text = type(value).__qualname__ + _text(entries)
    elif isinstance(value, Mapping):
        text = "{" + ", ".join(f"{key!r}: {_text(item)}" for key, item in value.items()) + "}"
    elif isinstance(value, list | tuple):
        text = "[" + ", ".join(map(_text, value)) + "]"
    elif re.search(r"\b0x[0-9a-f]+", text := repr(value)):  # an address
        text = getattr(value, "__qualname__", type(value).__qualname__)
    return text if len(text) <= 80 else _digest(text.encode())


def _tensor(value: Tensor) -> str:
    value = value.detach().cpu()
    if value.layout != torch.strided:
        entries = value.to_sparse_coo().coalesce()
        return _text((value.shape, entries.indices(), entries.values()))
    # Bytes, because NumPy knows no bfloat16; a copy, because one entry may have stride zero.
    plain = value.as_subclass(Tensor).resolve_conj().resolve_neg().flatten()
    plain = plain.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    return _digest(f"{value.dtype} {tuple(value.shape)}".encode(), plain.numpy().data)


def _digest(*contents: bytes | memoryview) -> str:
    return "#" + hashlib.sha256(b"".join(contents)).hexdigest()[:16]
