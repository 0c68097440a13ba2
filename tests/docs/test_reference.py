# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The reference has every public name, and every method and attribute that a page names."""

import ast
import importlib
import inspect
import re
import textwrap
from functools import cache

import pytest
from documents import DOCUMENTS, ROOT, TUTORIALS, load
from pyro.infer import MCMC
from torch.distributions import Distribution
from torch.nn import Module

import pyro_nmm

API = ROOT / "docs" / "api.md"
CONF = load("docs/conf.py")
SITE = ROOT / "docs" / "_build" / "html" / "api"
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
PAGES = [*DOCUMENTS, *TUTORIALS]
CODE = re.compile(r"```(?:python|\{code-cell\} ipython3)\n(?:---\n.*?---\n)?(.*?)```", re.DOTALL)
FOREIGN = object()  #: the type of what another library made


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


class Mentions(ast.NodeVisitor):
    """Attributes of objects in a page's code: of which class, as far as annotations tell."""

    def __init__(self):
        self.types = dict(CLASSES)
        self.of_class, self.calls = set(), set()

    def returned(self, function):
        note = str(inspect.unwrap(function).__annotations__.get("return"))
        classes = [CLASSES[word] for word in re.findall(r"\w+", note) if word in CLASSES]
        return classes[0] if len(classes) == 1 else None

    def type_of(self, node):
        """A class of this package, ``FOREIGN``, or ``None`` if nothing is known."""
        if isinstance(node, ast.Name):
            return self.types.get(node.id)
        if not isinstance(node, ast.Call):
            return None
        if isinstance(node.func, ast.Name):
            thing = NAMES.get(node.func.id)
            if thing is None:
                return FOREIGN if node.func.id[0].isupper() else None
            return thing if inspect.isclass(thing) else self.returned(thing)
        if isinstance(node.func, ast.Attribute):
            cls, name = self.type_of(node.func.value), node.func.attr
            if inspect.isclass(cls) and callable(own(cls, name)):
                return self.returned(own(cls, name))
            return cls if cls is FOREIGN else None
        return None

    def visit_Assign(self, node):
        self.generic_visit(node)
        if len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            self.types[node.targets[0].id] = self.type_of(node.value)

    def visit_Call(self, node):
        self.generic_visit(node)
        if isinstance(node.func, ast.Attribute) and self.type_of(node.func.value) is None:
            self.calls.add(node.func.attr)

    def visit_Attribute(self, node):
        self.generic_visit(node)
        cls = self.type_of(node.value)
        if inspect.isclass(cls) and not from_elsewhere(cls, node.attr):
            self.of_class.add((cls, node.attr))


def from_elsewhere(cls, name):
    """Whether a class has a member from torch, Pyro, scikit-learn or Python and no own one."""
    owner = next((base for base in cls.__mro__ if name in vars(base)), None)
    return owner is not None and not owner.__module__.startswith("pyro_nmm")


def mentions(text):
    """Of a page: classes with their attributes, and methods of unknown classes."""
    found = Mentions()
    for code in CODE.findall(text):
        found.visit(ast.parse(code))
    rest = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    for code in re.findall(r"`([^`\n]+)`", rest):
        try:
            found.visit(ast.parse(code))
        except SyntaxError:  # no Python, or "..." in it
            found.calls |= set(re.findall(r"\.(\w+)\(", code))
    return found


def without_entry(text):
    """Methods and attributes of this package that a page names and the reference does not."""
    found = mentions(text)
    missing = {f"{cls.__name__}.{name}" for cls, name in found.of_class if name not in entries(cls)}
    known = set().union(*map(entries, CLASSES.values()))
    ours = {name for cls in CLASSES.values() for name in vars(cls)}
    ours -= known | set(dir(MCMC)) | {"__init__"}
    return missing | (found.calls & ours)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_a_method_that_a_page_names_has_an_entry(path):
    assert without_entry(path.read_text()) == set()


def test_a_method_without_an_entry_is_found():
    page = """
    ```python
    mix = NeighborMixture(hood, alpha, logits)
    posterior = mix.condition(y, observed)
    posterior.marginals(), posterior.unheard_of()
    AveragedPosterior(members).pairwise(pairs), other.extra_repr()
    stacked = StackedNMM(3).fit(hood, scores)
    stacked.forgotten
    ```
    `NeighborMixture.expand`, `Consensus.predict()`, and `model.score_parts(x)`.
    """
    missing = "Posterior.unheard_of", "StackedNMM.forgotten", "NeighborMixture.expand"
    assert without_entry(textwrap.dedent(page)) == {*missing, "extra_repr"}


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
    for module, names in listed().items():
        for name in names:
            html = (SITE / f"{module}.{name}.html").read_text()
            found = set(re.findall(rf'id="{re.escape(f"{module}.{name}")}\.(\w+)"', html))
            if name in CLASSES:
                cls = CLASSES[name]
                fields = cls._fields if issubclass(cls, tuple) else ()
                assert members(cls).union(fields) <= found, name
                assert not {"shown", "expand", "arg_constraints", "has_rsample"} & found, name
