# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Calls of documented examples, made again with values that have no place in them."""

import copy
import importlib
import inspect
import sys
import traceback
from collections.abc import Iterator
from contextlib import redirect_stdout
from functools import wraps
from io import StringIO
from pathlib import Path

import numpy as np
import pyro
import torch
from torch.overrides import TorchFunctionMode

from pyro_nmm import Neighborhood

ROOT = Path(__file__).parent.parent
OWN = tuple(str(ROOT / name) for name in ("pyro_nmm", "models", "guides"))
PACKAGES = "pyro_nmm", "pyro_nmm.models", "pyro_nmm.guides"
PACKAGES += "pyro_nmm.sources", "pyro_nmm.datasets"
#: Errors of Pyro and PyTorch about a value's shape and support.
PYRO = "Expected value argument", "Expected parameter", "The right-most size of value"
PYRO += ("Value is not broadcastable with batch_shape",)
PYRO += ("The value argument to log_prob",)


#: What errors call the values of some distributions.
VALUES = "choices", "edge_index"


class Accepted(BaseException):
    """Nothing in the library may catch it."""


class Budget(TorchFunctionMode):
    """Ends a call whose value was accepted, before a fit has made all of its steps."""

    def __init__(self, calls=5_000):
        super().__init__()
        self.left = calls

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.left -= 1
        if self.left == -1:  # once: what leaves its context calls torch too
            raise Accepted
        return function(*args, **kwargs or {})


class Recorder:
    """The first call that examples make of every public function and method, by its name."""

    def __init__(self, monkeypatch):
        self.calls, self.inside = {}, False
        for package in PACKAGES:
            module = importlib.import_module(package)
            for name, thing in list(vars(module).items()):
                own = getattr(thing, "__module__", "") == package
                if name not in getattr(module, "__all__", [name] if own else []):
                    continue
                if inspect.isclass(thing):
                    for method, function in list(vars(thing).items()):
                        plain = method == "__init__" or not method.startswith("_")
                        if inspect.isfunction(function) and plain:
                            told = self.telling(f"{name}.{method}", function)
                            monkeypatch.setattr(thing, method, told)
                elif inspect.isfunction(thing):
                    told = self.telling(name, thing)
                    for known in [m for n, m in sys.modules.items() if n.startswith("pyro_nmm")]:
                        if vars(known).get(name) is thing:
                            monkeypatch.setattr(known, name, told)

    def telling(self, label, function):
        @wraps(function)
        def call(*args, **kwargs):
            if self.inside:
                return function(*args, **kwargs)
            self.calls.setdefault(label, (function, args, kwargs))
            self.inside = True
            try:
                return function(*args, **kwargs)
            finally:
                self.inside = False

        return call

    def falls(self) -> Iterator[tuple[str, str]]:
        """Calls, arguments and values that are answered ("silent"), or refused by something deeper
        down or without the name of an argument ("obscure")."""
        self.inside = True
        for label, (function, args, kwargs) in self.calls.items():
            given = inspect.signature(function).bind(*args, **kwargs)
            for name, value in list(given.arguments.items()):
                if name == "self":
                    continue
                values = value.items() if name in ("options", "kwargs") else [(None, value)]
                for key, each in values:
                    for word, wrong, must_fail in hostile(each):
                        changed = copy.copy(given)
                        changed.arguments = dict(given.arguments)
                        changed.arguments[name] = wrong if key is None else value | {key: wrong}
                        if kind := verdict(label, function, changed, must_fail, key):
                            yield f"{label}({key or name}: {word})", kind


def hostile(value):
    """A word, a value that has no place where ``value`` stands, and whether it must be refused."""
    if isinstance(value, torch.Tensor):
        plain = value.detach()
        if plain.numel() and plain.dtype != torch.bool:
            wrong = {"nan": np.nan, "inf": np.inf}
            for word, first in (
                wrong if plain.is_floating_point() else {"-7": -7, "10^9": 10**9}
            ).items():
                changed = plain.clone(memory_format=torch.contiguous_format)
                changed.view(-1)[0] = first
                yield word, changed, True
            if not plain.is_floating_point():
                yield "halves", plain + 0.5, True
        if plain.dim() and len(plain):
            yield "a row more", torch.cat([plain, plain[:1]]), True
            yield "no row", plain[:0], True
        yield "a dimension more", plain[..., None], True
        yield "a list", plain.tolist(), False  # as is an array
    elif isinstance(value, Neighborhood):
        edges = torch.tensor([[0, 1], [1, 0]])
        yield "another graph", Neighborhood(edges, value.num_nodes + 3), True
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield "nan", np.nan, True
        yield "a word", "3", True
        yield "-1.5", -1.5, isinstance(value, int)
    elif isinstance(value, str):
        yield "nonsense", "nonsense", True


def verdict(label, function, given, must_fail, key):
    """``silent``, ``obscure``, or nothing to complain about."""
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    own = given.arguments.get("self")
    if label.endswith("__init__"):
        given.arguments["self"] = type(own).__new__(type(own))
    elif isinstance(own, torch.nn.Module):
        given.arguments["self"] = copy.deepcopy(own)
    try:
        # The call may end where it would switch gradients on again.
        with torch.enable_grad(), redirect_stdout(StringIO()), Budget():
            function(*given.args, **given.kwargs)
    except Accepted:
        pass
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        raised = last.filename.startswith(OWN) and (last.line or "").lstrip().startswith("raise")
        names = {*given.arguments, key or "", *VALUES} - {"self", ""}
        named = raised and any(name in str(error) for name in names)
        clear = named or any(text in str(error) for text in PYRO)
        return "" if clear else "obscure"
    return "silent" if must_fail else ""
