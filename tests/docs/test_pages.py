# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The Python of the documents runs, and reaches what they claim; links lead somewhere."""

import importlib
import re
import subprocess
import sys

import pytest
from documents import DOCUMENTS, RESULTS, ROOT, SNIPPETS, TUTORIALS, anchors, links
from page_checks import CHECKS
from run_page import in_child

# Pages that share the import of torch; seconds on one core.
TOGETHER = (
    ["arviz.md", "distributed.md", "links.md", "maps.md", "pyro.md"],  # 90
)
PAGES = SNIPPETS.keys() - {"README.md"}  # the README: tests/core/test_package.py


@pytest.mark.slow
@pytest.mark.parametrize("names", TOGETHER, ids=", ".join)
def test_snippets_of_pages(names):
    """As pasted, each page in a process of its own, and then what the page claims: run_page.py."""
    command = [sys.executable, str(ROOT / "tests" / "run_page.py"), *names]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_page_with_snippets_runs_and_has_a_check():
    assert sorted(page for pages in TOGETHER for page in pages) == sorted(CHECKS) == sorted(PAGES)


def test_a_snippet_that_needs_what_is_not_there_is_found(monkeypatch, capfd):
    importlib.import_module("torch_geometric")  # as run_page.py does before a page
    monkeypatch.setitem(SNIPPETS, "broken.md", ["x = 1", "print(x, torch.ones(1))"])
    assert not in_child("broken.md")
    assert "name 'torch' is not defined" in capfd.readouterr().err
    monkeypatch.setitem(SNIPPETS, "broken.md", ["from pyro_nmm.datasets import digits", "digits()"])
    assert not in_child("broken.md")
    assert "No module named 'sklearn'" in capfd.readouterr().err


def test_kernels_of_the_design_exist():
    """The first column of the table of kernels, a module of ``pyro_nmm/ops`` and a name each."""
    text = (ROOT / "docs" / "design.md").read_text()
    table = text[text.index("| kernel |") : text.index("A sequential draw")]
    rows = re.findall(r"^\| (`.*?`) \|", table, re.MULTILINE)
    assert len(rows) > 10
    for module, name in re.findall(r"`(\w+)\.(\w+)`", " ".join(rows)):
        assert hasattr(importlib.import_module(f"pyro_nmm.ops.{module}"), name), name


def test_titles_of_pages_differ():
    pages = DOCUMENTS + RESULTS + TUTORIALS
    texts = [text for path in pages if not (text := path.read_text()).startswith("```{include}")]
    titles = [re.search(r"^# (.*)$", text, re.MULTILINE)[1] for text in texts]
    assert sorted(set(titles)) == sorted(titles)


@pytest.mark.parametrize("path", DOCUMENTS + RESULTS + TUTORIALS, ids=lambda path: path.name)
def test_links_files_and_code_of_a_page(path):
    """Links and files lead somewhere; code that no test runs is not marked as Python."""
    text = path.read_text()
    names = re.findall(r"`((?:[\w.-]+/)+[\w-]+\.\w+)`", text)
    assert [name for name in names if not (ROOT / name).exists()] == []
    for file, anchor in links(path):
        assert file.exists(), file
        assert not anchor or anchor in anchors(file.read_text()), f"{file.name}#{anchor}"
    fences = set(re.findall(r"^```(py\w*)$", text, re.MULTILINE))
    assert fences <= ({"python"} if path in DOCUMENTS else set())
