# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Every public name says what it raises."""

import importlib
import inspect
import re

import pytest
from documents import ROOT, load

CONF = load("docs/conf.py")
LISTED = re.findall(r"^   (pyro_nmm\.[\w.]+)$", (ROOT / "docs/api.md").read_text(), re.MULTILINE)
#: What cannot raise for bad input, by reason.
NOTHING = {
    "a tuple without checks: its readers check": {"pyro_nmm.models.Parameters"},
    "made by a fit or by conditioning, and not by users": {
        "pyro_nmm.Posterior",
        "pyro_nmm.models.Consensus",
        "pyro_nmm.models.HiddenField",
    },
    "an interface": {"pyro_nmm.models.Emission"},
    "without arguments": {"pyro_nmm.guides.BestState"},
    "checks its options in fit, as scikit-learn asks": {
        "pyro_nmm.models.tabular.NeighborMixtureClassifier"
    },
    "passes its arguments to PyTorch or to the emission": {
        "pyro_nmm.sparse.identity",
        "pyro_nmm.models.hidden.mixture_em",
    },
}
SILENT = set().union(*NOTHING.values())
#: Calls that refuse a value.
REFUSES = re.compile(r"\braise \w|\b(?:check|expect|as_expected|as_nodes|as_set|as_edge)\w*\(")


def named(path):
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def says(thing):
    """Whether a docstring, of a class or of its constructor, has an entry with conditions."""
    texts = thing.__doc__, thing.__init__.__doc__ if inspect.isclass(thing) else ""
    return any(re.search(r":raises [\w.]+: \w", text or "") for text in texts)


@pytest.mark.parametrize("path", LISTED)
def test_a_public_name_says_what_it_raises(path):
    assert says(named(path)) == (path not in SILENT)


def methods():
    """Documented methods of documented classes, with the names of these."""
    for path in LISTED:
        thing = named(path)
        for name in dir(thing) if inspect.isclass(thing) else ():
            member = inspect.getattr_static(thing, name)
            function = getattr(member, "__func__", member)
            if CONF.is_documented(name, function) and inspect.isfunction(function):
                yield path, name, function


@pytest.mark.parametrize(("path", "name", "function"), list(methods()))
def test_a_method_that_refuses_values_says_so(path, name, function):
    """In its own docstring, or in the docstring of its class."""
    if REFUSES.search(inspect.getsource(inspect.unwrap(function))):
        assert says(function) or says(named(path)), name


def test_reasons_are_of_listed_names():
    assert set(LISTED) > SILENT
