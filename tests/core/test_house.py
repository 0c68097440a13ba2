# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The layout: imports run down only, in no circle, and from room to room through doors."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
#: From the ground up; a package may import those before it, and its own modules.
LAYERS = (
    "pyro_nmm.compiled",
    "pyro_nmm",
    "pyro_nmm.ops",
    "pyro_nmm.distributions",
    "pyro_nmm.models",
    "pyro_nmm.models.random_fields",
    "pyro_nmm.models.stacked",
    "pyro_nmm.models.tabular",
    "pyro_nmm.models.hidden",
    "pyro_nmm.models.annotators",
    "pyro_nmm.guides",
)
#: What users import. Modules below may not: a surface imports all of them.
SURFACES = {"pyro_nmm", "pyro_nmm.models", "pyro_nmm.guides"}
#: Folders whose files other folders import through ``__init__`` only.
ROOMS = {name for name in LAYERS if name.count(".") == 2}


def modules(*folders):
    """Syntax trees by the name under which a module is imported."""
    found = {}
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(("pyro_nmm", *parts) if folder in ("models", "guides") else parts)
            found[name.removesuffix(".__init__")] = ast.parse(path.read_text())
    return found


def offered(tree):
    """The names in a door's ``__all__``."""
    lists = (node.value for node in tree.body
             if isinstance(node, ast.Assign) and node.targets[0].id == "__all__")  # fmt: skip
    return [name for found in lists for name in ast.literal_eval(found)]


def imports(tree, known):
    """
    Modules that a tree names anywhere: in functions and for type checkers too. A name that a door
    offers is the door's, also if a module behind it has the same name.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                if node.module in ROOMS and alias.name in offered(known[node.module]):
                    inner = node.module
                if inner in known or node.module in known:
                    yield inner if inner in known else node.module


MODULES = modules("pyro_nmm", "models", "guides")
GRAPH = {name: set(imports(tree, MODULES)) - {name} for name, tree in MODULES.items()}
USERS = modules("examples", "benchmarks")
MEASURED = {name: set(imports(tree, MODULES | USERS)) - {name} for name, tree in USERS.items()}


def package(module):
    return module if module in LAYERS else module.rpartition(".")[0]


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_run_down_only(module):
    above = LAYERS[LAYERS.index(package(module)) + 1 :]
    upward = {other for other in GRAPH[module] if package(other) in above}
    assert not upward or module in SURFACES
    below = LAYERS.index(package(module)) < LAYERS.index("pyro_nmm.models")
    assert not (below and module not in SURFACES and GRAPH[module] & SURFACES)


def test_no_circle():
    inner = {name: GRAPH[name] - SURFACES for name in GRAPH.keys() - SURFACES}
    list(TopologicalSorter(inner).static_order())  # raises on a circle


@pytest.mark.parametrize("room", sorted(ROOMS))
def test_a_room_is_entered_by_its_door(room):
    for module, found in (GRAPH | MEASURED).items():
        if package(module) != room:
            past = {other for other in found if other.startswith(f"{room}.")}
            assert not past, module


@pytest.mark.parametrize("room", sorted({m.split(".")[1] for m in USERS if m.count(".") == 2}))
def test_a_room_of_benchmarks_is_entered_by_its_door(room):
    name = f"benchmarks.{room}"
    for module, found in MEASURED.items():
        inside = module.startswith(name) or module == "benchmarks.report"
        if not inside and room != "shared":
            assert not {other for other in found if other.startswith(f"{name}.")}, module


def test_every_package_is_in_the_wheel():
    declared = (ROOT / "pyproject.toml").read_text()
    packages = {name for name in MODULES if any(m.startswith(name + ".") for m in MODULES)}
    assert packages == set(LAYERS)
    assert all(f'"{name}"' in declared for name in packages)
