# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""What the benchmark of calibration compares with: rivals that are written here."""

import itertools
import sys
from importlib import import_module

import networkx as nx
import pytest
import torch
from graphs import house, to_hood
from torch.nn import functional as F
from torch_geometric.data import Data
from torch_geometric.nn import GCN

from pyro_nmm.models import temperature_scaling


@pytest.fixture(scope="module")
def rivals():
    return import_module("benchmarks.on_top.rivals")


def test_belief_propagation_is_exact_on_trees():
    torch.manual_seed(0)
    field = import_module("benchmarks.on_top.potts").Potts
    tree = nx.random_labeled_tree(6, seed=1)
    probs, y = torch.rand(6, 3).softmax(-1), torch.tensor([0, 2, 0, 0, 0, 0])
    known = torch.tensor([0, 1, 0, 0, 0, 0]).bool()
    log_scale, coupling = torch.tensor(0.3), torch.tensor(0.7)
    found = field(to_hood(tree), probs, y, known).messages(log_scale, coupling, steps=60)[0]
    every = torch.tensor(list(itertools.product(range(3), repeat=6)))
    own = (log_scale.exp() * probs.log()).log_softmax(-1)
    weight = own.gather(1, every.T).sum(0)
    for i, j in tree.edges:
        weight = weight + F.softplus(coupling) * (every[:, i] == every[:, j])
    weight = weight.masked_fill(every[:, 1] != 2, -torch.inf).softmax(0)
    exact = torch.einsum("s,snk->nk", weight, F.one_hot(every, 3).to(weight))
    torch.testing.assert_close(found.softmax(-1), exact, rtol=0, atol=1e-4)


def test_gats_is_that_of_its_equations(rivals):
    torch.manual_seed(0)
    hood, logits = house(), torch.randn(5, 3)
    known = torch.tensor([1, 0, 0, 0, 0]).bool()
    layer = rivals.GATS(hood, known, 3, heads=2)
    layer.coefficient.data.fill_(0.4)
    layer.of_near.data.copy_(torch.tensor([1.3, 0.8]))
    rows = [hood.source[hood.ptr[i] : hood.ptr[i + 1]].tolist() for i in range(5)]
    near = [1.3 if i == 0 else 0.8 if 0 in rows[i] else 1.0 for i in range(5)]
    sure = logits.softmax(-1).amax(-1)
    for i in range(5):
        weights, temperatures, gap = [], [], 0.0
        for j in rows[i]:
            x = logits[j]
            ranked = ((x - x.min()) / (x.max() - x.min())).sort().values
            temperatures.append(layer.ranks.weight @ ranked * near[j])
            weights.append(F.leaky_relu(logits[i] @ logits[j] / near[i] / near[j], 0.2))
            gap = gap + sure[i] - sure[j]
        alike = torch.stack(weights).softmax(0) @ torch.stack(temperatures)
        found = F.softplus(alike + 0.4 * gap / len(rows[i])).mean() + 1
        torch.testing.assert_close(layer(logits)[i], logits[i] / found)


def test_calibrations_of_few_numbers(rivals):
    torch.manual_seed(0)
    hood = to_hood(nx.cycle_graph(200))
    logits = 2 * torch.randn(200, 3)
    y = torch.distributions.Categorical(logits=logits / 3 + torch.tensor([1.0, 0, 0])).sample()
    data, held = Data(y=y), torch.rand(200) < 0.8
    known = ~held
    scaled = rivals.temperature(data, hood, logits, known, held)
    expected = (logits / temperature_scaling(logits, y, held)).softmax(-1)
    torch.testing.assert_close(scaled, expected, rtol=0, atol=1e-3)
    losses = [
        F.nll_loss(make(data, hood, logits, known, held)[held].log(), y[held])
        for make in (rivals.vector, rivals.shrunk_vector, rivals.temperature)
    ]
    assert losses[0] <= losses[1] <= losses[2]  # the fewer the limits, the better the fit
    three = rivals.three_numbers(data, hood, logits, known, held)
    assert F.nll_loss(three[held].log(), y[held]) < losses[2] + 1e-4


def test_gmnn_learns_from_its_neighbours():
    """Where features say little and neighbours agree, it is ahead of its own first phase."""
    torch.manual_seed(0)
    hood = to_hood(nx.connected_caveman_graph(20, 6))
    y = torch.arange(20).repeat_interleave(6) % 3
    order = torch.randperm(120)
    masks = {name: torch.zeros(120).bool() for name in ("train_mask", "val_mask")}
    masks["train_mask"][order[:15]], masks["val_mask"][order[15:30]] = True, True
    edges = torch.stack([hood.source, hood.target])
    data = Data(x=F.one_hot(y, 3) + 1.5 * torch.randn(120, 3), edge_index=edges, y=y, **masks)
    made = []

    def make(width):
        made.append(GCN(width, 16, 2, 3))
        return made[-1]

    logits = import_module("benchmarks.on_top.gmnn").gmnn(make, data, num_epochs=60)
    assert [each.in_channels for each in made] == [3, 3] * 2
    assert (logits.argmax(-1) == y)[order[30:]].double().mean() > 0.8


def test_no_new_label_recalibrates_itself():
    labels = import_module("benchmarks.on_top.labels")
    y, seen = torch.randint(2, (30,)), []
    new, known = torch.arange(30) < 20, torch.arange(30) > 24

    def make(given):
        seen.append(given)
        return torch.full((30, 2), 0.5)

    labels.by_folds(make, Data(y=y, num_nodes=30), known, new)
    *folds, last = seen
    assert torch.equal(last, known | new)
    left_out = torch.stack([(known | new) & ~given for given in folds])
    assert torch.equal(left_out.sum(0), new.long())


def test_drawn_splits_are_like_the_published_ones():
    data = import_module("benchmarks.on_top.data")
    y = torch.arange(10).repeat_interleave(40)
    folds, test = data.drawn(y, seed=7)
    assert [len(fold) for fold in folds] == [20, 20, 20]
    assert all((y[fold].bincount(minlength=10) == 2).all() for fold in folds)
    every = torch.cat([*folds, test])
    assert torch.equal(every.sort().values, torch.arange(400))


def test_scores_of_counts():
    """Against the definition, by all pairs of draws; and sets that grow."""
    benchmark = import_module("benchmarks.on_top.counts")
    torch.manual_seed(0)
    draws, truth = torch.randint(5, (7, 3)), torch.tensor([1, 4, 2])
    apart = (draws[:, None] - draws).abs().double().mean((0, 1)) / 2
    expected = (draws - truth).abs().double().mean(0) - apart
    torch.testing.assert_close(benchmark.crps(draws, truth), expected)
    hood, inside = to_hood(nx.path_graph(9)), torch.arange(9) != 4
    found = benchmark.grown(hood, inside, 3, torch.Generator().manual_seed(0))
    assert inside[found].all()
    assert (found.sort().values.diff() == 1).all()
    assert benchmark.grown(hood, inside, 5, torch.Generator().manual_seed(0)) is None


@pytest.mark.slow
def test_benchmark_of_calibration(tmp_path):
    torch.set_default_dtype(torch.float)
    benchmark = import_module("benchmarks.on_top.run")
    path = tmp_path / "calibration.jsonl"
    methods = ["raw", "GATS", "CaGCN", "C&S", "Potts on C&S", "the pool alone", "StackedNMM"]
    tasks = ["priors", "splits", "labels", "counts", "bootstrap", "--smoke", "--results", str(path)]
    tasks += ["--logits", str(tmp_path), "--methods", *methods]
    rows = benchmark.main(tasks).rows
    number = 2 + len(methods) + 4 * 5 + 3 + len(methods) - 1
    assert len(rows) == len(path.read_text().splitlines()) == number
    assert len(benchmark.main(tasks).rows) == len(rows)
    for row in (row for row in rows if row["task"] == "counts"):  # within the sizes of their sets
        assert all(0 <= row[name]["width"] <= row["size"] for name in ("joint", "temperature"))
    by_name = {row["method"]: row for row in rows if row["task"] == "splits"}
    assert by_name.keys() == set(methods)
    for name in methods[1:]:
        assert by_name[name]["test"]["nll"] < by_name["raw"]["test"]["nll"]
    assert by_name["StackedNMM"]["joint"] > -by_name["StackedNMM"]["test"]["nll"]
    for row in (row for row in rows if row["task"] == "bootstrap"):
        change = by_name["StackedNMM"]["test"]["nll"] - by_name[row["method"]]["test"]["nll"]
        assert row["nll"][0] == pytest.approx(change, abs=1e-4)
    with pytest.raises(ValueError, match="give --logits"):
        benchmark.main(["bootstrap", "--smoke", "--results", str(path)])


def test_bootstrap_over_nodes():
    """A difference that all nodes have is sure; one that a single node has is not."""
    over_nodes = import_module("benchmarks.on_top.run").over_nodes
    changes = torch.zeros(2, 3, 400)
    changes[:, 0, :300] = 1
    changes[:, 1, :300] = -0.1
    changes[:, 2, 0] = 3.0
    (same, low, high), (hub, least, most) = over_nodes(changes)
    assert [same, low, high] == pytest.approx([-0.1, -0.1, -0.1])
    assert hub == pytest.approx(3 / 300)
    assert least == 0
    assert most > 0.02


@pytest.mark.slow
def test_benchmark_of_questions(tmp_path, monkeypatch):
    torch.set_default_dtype(torch.float)
    benchmark = import_module("benchmarks.on_top.run")
    module = sys.modules["calibration_questions"]
    monkeypatch.setattr(module, "QUESTIONS", 2)
    monkeypatch.setattr(module, "SHOWN", [0, 2])
    monkeypatch.setattr(module, "OPEN", 10)
    rows = benchmark.main(["questions", "--smoke", "--results", str(tmp_path / "rows.jsonl")]).rows
    assert len(rows) == 2 * len(module.RULES)
    first = rows[0]["curve"]
    assert first.keys() == {"0", "2"}
    for row in rows[1:3]:  # all rules begin alike, and entropy agrees with itself
        assert row["curve"]["0"] == first["0"]
    assert rows[1]["alike"] == pytest.approx(1)


@pytest.mark.slow
def test_benchmark_of_edge_weights(tmp_path):
    torch.set_default_dtype(torch.float)
    benchmark = import_module("benchmarks.on_top.run")
    rows = benchmark.main(["weights", "--smoke", "--results", str(tmp_path / "rows.jsonl")]).rows
    assert [row["method"] for row in rows] == ["none", "by distance"]
    assert rows[0]["test"] != rows[1]["test"]
    for row in rows:
        assert row["joint"] > -row["test"]["nll"] - 0.01
