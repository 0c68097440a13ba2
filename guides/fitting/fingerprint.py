# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""What tells one run from another: a table of texts, which a checkpoint holds."""

import dataclasses
import enum
import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

#: Values whose repr says all, and is the same in every process.
PLAIN = (bool, int, float, complex, str, bytes, type(None), enum.Enum, torch.dtype, torch.device)


def fingerprint(
    module: nn.Module, optimizer: torch.optim.Optimizer, settings: Mapping[str, object]
) -> dict[str, str]:
    """
    One line for every setting, every plain attribute of every part of a network, the optimiser's
    numbers, the seed and the weights at this moment. Tensors and long texts stand as digests. A
    function stands as its name: what it computes cannot be seen.

    >>> module = nn.Dropout(0.3)
    >>> lines = fingerprint(module, torch.optim.SGD([torch.zeros(1)], 0.1), {"data": "mine"})
    >>> lines["data"], lines["module.p"], lines["optimizer.lr"]
    ("'mine'", '0.3', '[0.1]')

    :param settings: by name, tensors among them.
    """
    lines = {name: _text(value) for name, value in settings.items()}
    lines["seed"] = str(torch.initial_seed())
    lines["initial weights"] = _digest(_text(module.state_dict()))
    frozen = [name for name, p in module.named_parameters() if not p.requires_grad]
    lines["frozen parameters"] = _text(frozen)
    for path, part in module.named_modules():
        place = f"module.{path}" if path else "module"
        lines[place] = type(part).__qualname__
        for name, value in vars(part).items():
            # Private ones are torch's tables and what layers keep from call to call.
            if not name.startswith("_") and name != "training":
                lines[f"{place}.{name}"] = _text(value)
    lines["optimizer"] = type(optimizer).__qualname__
    for name in optimizer.defaults:
        lines[f"optimizer.{name}"] = _text([group[name] for group in optimizer.param_groups])
    return lines


def differences(there: Mapping[str, str], here: Mapping[str, str], most: int = 6) -> str:
    """The lines that differ, in words; empty if none does."""
    names = [n for n in {**there, **here} if there.get(n) != here.get(n)]
    words = []
    for name in names[:most]:
        values = there.get(name, "nothing"), here.get(name, "nothing")
        hidden = any("#" in value for value in values)
        words.append(name if hidden else f"{name} ({values[0]} there, {values[1]} here)")
    return ", ".join(words) + (f" and {len(names) - most} more" if len(names) > most else "")


def _text(value: object) -> str:
    if isinstance(value, Tensor):
        return _tensor(value)
    if isinstance(value, PLAIN):
        text = repr(value)
    elif isinstance(value, Mapping):
        text = "{" + ", ".join(f"{key!r}: {_text(v)}" for key, v in value.items()) + "}"
    elif isinstance(value, (list, tuple)):
        text = "[" + ", ".join(map(_text, value)) + "]"
    elif isinstance(value, (set, frozenset)):
        text = "{" + ", ".join(sorted(map(_text, value))) + "}"
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        text = type(value).__qualname__ + _text(fields)
    else:  # of other objects the class; a repr may hold an address
        name = getattr(value, "__qualname__", None)
        text = name if isinstance(name, str) else type(value).__qualname__
    return text if len(text) <= 80 else _digest(text)


def _tensor(value: Tensor) -> str:
    """A digest of type, shape and content, in whatever layout."""
    if is_lazy(value):
        return "uninitialized"
    value = value.detach()
    if value.layout == torch.sparse_csr:
        parts = [value.crow_indices(), value.col_indices(), value.values()]
    elif value.layout != torch.strided:
        value = value.to_sparse_coo().coalesce()
        parts = [value.indices(), value.values()]
    else:
        parts = [value.as_subclass(Tensor)]
    digest = hashlib.sha256(f"{value.dtype} {tuple(value.shape)}".encode())
    for part in parts:
        # Bytes, because NumPy knows no bfloat16.
        plain = part.resolve_conj().resolve_neg().cpu().reshape(-1).contiguous()
        digest.update(plain.view(torch.uint8).numpy().data)
    return f"#{digest.hexdigest()[:16]}"


def _digest(text: str) -> str:
    return "#" + hashlib.sha256(text.encode()).hexdigest()[:16]
