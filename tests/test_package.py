# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The built wheel and sdist, away from the checkout."""

import ast
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def run(*command, **options):
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A wheel built from the sdist, as a registry would have them."""
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", out, ROOT]
    run(*map(str, command))
    return out


@pytest.mark.slow
def test_sdist_holds_the_sources(built):
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = [name.split("/", 1)[-1] for name in archive.getnames()]
    for wanted in (
        "models/nmm.py",
        "guides/ordered.py",
        "pyro_nmm/py.typed",
        "LICENSE",
        "README.md",
    ):
        assert wanted in names


@pytest.mark.slow
def test_wheel_works_outside_the_checkout(built, tmp_path):
    (path,) = built.glob("*.whl")
    site = tmp_path / "site"
    zipfile.ZipFile(path).extractall(site)
    assert (site / "pyro_nmm" / "py.typed").exists()
    script = """
import pyro_nmm, torch
from pyro_nmm import Neighborhood, NeighborMixture
from pyro_nmm.models import nmm, NMMNetwork
from pyro_nmm.guides import AmortizedNMM, ordered_guide
hood = Neighborhood.grid(2, 2)
mix = NeighborMixture(hood, torch.ones(4, 2), torch.zeros(hood.num_edges))
print(pyro_nmm.__file__, mix.sample().shape[0])
"""
    environment = {"PYTHONPATH": str(site), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    out = run(sys.executable, "-c", script, cwd=tmp_path, env=environment)
    assert out.split() == [str(site / "pyro_nmm" / "__init__.py"), "4"]


@pytest.mark.slow
def test_types_of_the_installed_wheel(built, tmp_path):
    """mypy sees the wheel's own annotations, as a user's code would."""
    (path,) = built.glob("*.whl")
    site = tmp_path / "site"
    zipfile.ZipFile(path).extractall(site)
    user = tmp_path / "user.py"
    user.write_text(
        "import torch\n"
        "from pyro_nmm import Neighborhood\n"
        "hood = Neighborhood(torch.zeros(2, 0, dtype=torch.long), 3)\n"
        "degree: torch.Tensor = hood.ptr.diff()\n"
        "reveal_type(hood.num_edges)\n"
    )
    command = [sys.executable, "-m", "mypy", "--ignore-missing-imports", str(user)]
    environment = {"MYPYPATH": str(site), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    out = run(*command, cwd=tmp_path, env=environment)
    assert 'Revealed type is "int"' in out or "builtins.int" in out


def imported(path):
    """Full dotted names of what a file imports, names of ``from`` imports included."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_import_direction():
    """pyro_nmm <- models <- guides <- examples and benchmarks."""
    upper = {"pyro_nmm": ("models", "guides"), "models": ("guides",)}
    for folder, forbidden in upper.items():
        for path in (ROOT / folder).rglob("*.py"):
            for name in forbidden:
                assert not any(n.startswith(f"pyro_nmm.{name}") for n in imported(path)), path
    assert "pyro_nmm.guides.ordered.ordered_guide" in imported(ROOT / "guides" / "amortized.py")


def test_files_are_short():
    for folder in ("pyro_nmm", "models", "guides", "examples", "benchmarks"):
        for path in (ROOT / folder).rglob("*.py"):
            assert len(path.read_text().splitlines()) <= 330, path
