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
    ["distributed.md", "latent-labels.md", "links.md", "pyro.md", "tabular.md"],  # 35
    ["annotators.md", "index.md"],  # 55
    ["node-classification.md", "variational-family.md"],  # 45
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
    monkeypatch.setitem(SNIPPETS, "broken.md", ["x = 1", "print(x, torch.ones(1))"])
    assert not in_child("broken.md")
    assert "name 'torch' is not defined" in capfd.readouterr().err
    monkeypatch.setitem(SNIPPETS, "broken.md", ["from pyro_nmm.datasets import digits", "digits()"])
    assert not in_child("broken.md")
    assert "No module named 'sklearn'" in capfd.readouterr().err


@pytest.mark.parametrize("path", DOCUMENTS + RESULTS + TUTORIALS, ids=lambda path: path.name)
def test_code_that_no_test_runs_is_not_marked_as_python(path):
    fences = set(re.findall(r"^```(py\w*)$", path.read_text(), re.MULTILINE))
    assert fences <= ({"python"} if path in DOCUMENTS else set())


def test_annotators_in_ten_lines():
    assert len(SNIPPETS["annotators.md"][1].splitlines()) <= 10


def test_kernels_of_the_design_exist():
    """The first column of the table of kernels, a module of ``pyro_nmm/ops`` and a name each."""
    text = (ROOT / "docs" / "design.md").read_text()
    table = text[text.index("| kernel |") : text.index("A sequential draw")]
    rows = re.findall(r"^\| (`.*?`) \|", table, re.MULTILINE)
    assert len(rows) > 10
    for module, name in re.findall(r"`(\w+)\.(\w+)`", " ".join(rows)):
        assert hasattr(importlib.import_module(f"pyro_nmm.ops.{module}"), name), name


def test_titles_of_pages_differ():
    texts = [path.read_text() for path in DOCUMENTS[1:] + RESULTS + TUTORIALS]
    titles = [re.search(r"^# (.*)$", text, re.MULTILINE)[1] for text in texts]
    assert sorted(set(titles)) == sorted(titles)


@pytest.mark.parametrize("path", DOCUMENTS + RESULTS + TUTORIALS, ids=lambda path: path.name)
def test_files_that_a_page_names_exist(path):
    names = re.findall(r"`((?:[\w.-]+/)+[\w-]+\.\w+)`", path.read_text())
    assert [name for name in names if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("path", DOCUMENTS + RESULTS + TUTORIALS, ids=lambda path: path.name)
def test_docs_link_to_what_is_there(path):
    for file, anchor in links(path):
        assert file.exists(), file
        assert not anchor or anchor in anchors(file.read_text()), f"{file.name}#{anchor}"


@pytest.mark.parametrize("path", DOCUMENTS + RESULTS + TUTORIALS, ids=lambda path: path.name)
def test_page_loads_nothing_from_another_host(path):
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    assert not re.findall(
        r"!\[[^]]*\]\(\w+://|:img-top: \w+://|<(?:img|script)[^>]*src=.\w*:?//", text
    )
