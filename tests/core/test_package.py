# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The built wheel and sdist, away from the checkout."""

import importlib.metadata
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from fcntl import LOCK_EX, flock
from pathlib import Path

import pytest
from documents import SNIPPETS
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parent.parent.parent


def run(*command, **options):
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A wheel built from the sdist, as a registry would have them."""
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", out, ROOT]
    with (ROOT / "pyproject.toml").open() as file:
        flock(file, LOCK_EX)  # two processes of the tests would write the same list of files
        run(*map(str, command))
    return out


def held(sdist):
    with tarfile.open(sdist) as archive:
        files = [member.name.split("/", 1)[-1] for member in archive if member.isfile()]
    made = {"PKG-INFO", "setup.cfg"}
    return {name for name in files if name not in made and "egg-info/" not in name}


@pytest.mark.slow
def test_sdist_holds_every_tracked_file_and_no_ignored_one(built):
    if not (ROOT / ".git").exists():
        pytest.skip("needs a git checkout")
    (path,) = built.glob("*.tar.gz")

    def listed(*options):
        return set(run("git", "ls-files", *options, cwd=ROOT).splitlines())

    assert listed() - listed("--deleted") <= held(path)
    assert held(path) <= listed("--cached", "--others", "--exclude-standard")


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def requirements(extras):
    """What an installation with these extras asks for; the empty name stands for none."""
    lines = PROJECT["dependencies"] + [
        line for extra in extras if extra for line in PROJECT["optional-dependencies"][extra]
    ]
    return [Requirement(line) for line in lines]


def test_floor_is_the_lower_bound_of_every_requirement():
    stated = {}
    for requirement in requirements(PROJECT["optional-dependencies"]):
        (bound,) = requirement.specifier
        assert bound.operator == ">=", requirement
        version = Version(bound.version)
        assert stated.setdefault(canonicalize_name(requirement.name), version) == version
    lines = [line for line in (ROOT / "floor.txt").read_text().splitlines() if line[0] != "#"]
    floor = dict(line.split("==") for line in lines)
    assert {canonicalize_name(name): Version(number) for name, number in floor.items()} == stated


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
    # What mypy knows of torch from the check of the checkout serves here as well.
    options = ["--ignore-missing-imports", "--cache-dir", str(ROOT / ".mypy_cache")]
    command = [sys.executable, "-m", "mypy", *options, "--python-version", "3.11", str(user)]
    environment = {"MYPYPATH": str(site), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    out = run(*command, cwd=tmp_path, env=environment)
    assert 'Revealed type is "int"' in out or "builtins.int" in out


def installed(requirements):
    """The distributions that these requirements bring, and those that they bring in turn."""
    found, waiting = {}, list(requirements)
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if name in found or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        found[name] = importlib.metadata.distribution(name)
        waiting += map(Requirement, found[name].requires or [])
    return found.values()


CODE = {name: "\n".join(found) for name, found in SNIPPETS.items() if name != "README.md"}
#: What an extra brings that the snippets of some pages need, made smaller.
SMALL = {
    "": "",
    "examples": """
import torch
from pyro_nmm import datasets

digits = datasets.digits
datasets.digits = lambda: digits().subgraph(torch.arange(300))
""",
}
RUN = """
import inspect
import sys
from pathlib import Path

import pyro

from pyro_nmm.models import StackedNMM
from pyro_nmm.models.annotators import out_of_fold
from pyro_nmm.models.hidden import fit_field

out_of_fold.NUM_EPOCHS = 2
few = {"num_starts": 1, "num_steps": 2, "num_chains": 2, "num_draws": 2}
vars(inspect.unwrap(fit_field).__kwdefaults__["options"]).update(few)
for fit in (StackedNMM.fit, StackedNMM.update):
    vars(inspect.unwrap(fit).__kwdefaults__["options"]).update(num_steps=2, refit_steps=2)
for path in sys.argv[1:]:
    print(path, flush=True)
    pyro.clear_param_store()
    exec(compile(Path(path).read_text(), path, "exec"), {})
"""


def extras_of(code):
    """The extras that a snippet or a page says it needs."""
    return ",".join(re.findall(r"# pip install .*\[([\w,]+)\]", code)).split(",")


def site_of(built, folder, extras):
    """A folder with the wheel, and links to its runtime dependencies and those of the extras."""
    (wheel,) = built.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder)
    for distribution in installed(requirements(extras)):
        tops = {file.parts[0] for file in distribution.files}
        for top in tops - {"..", "__pycache__"}:
            if not (folder / top).exists():
                (folder / top).symlink_to(distribution.locate_file(top))
    return folder


def run_on(site, folder, *command):
    """Python without any package but those of the site, in another folder."""
    environment = {"PYTHONPATH": str(site), "PATH": "/usr/bin:/bin", "HOME": str(folder)}
    environment["OMP_NUM_THREADS"] = "1"
    return run(sys.executable, "-S", *command, cwd=folder, env=environment)


@pytest.mark.slow
@pytest.mark.skipif(len(SNIPPETS["README.md"]) > 2, reason="the README has incomplete snippets")
@pytest.mark.parametrize("number", range(len(SNIPPETS["README.md"])))
def test_snippet_of_the_readme_runs_as_pasted(built, tmp_path, number):
    """Alone in a fresh process, on the wheel and what the snippet says that it needs."""
    code = SNIPPETS["README.md"][number]
    script = tmp_path / "pasted.py"
    script.write_text(code)
    run_on(site_of(built, tmp_path / "site", extras_of(code)), tmp_path, script)


@pytest.mark.slow
@pytest.mark.parametrize("extra", SMALL)
def test_snippets_need_no_more_than_they_say(built, tmp_path, extra):
    """
    The code runs, for a few steps, with the wheel and its runtime dependencies; a page that
    needs an extra says so.
    """
    site = site_of(built, tmp_path / "site", [extra])
    script = tmp_path / "script.py"
    script.write_text(SMALL[extra] + RUN)
    pages = []
    for name, code in CODE.items():
        if extras_of(code) == [extra]:
            pages.append(tmp_path / name)
            few = re.sub(r"(range\(|num_steps=|num_epochs=)\d+", r"\g<1>2", code)
            pages[-1].write_text(few)
    assert pages
    run_on(site, tmp_path, "-W", "error::RuntimeWarning", script, *pages)
