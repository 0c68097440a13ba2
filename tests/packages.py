# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""What an installation of the package brings, with or without extras."""

import importlib.metadata
import re
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
_PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT, REPOSITORY = _PYPROJECT["project"], _PYPROJECT["tool"]["pyro-nmm"]["repository"]


def requirements(extras):
    """What an installation with these extras asks for."""
    lines = PROJECT["dependencies"] + [
        line for extra in extras for line in PROJECT["optional-dependencies"][extra]
    ]
    return [Requirement(line) for line in lines]


def installed(requirements):
    """The distributions that these requirements bring, and those that they bring in turn."""
    found: dict = {}
    waiting = [r for r in requirements if not r.marker or r.marker.evaluate({"extra": ""})]
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if name in found:
            continue
        found[name] = importlib.metadata.distribution(name)
        for line in found[name].requires or []:
            marker, extras = Requirement(line).marker, ["", *requirement.extras]
            if not marker or any(marker.evaluate({"extra": extra}) for extra in extras):
                waiting.append(Requirement(line))
    return found


def extras_of(code):
    """The extras that a snippet or a page says it needs."""
    found = re.findall(r"# pip install .*\[([\w,]+)\]", code)
    return sorted(set(",".join(found).split(","))) if found else []


class Hidden:
    """Imports of all packages fail that an installation with these extras, and of packages beside
    it, does not bring."""

    def __init__(self, extras=(), packages=()):
        brought = {"pyro-nmm", *installed([*requirements(extras), *packages])}
        owners = importlib.metadata.packages_distributions()
        self.names = {
            name for name, owner in owners.items() if not brought & {*map(canonicalize_name, owner)}
        }

    def __enter__(self):
        for name in [name for name in sys.modules if name.partition(".")[0] in self.names]:
            del sys.modules[name]  # other packages use them if they are there
        sys.meta_path.insert(0, self)

    def __exit__(self, *error):
        sys.meta_path.remove(self)

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
