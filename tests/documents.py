# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""README.md and the pages in docs: their text, and the Python in them."""

import builtins
import importlib.util
import re
import sys
import tomllib
import warnings
from pathlib import Path

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
RESULTS = sorted((ROOT / "docs" / "results").glob("*.md"))
FOLDERS = "tutorials", "gallery"
TUTORIALS = [path for name in FOLDERS for path in sorted((ROOT / "docs" / name).glob("*.md"))]
#: Snippets by page. Each of the README stands alone; on other pages each continues the last.
SNIPPETS = {
    path.name: found
    for path in DOCUMENTS
    if (found := re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL))
}


def errors_of_warnings():
    """Warnings are errors, but for those that pyproject.toml ignores, as in a test."""
    warnings.simplefilter("error")
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    for line in options["filterwarnings"]:
        action, message, category = [*line.split(":"), "", ""][:3]
        if action == "ignore":
            kind = getattr(builtins, category, Warning)
            warnings.filterwarnings("ignore", message, kind)


def anchors(text):
    """Of a page's headings, as GitHub makes them."""
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        yield re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def links(path):
    """Relative links of a page: the file, and the anchor or an empty string."""
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        if "://" not in target:
            file, _, anchor = target.partition("#")
            yield (path.parent / file if file else path), anchor


def load(path):
    """A script as a module; it finds the files beside it, as when it is run."""
    path = ROOT / path
    sys.path.insert(0, str(path.parent))
    try:
        spec = importlib.util.spec_from_file_location(f"{path.parent.name}_{path.stem}", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.parent))
    return module


def elsewhere(text):
    """Addresses on another host that a browser loads unasked, of a page or of a style sheet."""
    text = re.sub(r'<(?:a|link rel="(?:next|prev|search|index)")[ >][^>]*>?', "", text)
    loads = r"(?:\b(?:src|href|data|poster)=|url\(|@import |:img-top: |!\[[^]]*\]\()"
    return re.findall(loads + r"\s*[\"']?((?:https?:)?//[^\"'\s)>]+)", text)
