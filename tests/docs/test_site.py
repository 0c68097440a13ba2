# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The documentation site: tutorials run, shortened, and so do their notebooks."""

import ast
import json
import os
import re
import subprocess
import sys

import pyro
import pytest
import torch
from documents import ROOT, TUTORIALS, load
from packaging.requirements import Requirement
from run_tutorial import NOTEBOOKS, cells, shortened
from sklearn.datasets import load_wine
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import kneighbors_graph
from sklearn.preprocessing import scale
from torch_geometric.data import Data

from pyro_nmm import Neighborhood
from pyro_nmm.datasets import random_split
from pyro_nmm.models import StackedNMM

#: What a notebook installs beside the library.
INSTALLED = {
    "borrowed-label": {"matplotlib", "networkx"},
    "exact-and-bound": {"matplotlib", "networkx"},
    "few-labels": {"matplotlib", "scikit-learn"},
    "larger-program": {"matplotlib", "networkx"},
    "noisy-labels": {"matplotlib", "networkx", "scikit-learn"},
    "the-paper-in-pyro": {"matplotlib", "networkx"},
    "variational-family": {"matplotlib"},
    "your-graph": {"matplotlib", "scikit-learn"},
    "cortex": {"matplotlib", "scikit-learn", "scipy"},
}


def run(path, folder):
    """In a process of its own, with the packages alone that the page's notebook installs."""
    command = [sys.executable, str(ROOT / "tests" / "run_tutorial.py"), str(path), str(folder)]
    options = {"capture_output": True, "text": True, "env": os.environ | {"MPLBACKEND": "Agg"}}
    return subprocess.run(command, check=False, **options)


@pytest.mark.slow
@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_tutorial(path, tmp_path):
    """A tutorial needs no file, and a page of the gallery those beside it."""
    done = run(path, tmp_path if path.parent.name == "tutorials" else path.parent)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout


@pytest.mark.slow
def test_a_package_that_a_notebook_does_not_install_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text('```{code-cell} ipython3\n__import__("sklearn")\n```\n')
    assert "No module named 'sklearn'" in run(page, tmp_path).stderr


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_form_of_a_tutorial(path):
    text, found = path.read_text(), cells(path)
    assert text.count("```{code-cell}") == len(found) > 3
    assert text.rindex("\n## ") == text.index("\n## Something to change")
    for options, code in found:
        draws = "plt.subplots(" in code or "plt.figure(" in code
        assert not draws or "alt:" in options, (
            f"a picture without words for those who cannot see it:\n{code}"
        )
        assert not draws or "hide-input" in options, f"drawing code that is not hidden:\n{code}"
        assert all(len(line) <= 100 for line in code.splitlines())
        assert ("assert " in code) == ("remove-cell" in options), code
    assert "full-size" in text, "hidden cells assert what the page says of its output"
    for marked in re.findall(r".*# tests:.*", text):
        assert shortened(marked) != marked, marked


def test_a_failed_assert_of_a_tutorial_breaks_the_build():
    config = load("docs/conf.py")
    assert config.nb_execution_raise_on_error
    assert config.nb_execution_mode == "cache"
    hidden = "if True:\n    assert 1 > 2\n"
    assert shortened(hidden) == shortened(hidden, "tags: [remove-cell]") == hidden
    exec(shortened(hidden, "tags: [remove-cell, full-size]"))


def test_snippet_of_your_graph_on_another_graph():
    """Wines, joined to those of near measurements, and a classifier that sees three of these."""
    page = ROOT / "docs" / "tutorials" / "your-graph.md"
    (code,) = (code for _, code in cells(page) if "StackedNMM(num" in code)
    code = code.replace("num_classes=10", "num_classes=3").replace("label=3", "label=2")
    assert len(code.splitlines()) <= 15
    torch.set_default_dtype(torch.float)
    pyro.set_rng_seed(0)
    features, labels = load_wine(return_X_y=True)
    x, y = torch.tensor(scale(features)).float(), torch.tensor(labels)
    near = torch.tensor(kneighbors_graph(x.numpy(), 6).toarray()).nonzero().T
    data = random_split(Data(x=x, edge_index=near.unique(dim=1), y=y), 0.1, 0.2, 0.5, seed=0)
    classifier = LogisticRegression().fit(x[data.train_mask, :3], y[data.train_mask])
    scores = torch.tensor(classifier.decision_function(x[:, :3])).float()
    known = {"data": data, "scores": scores, "torch": torch, "Neighborhood": Neighborhood}
    exec(code, namespace := known | {"StackedNMM": StackedNMM})
    test = data.test_mask
    before, after = scores.log_softmax(1), namespace["marginals"].log()
    assert after[test, y[test]].mean() > before[test, y[test]].mean() + 0.01
    assert namespace["threes"].shape == (1000, 2)


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_notebook_of_a_tutorial(path):
    """It has every cell that a reader sees, and names nothing that a hidden cell defines."""
    book = json.loads(NOTEBOOKS.notebook(path))
    found = {kind: [] for kind in ("code", "markdown")}
    for cell in book["cells"]:
        found[cell["cell_type"]].append("".join(cell["source"]))
    seen = [code for options, code in cells(path) if "remove-cell" not in options]
    install, *shown = found["code"]
    assert len(shown) == len(seen)
    assert install.startswith("%pip install pyro-nmm ")
    wanted = re.findall(r'"(.*?)"', install)
    assert {Requirement(line).name for line in wanted} == INSTALLED[path.stem]
    modules = {name.partition(".")[0] for name in NOTEBOOKS.imported(seen)}
    brought = {"numpy", "pyro", "pyro_nmm", "torch", "torch_geometric"}
    assert modules - brought - sys.stdlib_module_names <= NOTEBOOKS.PACKAGES.keys()
    assert "assert " not in "".join(found["code"])
    assert "# tests:" not in "".join(found["code"])
    assert found["markdown"][0].startswith("# ")
    text = "\n".join(found["markdown"])
    assert "{code-cell}" not in text
    assert not re.findall(r"\]\((?!https?://)[^)]*\)", text), "a link to a file"
    hidden, _ = names_in(code for options, code in cells(path) if "remove-cell" in options)
    bound, read = names_in(seen)
    assert not (hidden - bound) & read


def names_in(codes):
    """Names that cells bind, and names that they read."""
    nodes = [node for code in codes for node in ast.walk(ast.parse(code))]
    names = [node for node in nodes if isinstance(node, ast.Name)]
    bound = {node.id for node in names if isinstance(node.ctx, ast.Store)}
    bound |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    return bound, {node.id for node in names if isinstance(node.ctx, ast.Load)}
