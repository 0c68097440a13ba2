# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The built wheel and sdist, away from the checkout."""

import re
import subprocess
import sys
import tarfile
import zipfile
from fcntl import LOCK_EX, flock
from pathlib import Path

import pytest
from documents import SNIPPETS, anchors
from packages import PROJECT, REPOSITORY, installed, requirements
from packaging.metadata import Metadata
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parent.parent.parent
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


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
def test_wheel_holds_every_module(built):
    (path,) = built.glob("*.whl")
    held = {name for name in zipfile.ZipFile(path).namelist() if name.endswith(".py")}
    parts = {"pyro_nmm": "pyro_nmm", "models": "pyro_nmm/models", "guides": "pyro_nmm/guides"}
    assert held == {
        f"{name}/{file.relative_to(ROOT / folder)}"
        for folder, name in parts.items() for file in (ROOT / folder).rglob("*.py")
    }  # fmt: skip


def metadata(built):
    """What PyPI reads; an invalid field is an error."""
    (path,) = built.glob("*.whl")
    with zipfile.ZipFile(path) as wheel:
        (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        return Metadata.from_email(wheel.read(name))


@pytest.mark.slow
def test_links_on_pypi_are_absolute_and_lead_to_files(built):
    found = metadata(built)
    text = re.sub(r"```.*?```", "", found.description, flags=re.DOTALL)
    pairs = re.findall(r'\]\(([^)\s]+)\)|\b(?:src|srcset|href)="([^"\s]+)', text)
    targets = [*map("".join, pairs), *found.project_urls.values()]
    assert [target for target in targets if not target.startswith("https://")] == []
    inside = [t.removeprefix(REPOSITORY) for t in targets if t.startswith(REPOSITORY)]
    paths = [re.sub("^/(blob|raw)/main/", "", target) for target in inside]
    files = [path.split("#") for path in paths if not path.startswith("/") and path]
    assert len(files) > 10
    for name, *anchor in files:
        page = ROOT / (name or "README.md")
        assert page.exists(), page
        assert not anchor or anchor[0] in anchors(page.read_text()), (page, anchor)


@pytest.mark.slow
def test_the_front_on_pypi(built):
    found = metadata(built)
    assert found.description_content_type == "text/markdown"
    assert "<!--" not in found.description
    names = {"Documentation", "Source", "Issues", "Contact", "Changelog", "Paper"}
    assert found.project_urls.keys() == names
    markdown = pytest.importorskip("readme_renderer.markdown")
    assert markdown.render(found.description)


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


def site_of(built, folder):
    """A folder with the wheel, and links to its runtime dependencies."""
    (wheel,) = built.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder)
    for distribution in installed(requirements([])).values():
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
@pytest.mark.parametrize("number", [0, 1])
def test_snippet_of_the_readme_runs_as_pasted(built, tmp_path, number):
    """Alone in a fresh process, on the wheel as README installs it; it prints what stands there."""
    script, site = tmp_path / "pasted.py", site_of(built, tmp_path / "site")
    script.write_text(SNIPPETS["README.md"][number])
    printed = run_on(site, tmp_path, script)
    text = (ROOT / "README.md").read_text().split("```python\n")[1 + number]
    comments = re.findall(r"^print.*  # (tensor\(.*?\))(?:,|$)", text, re.MULTILINE)
    stands = "\n".join(comments + re.findall(r"```text\n(.*?)```", text, re.DOTALL))
    found, wanted = (NUMBER.split(text) for text in (printed, stands))
    assert [part.split() for part in found] == [part.split() for part in wanted]
    # Another processor rounds otherwise, and chains then go another way.
    pairs = zip(*(map(float, NUMBER.findall(text)) for text in (printed, stands)), strict=True)
    assert all(abs(a - b) < 0.1 + 0.2 * abs(b) for a, b in pairs), printed
