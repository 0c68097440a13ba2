# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Importing the package loads no large library that Pyro does not load."""

import subprocess
import sys

import pytest

LARGE = {"numba", "scipy", "sklearn", "torch._dynamo", "torch_geometric", "tqdm"}


def loaded(module):
    """Modules of a fresh process that imports one."""
    command = [sys.executable, "-c", f"import sys, {module}; print(*sys.modules)"]
    return set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())


@pytest.fixture(scope="module")
def with_pyro():
    return loaded("pyro")


@pytest.mark.parametrize("module", ["pyro_nmm", "pyro_nmm.models", "pyro_nmm.guides"])
def test_import_loads_no_large_library(module, with_pyro):
    found = loaded(module)
    assert module in found
    assert not LARGE & found - with_pyro
