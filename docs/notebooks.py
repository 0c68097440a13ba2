# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Tutorials as Jupyter notebooks to download, which ``docs/conf.py`` writes beside the pages."""

from __future__ import annotations

import ast
import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

CELL = re.compile(
    r"^```\{code-cell\} ipython3\n(?:---\n(.*?)---\n)?(.*?)^```$", re.DOTALL | re.MULTILINE
)
#: Text that serves the site or its tests alone.
SITE_ONLY = (
    (re.compile(r"\A---\n.*?\n---\n", re.DOTALL), ""),  # the kernel of the site
    (re.compile(r"!\[[^]]*\]\((?!https?://)[^)]*\)\n*"), ""),  # pictures of the site
    (re.compile(r"\[([^]]+)\]\((?!https?://)[^)]*\)"), r"\1"),  # links to pages of the site
)
TESTS_ONLY = ((re.compile(r"  # tests: .*$", re.MULTILINE), ""),)  # sizes for short runs
STYLE = re.compile(r'^plt\.style\.use\("(.*?)"\)$', re.MULTILINE)
NOTE = """
*This notebook is a page of the documentation of pyro-nmm. Its first cell of code installs what it
needs.*
"""
#: Packages of imports, for those that the library does not bring.
PACKAGES = {
    "matplotlib": "matplotlib",
    "networkx": "networkx",
    "pyro_nmm.datasets.digits": "scikit-learn",
    "pyro_nmm.datasets.letters": "matplotlib",
    "pyro_nmm.models.tabular": "scikit-learn",
    "scipy": "scipy",
    "sklearn": "scikit-learn",
    "torch_geometric.utils.to_networkx": "networkx",
}


def parts(text: str) -> Iterator[tuple[str, str]]:
    """Kind (``"markdown"`` or ``"code"``) and text of each cell that a reader sees."""
    end = 0
    for found in CELL.finditer(text):
        yield "markdown", text[end : found.start()]
        options, code = found.groups()
        if "remove-cell" not in (options or ""):
            yield "code", code
        end = found.end()
    yield "markdown", text[end:]


def imported(codes: list[str]) -> Iterator[str]:
    """Dotted names that code imports."""
    for node in (node for code in codes for node in ast.walk(ast.parse(code))):
        if isinstance(node, ast.Import | ast.ImportFrom):
            prefix = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            yield from (prefix + alias.name for alias in node.names)


def packages(page: Path) -> list[str]:
    """Requirements of a page beside the library, with the bounds of the extra ``examples``."""
    names = imported([text for kind, text in parts(page.read_text()) if kind == "code"])
    needed = {
        package
        for name in names
        for known, package in PACKAGES.items()
        if f"{name}.".startswith(f"{known}.")
    }
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())
    bounds = project["project"]["optional-dependencies"]["examples"]
    return [bound for bound in bounds if bound.partition(">=")[0] in needed]


def settings(style: Path) -> str:
    """The file of a style as code."""
    lines = [line.split(": ", 1) for line in style.read_text().splitlines() if line[0] != "#"]
    entries = "".join(f'    "{name}": {value!r},\n' for name, value in lines)
    return f"plt.rcParams.update({{\n{entries}}})"


def with_settings(code: str, folder: Path) -> str:
    """Code with the settings of a style in the place of its file."""
    return STYLE.sub(lambda found: settings(folder / found[1]), code)


def cells(page: Path) -> list[tuple[str, str]]:
    """Kind and text of each cell of a page's notebook; adjacent cells of text are one."""
    joined: list[tuple[str, str]] = []
    for kind, text in parts(page.read_text()):
        for pattern, new in SITE_ONLY if kind == "markdown" else TESTS_ONLY:
            text = pattern.sub(new, text)
        if kind == "code":
            text = with_settings(text, page.parent)
        if not (text := text.strip("\n")):
            continue
        if kind == "markdown" and joined and joined[-1][0] == kind:
            joined[-1] = kind, f"{joined[-1][1]}\n\n{text}"
        else:
            joined.append((kind, text))
    joined[0] = "markdown", joined[0][1] + "\n" + NOTE.rstrip()
    first = [kind for kind, _ in joined].index("code")
    install = "%pip install pyro-nmm " + " ".join(f'"{line}"' for line in packages(page))
    return [*joined[:first], ("code", install.rstrip()), *joined[first:]]


def notebook(page: Path) -> str:
    """A page as a notebook of format 4.5, without outputs."""
    made = []
    for number, (kind, text) in enumerate(cells(page)):
        cell = {"cell_type": kind, "id": f"cell-{number}", "metadata": {}}
        cell["source"] = text.splitlines(keepends=True)
        made.append(cell | ({"execution_count": None, "outputs": []} if kind == "code" else {}))
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    whole = {"cells": made, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


def write(source: Path, out: Path) -> None:
    """Every tutorial in the folder ``source`` as a notebook in the folder ``out``."""
    out.mkdir(parents=True, exist_ok=True)
    for page in sorted(source.glob("*.md")):
        (out / f"{page.stem}.ipynb").write_text(notebook(page))
