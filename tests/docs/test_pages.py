# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The Python of the documents runs, and reaches what they claim; links lead somewhere."""

import importlib
import inspect
import re
from pathlib import Path

import numpy as np
import pyro
import pytest
import torch
from documents import DOCUMENTS, RESULTS, ROOT, SNIPPETS, TUTORIALS, anchors, links, run_page
from sklearn.datasets import load_digits

from pyro_nmm import Neighborhood, NeighborMixture
from pyro_nmm.datasets.nodes import digits, random_split
from pyro_nmm.guides import mean_field
from pyro_nmm.metrics import mean_log_prob
from pyro_nmm.models.annotators import out_of_fold
from pyro_nmm.models.hidden import fit_field


@pytest.fixture(autouse=True)
def as_a_user():
    torch.set_default_dtype(torch.float)


def readme(number, **given):
    """What a snippet of the README leaves behind, with what it expects of its reader."""
    exec(compile(SNIPPETS["README.md"][number], "README.md", "exec"), given)
    return given


def score(probs, data):
    """Mean log-probability of the labels of the test nodes."""
    return mean_log_prob(probs.clamp(min=1e-12)[data.test_mask], data.y[data.test_mask])


def test_readme_few_labels():
    images, y = load_digits(return_X_y=True)
    known = np.random.default_rng(0).random(1797) < 0.1
    names = np.array(list("abcdefghij"), dtype=object)[y]
    labels = np.where(known, names, -1)[:1700]
    model = readme(0, rows=images[:1700], y=labels, new_rows=images[1700:])["model"]
    assert (model.transduction_ == names[:1700])[~known[:1700]].mean() > 0.93
    assert (model.predict(images[1700:]) == names[1700:]).mean() > 0.85
    assert "share of the NMM" in model.summary()


def test_readme_on_top_of_a_classifier(capsys):
    """The second snippet, with an overconfident classifier."""
    data = random_split(digits(), train=0.05, val=0.1, test=0.5, seed=0)
    scores = 20 * (torch.nn.functional.one_hot(data.y).float() + 0.6 * torch.randn(1797, 10))
    posterior = readme(1, data=data, model=lambda x, edge_index: scores)["posterior"]
    assert score(posterior.marginals(), data) > score(scores.softmax(-1), data) + 0.5


def test_readme_annotators(monkeypatch):
    monkeypatch.setattr(out_of_fold, "NUM_EPOCHS", 20)
    pyro.set_rng_seed(0)
    data = digits()
    answers = torch.where(torch.rand(1797, 5) < 0.6, data.y[:, None], torch.randint(10, (1797, 5)))
    page = readme(2, data=data, answers=answers)
    assert (page["consensus"].predict() == data.y).float().mean() > 0.97
    assert (page["accuracy"](page["consensus"]).mean - 0.64).abs().max() < 0.05


def test_readme_guide():
    pyro.set_rng_seed(0)
    page = readme(3)
    log_z = page["field"].log_normalizer()
    last = sum(page["losses"][-50:]) / 50 + log_z
    assert 0 < last < 0.7 * (mean_field(page["field"]).losses[0] + log_z)


def test_every_snippet_of_the_docs_is_run_here():
    run = set(re.findall(r'run_page\(\s*"(.*?)"', Path(__file__).read_text()))
    assert SNIPPETS.keys() == run | {"README.md"}
    assert len(SNIPPETS["README.md"]) == 4


@pytest.mark.slow
def test_front_page():
    page = run_page("index.md")
    assert score(page["marginals"], page["data"]) > score(page["scores"].softmax(-1), page["data"])
    assert page["pairs"].shape == (100, 10, 10)
    assert page["draws"].shape == (100, 1797)


@pytest.mark.slow
def test_docs_variational_family(capsys):
    found = run_page("variational-family.md")
    printed = re.findall(r"([\d.]+)(?: nats|$)", capsys.readouterr().out, re.MULTILINE)
    independent, joint, half = map(float, printed)
    assert 0 < joint < 0.7 * independent
    assert 0 < half < 0.7 * joint
    assert sum(found["losses"][-20:]) / 20 + found["log_z"] < joint  # fit_mixture of half
    assert found["ones"].mean() > 0.6
    assert found["family"].network.log_odds.mean() < -1


@pytest.mark.slow
def test_docs_node_classification():
    found = run_page("node-classification.md", ("num_epochs=50)", "num_epochs=5)"))
    data, later, test = found["data"], found["later"], found["data"].test_mask
    alone, marginals = score(found["scores"].softmax(-1), data), score(found["marginals"], data)
    assert marginals > alone
    assert found["joint"] / test.sum() > marginals
    assert found["more"] > found["joint"] - 0.02 * test.sum()  # with communities as sources
    assert torch.equal(later.predict()[data.val_mask], data.y[data.val_mask])
    probe = found["log_probs"](found["labelled"]).exp()
    assert score(found["by_folds"].marginals(), data) > score(probe, data) + 0.2
    assert 0.3 < float(found["crossed"].share) < 1
    assert score(found["sharper"].marginals(), data) > alone
    assert not found["elsewhere"].observed.any()
    assert found["draws"].shape == (5, 1797)
    assert torch.equal(found["of_papers"].argmax(-1), torch.tensor([0, 1, 1]))
    assert found["padded"][:2].eq(0).all()
    inside = found["sets"][range(int(test.sum())), data.y[test]].mean()
    assert inside == pytest.approx(0.95, abs=0.03)  # of 898 sets, calibrated on 630 nodes
    assert found["sets"].sum(1).mean() < 1.5
    for posterior in (later, found["trained"]):
        assert (posterior.predict() == data.y)[test].float().mean() > 0.9
    assert found["pyro"].param("loc") > 1  # concentrations above the prior's median


def test_docs_tabular(capsys):
    page = run_page("tabular.md")
    printed = capsys.readouterr().out
    assert float(re.search(r"accuracy (\S+)", printed)[1]) > 0.95
    low, high = map(float, re.search(r"(\d+) to (\d+) of the images", printed).groups())
    assert 150 < low < high < 215
    assert page["model"].predict_proba(page["rows"][:3]).argmax(1).tolist() == [0, 1, 2]


def test_docs_latent_labels(capsys):
    pyro.set_rng_seed(0)
    page = run_page("latent-labels.md")
    printed = capsys.readouterr().out
    same = float(re.search(r"same label with probability (\S+)", printed)[1])
    assert same > 0.6
    right, alone = re.search(r"right: (\S+), without neighbours (\S+)", printed).groups()
    assert float(right) > float(alone) + 0.02
    assert page["losses"][-1] < page["losses"][0]
    low, high = pyro.param("means").tolist()
    assert low < -0.7
    assert high > 0.7
    assert page["posterior"].marginals()[1, 1] > 0.5


def test_docs_annotators_in_ten_lines(capsys):
    """From a graph and a table to labels, and annotators in the order of how good they are."""
    pyro.set_rng_seed(0)
    given, code = SNIPPETS["annotators.md"][:2]
    assert len(code.splitlines()) <= 10
    page = {}
    exec(given + code, page)
    assert (page["consensus"].predict() == page["truth"]).float().mean() > 0.95
    inside = re.findall(r"right in (\S+) of the cases, (\S+) to (\S+)", capsys.readouterr().out)
    rates = [1 - 2 / 3 * share for share in (0.2, 0.3, 0.4, 0.5, 0.6)]
    for rate, (_, low, high) in zip(rates, inside, strict=True):
        assert float(low) - 0.05 < rate < float(high) + 0.05


@pytest.mark.slow
def test_docs_annotators(capsys, monkeypatch):
    monkeypatch.setattr(out_of_fold, "NUM_EPOCHS", 40)
    options = inspect.unwrap(fit_field).__kwdefaults__["options"]
    monkeypatch.setitem(vars(options), "num_starts", 2)
    pyro.set_rng_seed(0)
    page = run_page("annotators.md", ("range(100)", "range(20)"))
    printed = capsys.readouterr().out
    tried = {name: float(score) for name, score in re.findall(r"(.*): score (\S+), right", printed)}
    assert tried["every node"] < min(tried["one hop"], tried["two hops"]) - 0.2
    assert tried["typed"] > tried["alone"] + 0.1
    right, sure = zip(*re.findall(r"right (\S+), sure (\S+)", printed), strict=True)
    assert float(right[1]) > float(right[0]) + 0.1
    assert float(sure[0]) > float(right[0]) + 0.25  # too sure, and types help
    assert float(sure[1]) < float(right[1]) + 0.1
    low, high = map(float, re.search(r"(\d+) to (\d+) nodes have label 0", printed).groups())
    assert 192 - 15 < low < high < 192 + 15
    shared = [float(value) for value in re.findall(r"labels: (\S+) shared", printed)]
    assert shared[1] == max(shared)
    assert page["table"].tolist() == [[2, 1], [-1, -1]]
    rates = page["poisson"].values["rate"][:, 0].sort().values.tolist()
    assert rates == pytest.approx([1, 3, 6], rel=0.2)
    assert page["quality"].mean.argmax() < 2


def test_docs_pyro():
    found = run_page("pyro.md")
    store, truth = found["pyro"].get_param_store(), found["truth"]
    assert sum(found["losses"][-20:]) < sum(found["losses"][:20])
    assert store["means"][0] < -0.4
    assert store["means"][1] > 0.4
    marginals, labelled = found["marginals"], found["labelled"]
    torch.testing.assert_close(marginals[labelled].argmax(-1), truth[labelled])
    assert (marginals.argmax(-1) == truth).float().mean() > 0.8
    assert found["rest"].shape == (1000, 12)
    assert found["ones"].shape == (12,)
    mix = found["NeighborMixture"](found["hood"], found["alpha"], found["logits"])
    exact = mix.condition(truth, labelled, num_samples=4000, weighted=True).marginals()
    assert (found["ones"] - exact[~labelled, 1]).abs().max() < 0.15


def test_docs_distributed():
    found = run_page("distributed.md")
    assert found["convolved"].network.omega.grad is not None
    data, network, batch = found["data"], found["network"], found["batch"]
    hood = Neighborhood(data.edge_index, 34)
    with torch.no_grad():
        whole = NeighborMixture(hood, *network(hood, data.x, data.edge_index)).marginals()
    torch.testing.assert_close(found["marginals"], whole[batch.n_id[: batch.batch_size]])
    assert (whole.argmax(-1) == data.y).double().mean() > 0.9


def test_docs_links(capsys):
    found = run_page("links.md")
    first, last = map(
        float, re.search(r"loss ([\d.]+) to ([\d.]+)", capsys.readouterr().out).groups()
    )
    assert last < 0.9 * first
    pair, split, x = found["pair"], found["split"], found["data"].x
    assert found["logits"].shape == (2 * split.test.shape[1],)
    use, side = found["strength"].abs().mean(0), found["strength"][:, 0] > 0
    assert use[0] > 3 * use[1:].max()
    half = torch.isin(found["data"].y, torch.tensor([1, 3]))  # two of four communities each
    assert not 0.15 < (side == half).float().mean() < 0.85
    # A handful of hidden links says nothing; those that were fitted must be likelier than others.
    known = pair.link_logits(split.train, split.train, x)
    assert known.mean() > pair.link_logits(split.test_false, split.train, x).mean() + 0.2


@pytest.mark.slow
def test_docs_denoising(capsys):
    fewer = ("num_steps=300", "num_steps=150"), ("num_steps=100", "num_steps=50")
    run_page(
        "denoising.md", *fewer, ("120:220, 240:360", "120:180, 240:300"), ("(100, 120)", "(60, 60)")
    )
    error, inside = re.findall(r"(\d+\.\d+)", capsys.readouterr().out)
    assert float(error) < 15
    assert 0.85 < float(inside) < 0.995


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
