# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The reference has every public name, and every method and attribute that a page names."""

import importlib
import inspect
import re
import textwrap
from functools import cache

import pytest
from documents import DOCUMENTS, ROOT, TUTORIALS, load
from pyro.infer import MCMC
from torch import Tensor
from torch.distributions import Distribution
from torch.nn import Module

import pyro_nmm

CONF = load("docs/conf.py")
SITE = ROOT / "docs" / "_build" / "html" / "api"
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
PAGES = [*DOCUMENTS, *TUTORIALS]
CODE = re.compile(r"```(?:python|\{code-cell\} ipython3)\n(.*?)```|`([^`\n]+)`", re.DOTALL)
#: Names in docs/api.md, by module.
LISTED = {}
for _name in re.findall(r"^   (pyro_nmm\.[\w.]+)$", (ROOT / "docs/api.md").read_text(), re.M):
    LISTED.setdefault(_name.rpartition(".")[0], []).append(_name.rpartition(".")[2])
NAMES = {name: getattr(importlib.import_module(m), name) for m, names in LISTED.items()
         for name in names}  # fmt: skip
CLASSES = {name: thing for name, thing in NAMES.items() if inspect.isclass(thing)}
#: Modules of which the reference lists some names.
IN_PART = {"pyro_nmm.fitting", "pyro_nmm.checkpoints", "pyro_nmm.sparse"}
IN_PART |= {"pyro_nmm.models.hidden", "pyro_nmm.models.annotators"}


@pytest.mark.parametrize("name", LISTED)
def test_every_public_name_has_a_page(name):
    module, names = importlib.import_module(name), LISTED[name]
    assert len(names) == len(set(names))
    if name not in IN_PART:
        own = [k for k, v in vars(module).items() if getattr(v, "__module__", None) == name]
        assert sorted(names) == sorted(getattr(module, "__all__", [k for k in own if k[0] != "_"]))
    assert {"pyro_nmm", "pyro_nmm.models", "pyro_nmm.guides"} < LISTED.keys()
    assert pyro_nmm.__version__


@pytest.mark.parametrize("path", [*PAGES, *EXAMPLES], ids=lambda path: path.name)
def test_a_name_that_users_see_imported_has_a_page(path):
    found = re.findall(r"^from (pyro_nmm[\w.]*) import (\([^)]*\)|.*)$", path.read_text(), re.M)
    pages = {f"{module}.{name}" for module in LISTED for name in LISTED[module]} | LISTED.keys()
    for module, imported in found:
        assert {f"{module}.{name}" for name in re.findall(r"\w+", imported)} <= pages


@cache
def members(cls):
    """Methods and properties with an entry on the page of a class, as docs/conf.py decides."""
    static = {name: inspect.getattr_static(cls, name, None) for name in dir(cls)}
    plain = {name: getattr(member, "__func__", member) for name, member in static.items()}
    return {
        name for name, member in plain.items()
        if CONF.is_documented(name, member)
        and getattr(member, "func", member).__doc__  # func: of a cached property
    }  # fmt: skip


@cache
def entries(cls):
    """Members, parameters, and attributes with a comment or in the text of the class."""
    found = members(cls)
    for base in cls.__mro__:
        if base.__module__.startswith("pyro_nmm"):
            found = found | set(re.findall(r":(?:param|ivar) [^:]*?(\w+):", base.__doc__ or ""))
            source = textwrap.dedent(inspect.getsource(base))
            found = found | set(re.findall(r"^ +(?:self\.)?(\w+)\b.*  #: ", source, re.MULTILINE))
            found = found | set(re.findall(r"#: .*\n +(?:self\.)?(\w+)\b", source))
    return found


OURS = {name for cls in CLASSES.values() for base in cls.__mro__ for name in vars(base)
        if base.__module__.startswith("pyro_nmm")} - {"__init__"}  # fmt: skip


def without_entry(text):
    """Members that a page names, of a class or in a call, and that the reference does not have."""
    code = "\n".join("".join(parts) for parts in CODE.findall(text))
    named = re.findall(rf"\b({'|'.join(CLASSES)})\.(\w+)", code)
    missing = {name for cls, name in named if name not in entries(CLASSES[cls])
               and (name in OURS or not hasattr(CLASSES[cls], name))}  # fmt: skip
    called = set(re.findall(r"\.(\w+)\(", code)) - {*dir(MCMC), *dir(Tensor)}
    return missing | (called & OURS) - set().union(*map(entries, CLASSES.values()))


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_a_method_that_a_page_names_has_an_entry(path):
    assert without_entry(path.read_text()) == set()


def test_a_method_without_an_entry_is_found():
    page = "```python\nother.extra_repr()\nmix.marginals()\n```\n"
    page += "`NeighborMixture.expand`, `Posterior.no`"
    assert without_entry(page) == {"extra_repr", "expand", "no"}


def test_queries_have_entries_and_boilerplate_has_none():
    queries = {"marginals", "pairwise", "sample", "log_marginal", "condition", "log_likelihood"}
    for cls in (pyro_nmm.NeighborMixture, pyro_nmm.Posterior, pyro_nmm.AveragedPosterior):
        assert queries <= entries(cls)
    assert {"counts", "predict"} <= entries(pyro_nmm.AveragedPosterior)
    assert {"in_order", "elbo", "log_prob"} <= entries(pyro_nmm.NeighborMixture)
    boilerplate = {"arg_constraints", "expand", "has_rsample", "shown", "support", "training"}
    for cls in (cls for cls in CLASSES.values() if issubclass(cls, Distribution | Module)):
        assert not boilerplate & entries(cls), cls


@pytest.mark.skipif(not SITE.exists(), reason="make docs builds the site")
def test_built_pages_have_the_entries():
    for module, names in LISTED.items():
        for name in names:
            html = (SITE / f"{module}.{name}.html").read_text()
            found = set(re.findall(rf'id="{re.escape(f"{module}.{name}")}\.(\w+)"', html))
            if cls := CLASSES.get(name):
                fields = cls._fields if issubclass(cls, tuple) else ()
                assert members(cls).union(fields) <= found, name
                assert not {"shown", "expand", "arg_constraints", "has_rsample"} & found, name
