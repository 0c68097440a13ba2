# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Every example in a docstring runs, and every public name says what shapes it takes."""

import doctest
import importlib
import inspect
import logging
import pkgutil
import re

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
MODULES = sorted(set(FOUND))

ANSWERED = {
    f"{call}: {value})"
    for call, values in re.findall(r"(\S+): (.*)\)", "".join(FALLS.values()))
    for value in values.split(" | ")
}


@pytest.mark.parametrize("name", MODULES)
def test_examples(name, monkeypatch):
    """Every example runs, and its calls refuse hostile values by an error of ours, but for those
    in ``FALLS``."""
    if name.endswith("datatree"):
        pytest.importorskip("arviz_base")  # has no version for the lowest ones of others
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
    rooms = {name.rpartition(".")[0] for name in MODULES}
    assert {f"pyro_nmm.models.{room}" for room in ("stacked", "hidden", "annotators",
            "random_fields", "tabular")} < rooms  # fmt: skip
    assert {f"pyro_nmm.{room}" for room in ("ops", "distributions", "guides")} < rooms


PACKAGES = "pyro_nmm", "pyro_nmm.models", "pyro_nmm.guides"
#: What stands for a formula that another docstring has, or is but a list of node ids.
NO_FORMULA = {"pyro_nmm.Posterior", "pyro_nmm.models.grid_edges", "pyro_nmm.models.coarse_to_fine"}


def public():
    """Public names of all packages and modules that have pages of their own."""
    for package in (*PACKAGES, "pyro_nmm.datasets", "pyro_nmm.sources"):
        module = importlib.import_module(package)
        for name, thing in vars(module).items():
            own = getattr(thing, "__module__", "").startswith(package)
            if name in getattr(module, "__all__", [name] if own and name[0] != "_" else []):
                yield package, name, thing


@pytest.mark.parametrize(("package", "name", "thing"), list(public()))
def test_docstrings(package, name, thing):
    """Every public name has an example, and those of packages a formula and shapes."""
    text = inspect.getdoc(thing)
    methods = vars(thing) if inspect.isclass(thing) else {}
    texts = [text, *(inspect.getdoc(method) or "" for method in methods.values())]
    assert any(">>>" in text for text in texts)
    if package not in PACKAGES:
        return
    assert "math::" in text or ":math:" in text or f"{package}.{name}" in NO_FORMULA
    assert "``(" in text, f"{name} does not state a shape"
    contract = {"log_prob", "sample", "score_parts", "expand", "support"}  # of Pyro
    for method, function in methods.items():
        if inspect.isfunction(function) and method[0] != "_" and method not in contract:
            assert inspect.getdoc(function), f"{name}.{method}"
