# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The layers of the house: imports run down only, and in no circle."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
#: From the ground up; a package may import those before it, and its own modules.
LAYERS = (
    "pyro_nmm",
    "pyro_nmm.ops",
    "pyro_nmm.distributions",
    "pyro_nmm.datasets",
    "pyro_nmm.models",
    "pyro_nmm.guides",
    "pyro_nmm.guides.fitting",
)


def modules():
    """Every module's name, package and syntax tree; the root's surface and the packages' apart."""
    found = {}
    for folder in ("pyro_nmm", "models", "guides"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts if folder == "pyro_nmm" else ("pyro_nmm", *parts))
            found[name.removesuffix(".__init__")] = ast.parse(path.read_text())
    return found


def imports(tree, known):
    """Modules that a tree names anywhere: in functions and for type checkers too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                if inner in known or node.module in known:
                    yield inner if inner in known else node.module


MODULES = modules()
GRAPH = {name: set(imports(tree, MODULES)) - {name} for name, tree in MODULES.items()}
SURFACES = set(LAYERS)


def layer(module):
    package = module if module in SURFACES else module.rpartition(".")[0]
    return LAYERS.index(package)


@pytest.mark.parametrize("module", sorted(set(MODULES) - SURFACES))
def test_imports_run_down_only(module):
    upward = {other for other in GRAPH[module] - {"pyro_nmm"} if layer(other) > layer(module)}
    assert not upward
    # The surfaces are for users and for the layers above what they show.
    inside = layer(module) < LAYERS.index("pyro_nmm.models")
    assert not (inside and GRAPH[module] & SURFACES)


def test_no_circle():
    inner = {name: {o for o in GRAPH[name] if o not in SURFACES} for name in GRAPH}
    list(TopologicalSorter(inner).static_order())  # raises on a circle


def test_every_package_is_in_the_wheel():
    declared = (ROOT / "pyproject.toml").read_text()
    packages = {name for name in MODULES if any(m.startswith(name + ".") for m in MODULES)}
    assert packages == SURFACES
    assert all(f'"{name}"' in declared for name in packages)
