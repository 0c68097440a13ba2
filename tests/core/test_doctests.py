# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Every example in a docstring runs, and every public name says what shapes it takes."""

import doctest
import importlib
import inspect
import logging
import pkgutil

import pyro
import pytest
import torch
from falls import FALLS
from hostile import Recorder

import pyro_nmm
import pyro_nmm.guides
import pyro_nmm.models

# Three roots: an editable installation has models and guides in folders of their own.
ROOTS = pyro_nmm, pyro_nmm.models, pyro_nmm.guides
FOUND = (m.name for p in ROOTS for m in pkgutil.walk_packages(p.__path__, f"{p.__name__}."))
MODULES = sorted({m for m in FOUND if ".compiled" not in m or pyro_nmm.backend.compiled})

ANSWERED = {line.strip() for lines in FALLS.values() for line in lines.strip().splitlines()}


@pytest.mark.parametrize("name", MODULES)
def test_examples(name, monkeypatch):
    """Every example runs, and its calls refuse hostile values by an error of ours, but for those
    in ``FALLS``."""
    recorder = Recorder(monkeypatch)
    torch.set_default_dtype(torch.float)  # as a reader would have it
    logging.getLogger("pyro").setLevel(logging.WARNING)
    known = {"torch": torch, "Neighborhood": pyro_nmm.Neighborhood}
    for example in doctest.DocTestFinder().find(importlib.import_module(name), extraglobs=known):
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        assert doctest.DocTestRunner().run(example).failed == 0, example.name
    found = dict(recorder.falls())
    assert found.keys() <= ANSWERED, {name: found[name] for name in found.keys() - ANSWERED}


def test_examples_reach_every_room():
    rooms = (
        "models.stacked",
        "models.hidden",
        "models.annotators",
        "models.random_fields",
        "models.links",
    )
    rooms += ("models.images", "guides.fitting", "ops", "distributions", "datasets")
    for room in rooms:
        assert any(name.startswith(f"pyro_nmm.{room}.") for name in MODULES), room


#: What stands for a formula that another docstring has, or is but a list of node ids.
NO_FORMULA = {"pyro_nmm.Posterior", "pyro_nmm.models.grid_edges", "pyro_nmm.models.coarse_to_fine"}


def public():
    for package in ("pyro_nmm", "pyro_nmm.models", "pyro_nmm.guides"):
        module = importlib.import_module(package)
        for name in module.__all__:
            yield f"{package}.{name}", getattr(module, name)


#: What reads files that do not come with the package.
FILES = {"planetoid", "link_graph", "published_split"}


def named():
    """Public names of all packages and modules that have pages of their own."""
    yield from public()
    for name in ("datasets", "metrics", "sources"):
        module = importlib.import_module(f"pyro_nmm.{name}")
        for key, thing in vars(module).items():
            own = getattr(thing, "__module__", "").startswith(module.__name__)
            if key in getattr(module, "__all__", [key] if own and key[0] != "_" else []):
                yield f"{module.__name__}.{key}", thing


@pytest.mark.parametrize(("name", "thing"), list(named()))
def test_every_name_has_an_example(name, thing):
    text = inspect.getdoc(thing)
    methods = vars(thing).values() if inspect.isclass(thing) else []
    texts = [text, *(inspect.getdoc(method) or "" for method in methods)]
    assert name.rpartition(".")[2] in FILES or any(">>>" in text for text in texts), name


@pytest.mark.parametrize(("name", "thing"), list(public()))
def test_docstrings(name, thing):
    text = inspect.getdoc(thing)
    assert "math::" in text or ":math:" in text or name in NO_FORMULA, name
    assert "``(" in text, f"{name} does not state a shape"
    methods = vars(thing).items() if inspect.isclass(thing) else []
    documented = {"log_prob", "sample", "score_parts", "expand", "support"}  # Pyro's own contract
    for method, function in methods:
        if inspect.isfunction(function) and not method.startswith("_") and method not in documented:
            assert inspect.getdoc(function), f"{name}.{method}"
