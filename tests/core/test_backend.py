# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The compiled loops are left out in silence without numba, and with a warning if it is broken."""

import re
import runpy
import sys
import warnings
from pathlib import Path

import pytest

import pyro_nmm
import pyro_nmm.guides
import pyro_nmm.models
from pyro_nmm import backend

BROKEN = {
    "raise ImportError('Numba needs NumPy 2.3 or less')": "ImportError: Numba needs NumPy 2.3",
    "import a_missing_llvmlite": "ModuleNotFoundError: No module named 'a_missing_llvmlite'",
    "raise SystemError('initialization failed')": "SystemError: initialization failed",
    "raise OSError('libllvmlite.so: no such file')": "OSError: libllvmlite.so",
    "": "AttributeError: module 'numba' has no attribute 'njit'",
}


@pytest.fixture
def imported(monkeypatch, tmp_path):
    """The backend, imported afresh with another numba or with none, and its warnings."""

    def run(numba):
        if numba is not None:
            (tmp_path / "numba.py").write_text(numba)
            monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setitem(sys.modules, "numba", None)
        if numba is not None:
            del sys.modules["numba"]
        monkeypatch.delattr(pyro_nmm, "compiled", raising=False)
        for name in ("", ".loops", ".entries"):
            monkeypatch.delitem(sys.modules, f"pyro_nmm.compiled{name}", raising=False)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            return runpy.run_path(backend.__file__)["compiled"], caught

    return run


@pytest.mark.parametrize("numba", BROKEN)
def test_broken_numba_warns(numba, imported):
    compiled, (warning,) = imported(numba)
    assert compiled is None
    assert warning.category is RuntimeWarning
    assert BROKEN[numba] in str(warning.message)
    assert "ten times slower" in str(warning.message)
    assert "pip install --upgrade numba" in str(warning.message)


def test_absent_numba_is_silent(imported):
    compiled, caught = imported(None)
    assert compiled is None
    assert not caught


@pytest.mark.parametrize("disk", ["full", "read-only"])
def test_a_disk_that_cannot_be_written(disk, monkeypatch):
    """Loops are compiled all the same, and one warning names the cure."""
    caching = pytest.importorskip("numba.core.caching")
    from pyro_nmm.compiled import loops

    def save(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(caching.IndexDataCacheFile, "save", save)
    if disk == "read-only":
        monkeypatch.setattr(caching.CacheImpl, "_locator_classes", [])
    loops._warn_once.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        one, two = loops._compiled(lambda x: x + 1), loops._compiled(lambda x: x + 2)
        assert (one(1), two(1)) == (2, 3)
    (text,) = (str(warning.message) for warning in caught)
    assert "set NUMBA_CACHE_DIR to a folder that can be written" in text
    assert ("No space left" if disk == "full" else "no locator") in text


def test_numba_is_imported_by_the_compiled_loops_alone():
    """Whatever is wrong with it then ends in the backend's warning."""
    roots = pyro_nmm, pyro_nmm.models, pyro_nmm.guides
    files = [path for root in roots for path in Path(root.__path__[0]).rglob("*.py")]
    load = re.compile(r"^\s*(import|from) numba|import compiled\b|\.compiled import", re.MULTILINE)
    outside = {path for path in files if path.parent.name != "compiled"}
    assert [path.name for path in outside if load.search(path.read_text())] == ["backend.py"]
    assert any(load.search(path.read_text()) for path in {*files} - outside)
