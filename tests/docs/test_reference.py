# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The reference has every public name, and every method and attribute that a page names."""

import importlib
import inspect
import re
from functools import cache

import pytest
from documents import DOCUMENTS, ROOT, TUTORIALS, load

import pyro_nmm

API = ROOT / "docs" / "api.md"
CONF = load("docs/conf.py")
SITE = ROOT / "docs" / "_build" / "html" / "api"
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
PAGES = [*DOCUMENTS, *TUTORIALS]


def listed():
    """Names in docs/api.md, by module."""
    found = {}
    for name in re.findall(r"^   (pyro_nmm\.[\w.]+)$", API.read_text(), re.MULTILINE):
        module, _, last = name.rpartition(".")
        found.setdefault(module, []).append(last)
    return found


NAMES = {
    name: getattr(importlib.import_module(module), name)
    for module, names in listed().items() for name in names
}  # fmt: skip
CLASSES = {name: thing for name, thing in NAMES.items() if inspect.isclass(thing)}


def test_every_public_name_has_a_page():
    doors = {"pyro_nmm", "pyro_nmm.models", "pyro_nmm.guides"}
    extras = "pyro_nmm.fitting", "pyro_nmm.checkpoints"
    extras += "pyro_nmm.models.hidden", "pyro_nmm.models.annotators"
    for name, names in listed().items():
        module = importlib.import_module(name)
        public = getattr(module, "__all__", None) or [
            key for key, value in vars(module).items()
            if key[0] != "_" and getattr(value, "__module__", None) == name
        ]  # fmt: skip
        assert len(names) == len(set(names)), name
        if name in extras:
            assert all(hasattr(module, each) for each in names), name
        elif name != "pyro_nmm.sparse":
            assert sorted(names) == sorted(public), name
    assert doors < listed().keys()
    assert pyro_nmm.__version__


@pytest.mark.parametrize("path", [*PAGES, *EXAMPLES], ids=lambda path: path.name)
def test_a_name_that_users_see_imported_has_a_page(path):
    found = re.findall(r"^from (pyro_nmm[\w.]*) import (\([^)]*\)|.*)$", path.read_text(), re.M)
    pages = listed()
    names = {f"{module}.{name}" for module in pages for name in pages[module]} | pages.keys()
    for module, imported in found:
        for name in re.findall(r"\w+", imported):
            assert f"{module}.{name}" in names


def own(cls, name):
    """A member as its class states it, without ``classmethod`` and ``staticmethod`` around it."""
    member = inspect.getattr_static(cls, name, None)
    return getattr(member, "__func__", member)


@cache
def members(cls):
    """Methods and properties with an entry on the page of a class, as docs/conf.py decides."""
    found = {name: own(cls, name) for name in dir(cls)}
    return {
        name for name, member in found.items()
        if CONF.is_documented(name, member)
        and getattr(member, "func", member).__doc__  # func: of a cached property
    }  # fmt: skip


@pytest.mark.skipif(not SITE.exists(), reason="make docs builds the site")
def test_built_pages_have_the_entries():
    for module, names in listed().items():
        for name in names:
            html = (SITE / f"{module}.{name}.html").read_text()
            found = set(re.findall(rf'id="{re.escape(f"{module}.{name}")}\.(\w+)"', html))
            if name in CLASSES:
                cls = CLASSES[name]
                fields = cls._fields if issubclass(cls, tuple) else ()
                assert members(cls).union(fields) <= found, name
                assert not {"shown", "expand", "arg_constraints", "has_rsample"} & found, name
