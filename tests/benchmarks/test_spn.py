# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""SPN, a rival in node classification, against enumeration on trees."""

import itertools

import networkx as nx
import pytest
import torch
from graphs import to_hood
from torch.nn import functional as F
from torch_geometric.data import Data
from torch_geometric.nn import GCN
from torch_geometric.utils import index_to_mask

from benchmarks.nodes import run, spn, tables
from pyro_nmm.datasets.nodes import inner_edges

NUM_NODES, NUM_CLASSES = 7, 3


@pytest.fixture
def field():
    """Of a tree and a node without edges, with potentials in double precision."""
    generator = torch.Generator().manual_seed(0)
    edges = torch.tensor(list(nx.random_labeled_tree(NUM_NODES - 1, seed=2).edges)).T
    options = {"generator": generator, "dtype": torch.double}
    nodes = torch.randn(NUM_NODES, NUM_CLASSES, **options)
    pairs = torch.randn(NUM_NODES - 2, NUM_CLASSES, NUM_CLASSES, **options)
    return spn.field_of(edges.sort(0).values, nodes, pairs, 2.0, 1.0)


def labellings():
    return torch.tensor(list(itertools.product(range(NUM_CLASSES), repeat=NUM_NODES)))


def energies(field):
    """Equation 2, without its normaliser, of all labellings."""
    every = labellings()
    total = field.nodes.gather(1, every.T).sum(0)
    for (i, j), table in zip(field.edges.T.tolist(), field.pairs, strict=True):
        total = total + table[every[:, i], every[:, j]]
    return total


def test_beliefs_are_exact_on_trees(field):
    weight, every = energies(field).softmax(0), F.one_hot(labellings(), NUM_CLASSES).double()
    state = spn.Messages(field, steps=80)
    exact = torch.einsum("s,snk->nk", weight, every)
    torch.testing.assert_close(state.marginals(), exact, rtol=0, atol=1e-6)
    i, j = field.edges
    exact = torch.einsum("s,spk,spl->pkl", weight, every[:, i], every[:, j])
    torch.testing.assert_close(state.tables(), exact, rtol=0, atol=1e-6)
    likely = spn.Messages(field, maximum=True, steps=80).logits().argmax(-1)
    assert torch.equal(likely, labellings()[energies(field).argmax()])


def test_chain_is_the_joint_on_trees(field):
    y, known = torch.tensor([0, 2, 1, 0, 1, 2, 0]), torch.tensor([0, 0, 1, 0, 0, 1, 0]).bool()
    every, log_weight = labellings(), energies(field).log_softmax(0)
    order = torch.tensor([6, 0, 4, 3])  # node 1 is never seen
    seen = known.clone()
    seen[order] = True
    above, below = (
        log_weight[(every[:, mask] == y[mask]).all(1)].logsumexp(0) for mask in (seen, known)
    )
    found = spn.chained(field.clamped(y, known), y, order, rings=NUM_NODES)
    assert found == pytest.approx((above - below).item(), abs=1e-6)


def test_refinement_follows_the_likelihood(field):
    """Of the exact log-likelihood, on a tree: the maximin game's gradient is its own."""
    y = torch.tensor([0, 2, 1, 0, 1, 2, 0])
    parts = [part.clone().requires_grad_() for part in field[1:]]
    free = spn.Field(field.edges, *parts)
    chosen = energies(free).log_softmax(0)[(labellings() == y).all(1)]
    exact = torch.autograd.grad(-chosen.sum() / NUM_NODES, parts)
    found = torch.autograd.grad(spn.likelihood_loss(free, y), parts)
    torch.testing.assert_close(found, exact, rtol=0, atol=1e-4)


def test_potentials_of_a_consistent_table_are_equation_9():
    table = torch.tensor([[0.3, 0.1], [0.2, 0.4]])
    edges = torch.tensor([[0], [1]])
    nodes = torch.stack([table.sum(1), table.sum(0)]).log()
    field = spn.field_of(edges, nodes, table.log()[None], 1.0, 1.0)
    exact = (table / (table.sum(1)[:, None] * table.sum(0))).log()
    torch.testing.assert_close(field.pairs[0], exact, rtol=0, atol=1e-5)
    joint = spn.Messages(field).tables()[0]
    torch.testing.assert_close(joint, table, rtol=0, atol=1e-5)


def checkerboard():
    """A grid whose labels alternate along edges, and whose features say little."""
    torch.manual_seed(0)
    graph = nx.grid_2d_graph(12, 12)
    hood = to_hood(nx.convert_node_labels_to_integers(graph))
    y = torch.tensor([(i + j) % 2 for i, j in graph])
    order = torch.randperm(144)
    parts = zip(("train", "val", "test"), order.split((60, 30, 54)), strict=True)
    masks = {f"{name}_mask": index_to_mask(nodes, 144) for name, nodes in parts}
    edges = torch.stack([hood.source, hood.target])[:, hood.source != hood.target]
    return Data(x=F.one_hot(y, 2) + 1.5 * torch.randn(144, 2), edge_index=edges, y=y, **masks)


def test_it_learns_from_both_ends_of_edges(monkeypatch):
    monkeypatch.setattr(spn, "NUM_EPOCHS", 40)
    data = checkerboard()
    field, settings = spn.best(lambda width: GCN(2, 16, 2, width), data)
    y, test, beliefs = data.y, data.test_mask, spn.Messages(field).marginals()
    assert settings["sharpness"] in spn.SHARPNESS
    assert (beliefs.argmax(-1) == y)[test].double().mean() > 0.9
    assert torch.equal(beliefs.argmax(-1)[data.train_mask], y[data.train_mask])
    rest = test.nonzero()[:, 0]
    assert spn.chained(field, y, rest) > beliefs[rest, y[rest]].log().sum()


def test_edges_with_tables_are_the_adjacent_pairs():
    """So that pairs of test nodes are those of other methods."""
    data = checkerboard()
    model = spn.SPN(lambda width: GCN(2, 16, 2, width), data)
    inner = model.edges[:, data.test_mask[model.edges].all(0)]
    assert torch.equal(inner.unique(dim=1), inner_edges(data.edge_index, data.test_mask))


@pytest.mark.slow
def test_both_tasks_run_on_a_small_graph(tmp_path, monkeypatch):
    torch.set_default_dtype(torch.float)
    monkeypatch.setattr(spn, "RATES", (0.01,))
    monkeypatch.setattr(spn, "SHARPNESS", (1.0,))
    monkeypatch.setattr(spn, "NUM_EPOCHS", 80)
    data = checkerboard()
    monkeypatch.setattr(run.on_top, "load", lambda *args: (data, None))
    monkeypatch.setattr(run, "load", lambda *args: (data, None))
    path = tmp_path / "rows.jsonl"
    arguments = ["published", "random", "--datasets", "cora", "--backbones", "gcn", "--ratios",
                 "0.6", "--num-splits", "1", "--results", str(path)]  # fmt: skip
    rows = run.main(arguments).rows
    assert [row["task"] for row in rows] == 3 * ["published"] + ["random"]
    for row in rows:
        assert row["test"]["accuracy"] > 0.6
        assert row["joint"] > -row["test"]["nll"] - 1e-3  # SPN models the labels' dependence
        assert row["pairs"] > row["own product"] - 1e-3
    assert run.main(arguments).rows == rows


def test_rows_beside_spn_are_of_its_runs():
    """Three runs, in which StackedNMM is .1 nats ahead of SPN alone and .2 jointly."""
    run = {"dataset": "cora", "backbone": "gcn"}
    ours = [
        run | {"task": "published", "split": split, "fold": 0, "method": "SPN", "max-product": 0.7,
               "test": {"accuracy": 0.8, "nll": 0.6 + split / 100, "ece": 0.1}, "pairs": -1.0,
               "joint": -0.5, "taught edges": 50, "settings": {"refined": 5 * split}}
        for split in range(3)
    ]  # fmt: skip
    theirs = [
        run | {"task": "splits", "split": split, "fold": 0, "method": method, "pairs": -0.9,
               "test": {"accuracy": 0.8, "nll": 0.5 + split / 90, "ece": 0.1},
               "joint": -0.3 - split / 99}
        for split in range(4) for method in ("StackedNMM", "GMNN", "raw")
    ]  # fmt: skip
    other = {**run, "task": "pairs", "ratio": 0.2, "seed": 10, "method": "NMM"}
    other |= {"own product": -1.0, "test": {"accuracy": 0.8, "nll": 0.5, "ece": 0.1}}
    text = tables.spn({"nodes_rivals": ours, "calibration": theirs, "nodes": [other]})
    lines = [line.split(" | ") for line in text.splitlines()[2:]]
    assert [line[3] for line in lines] == ["SPN", "GMNN", "StackedNMM"]
    assert all(line[4] == "3" for line in lines)  # the fourth split has no SPN
    assert lines[0][5:7] == ["80.0", "70.0"]
    assert lines[2][8].startswith("-0.099 ± 0.001 (median -0.099, p ")
    assert lines[2][8].endswith("†")
