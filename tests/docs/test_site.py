# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The documentation site: tutorials run, shortened, and so do their notebooks."""

import ast
import json
import re

import matplotlib
import pyro
import pytest
import torch
from documents import ROOT, TUTORIALS, load
from matplotlib import pyplot as plt
from sklearn.datasets import load_wine
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import kneighbors_graph
from sklearn.preprocessing import scale
from torch_geometric.data import Data

from pyro_nmm import Neighborhood
from pyro_nmm.datasets import random_split
from pyro_nmm.models import StackedNMM

CELL = re.compile(
    r"^```\{code-cell\} ipython3\n(?:---\n(.*?)---\n)?(.*?)^```$", re.DOTALL | re.MULTILINE
)


def cells(path):
    """Options and code of every cell."""
    return [(options or "", code) for options, code in CELL.findall(path.read_text())]


def shortened(code, options=""):
    """With the numbers that comments have for tests: ``num_steps = 400  # tests: 20``."""
    if "full-size" in options:  # what the page says of its output, asserted by make docs alone
        code = re.sub(r"^( *)assert ", r"\1_ = ", code, flags=re.MULTILINE)
    return re.sub(r"= [\d_.e-]+(,?)  # tests: ([\d_.e-]+)$", r"= \2\1", code, flags=re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_tutorial(path, monkeypatch, capsys):
    monkeypatch.chdir(path.parent)
    matplotlib.use("Agg")
    torch.set_default_dtype(torch.float)
    pyro.clear_param_store()
    namespace = {}
    with matplotlib.rc_context():
        for number, (options, code) in enumerate(cells(path)):
            code = compile(shortened(code, options), f"{path.name}, cell {number + 1}", "exec")
            exec(code, namespace)
        plt.close("all")
    assert capsys.readouterr().out


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


NOTEBOOKS = load("docs/notebooks.py")


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_notebook_of_a_tutorial(path):
    """It has every cell that a reader sees, and names nothing that a hidden cell defines."""
    book = json.loads(NOTEBOOKS.notebook(path))
    found = {kind: [] for kind in ("code", "markdown")}
    for cell in book["cells"]:
        found[cell["cell_type"]].append("".join(cell["source"]))
    seen = [code for options, code in cells(path) if "remove-cell" not in options]
    assert len(found["code"]) == len(seen)
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


def test_a_notebook_runs_in_any_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    matplotlib.use("Agg")
    namespace = {}
    path = ROOT / "docs" / "tutorials" / "borrowed-label.md"
    for kind, code in NOTEBOOKS.cells(path):
        if kind == "code":
            exec(compile(code, "borrowed-label.ipynb", "exec"), namespace)
    plt.close("all")
    assert "nodes 1 and 3 share a die" in capsys.readouterr().out
