# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Small runs of tasks on graphs and on tables: what rows hold, and what they must obey."""

import math
from importlib import import_module

import networkx as nx
import numpy as np
import pytest
import torch
from graphs import to_hood
from scipy.io import savemat
from sklearn.datasets import make_blobs
from stored import counts
from torch.nn import functional as F
from torch_geometric.data import Data, InMemoryDataset
from torch_geometric.datasets import KarateClub
from torch_geometric.utils import grid, index_to_mask, to_scipy_sparse_matrix

import benchmarks.crowds.cases as crowd_cases
import benchmarks.crowds.run as crowds
import benchmarks.links.run as links
import benchmarks.nodes.run as nodes
import benchmarks.on_top.run as on_top
import benchmarks.tabular.run as tabular
from benchmarks.crowds.tables import TABLES as CROWDS
from benchmarks.latent import annotators
from benchmarks.latent.tables import TABLES as LATENT
from benchmarks.links.data import link_split
from benchmarks.links.tables import FIGURES, TABLES
from benchmarks.nodes import fits, spn
from benchmarks.on_top import data, sets, stages
from benchmarks.on_top.tables import TABLES as ON_TOP
from benchmarks.shared.records import pick, read
from benchmarks.tabular.run import KINDS
from pyro_nmm.datasets import digits, random_split


def test_crowds(twice, smaller, monkeypatch, tmp_path):
    """Two halves of a grid, and four people who are right in three of four answers."""

    def small(root, seed):
        torch.manual_seed(seed)
        edges, places = grid(10, 10)
        y = (places[:, 0] >= 5).long()
        answers = torch.where(torch.rand(100, 4) < 0.25, 1 - y[:, None], y[:, None])
        test, x = torch.arange(100) % 10 == 0, torch.randn(100, 3) + y[:, None]
        answers = answers.where(~test[:, None], -1)
        return Data(x=x, y=y, edge_index=edges, answers=answers, test=test)

    own, networks = ("majority", "label spreading", "Potts"), ("GCN, CrowdLayer",)
    smaller(crowds, METHODS={name: crowds.METHODS[name] for name in own}, SIMULATIONS=1)
    smaller(crowds, NETWORKS={name: crowds.NETWORKS[name] for name in networks})
    smaller(crowds, KINDS=["all"], NUM_EPOCHS=20)
    people = (["complete"], [20], crowd_cases.people, [{"number": 5}])
    smaller(crowd_cases, CASES={"people, dense graph": people}, SEEDS=[1000], LABELS=[2])
    monkeypatch.setitem(crowds.SETS, "music", small)
    command = f"answers coverage cases --sets music --seeds 0 --data-root {tmp_path}"
    rows = twice(crowds.main, command)
    assert counts(rows) == {"answers": 8, "coverage": 3, "cases": 1}
    assert rows[-2].keys() >= {"low", "high", "mean", "accuracies"}
    assert rows[-1].keys() >= {"majority", "Dawid-Skene", "field", crowds.OURS}
    nll = {row["method"]: row["answered"]["nll"] for row in rows if row.get("kind") == "all"}
    assert nll[crowds.BEST] - 1e-6 < nll[crowds.OURS] < nll["majority"]
    assert all("|" in make({"crowds": rows}) for make in CROWDS)


def write_section(folder):
    """A section of 8 x 10 spots in two layers, of which the clusterings tell something."""
    folder.mkdir()
    truth = torch.arange(80) % 10 >= 5
    names = [f"{i}_{kind}{end}" for end in ("", "_spatial") for kind in ("PCA", "UMAP")
             for i in range(5)]  # fmt: skip
    answers = torch.where(torch.rand(80, 20) < 0.3, torch.randint(5, (80, 20)), truth[:, None])
    labels, places = [",".join(["key", "ground_truth", *names])], []
    for i, row in enumerate(answers.tolist()):
        layer = "NA" if i == 7 else f"Layer_{int(truth[i])}"
        labels.append(",".join([f"151673_S{i}", layer, *(str(a + 1) for a in row)]))
        y, x = divmod(i, 10)
        places.append(f"S{i},1,{y},{2 * x + y % 2},0,0")
    (folder / "cluster_labels_151673.csv").write_text("\n".join(labels) + "\n")
    (folder / "tissue_positions_151673.txt").write_text("\n".join(places) + "\n")


@pytest.mark.slow
def test_annotators(twice, smaller, tmp_path):
    smaller(annotators, NUM_SWEEPS=2)
    smaller(annotators, SECTIONS=["151673"], NUMBERS=[3, 5], STARTS=1, DRAWS=1, NUM_STEPS=2)
    smaller(annotators, NUM_EPOCHS=2, HEIGHT=8, CELLS=["independent", "copies and a GCN"])
    smaller(annotators, load=lambda name, root: (KarateClub()[0], None))
    write_section(tmp_path / "dlpfc")
    tasks = "halves cortex graphs simulated model --num-seeds 1 --levels 0.7"
    rows = twice(annotators.main, f"{tasks} --data-root {tmp_path}")
    number = {"halves": 6, "cortex": 11 + 2 + 4 + 2, "graphs": 1}
    assert counts(rows) == number | {"simulated": 17 + 18, "model": 12 + 12}
    for row in rows:
        assert -1 <= row.get("ARI", 0) <= 1
        assert row.get("log score", 0) <= 0
        assert 0 <= row.get("ECE", 0) <= 1
    made = [make({"annotators": rows}) for make in LATENT if "hidden" not in make.__name__]
    assert all("|" in text for text in made)


def data_root(path):
    """The karate club as NIPS12, and with its features as Cora and the authors' splits of it."""
    club = KarateClub()[0]
    for name in ("nips12", "Cora/raw", "Cora/processed", "linkpred_splits/cora"):
        (path / name).mkdir(parents=True)
    savemat(path / "nips12/nips12.mat", {"B": to_scipy_sparse_matrix(club.edge_index).tocsc()})
    for name in ("x", "tx", "allx", "y", "ty", "ally", "graph", "test.index"):
        (path / f"Cora/raw/ind.cora.{name}").touch()
    InMemoryDataset.save([club], path / "Cora/processed/data.pt")
    for seed in range(2):
        names = ("train_edges", "val_edges", "val_edges_false", "test_edges", "test_edges_false")
        parts = (part.T.numpy() for part in link_split(club.edge_index, 34, seed))
        file = path / f"linkpred_splits/cora/split_{seed}.npz"
        np.savez(file, **dict(zip(names, parts, strict=True)))
    return path


@pytest.mark.slow
def test_links(twice, tmp_path):
    small = "--num-searched 1 --num-splits 1 --num-steps 2 --data-root"
    small += f" {data_root(tmp_path / 'data')} --datasets"
    tasks = "reproduce search compare katz memberships cost attention deviations"
    rows = twice(links.main, f"{tasks} {small} nips12") + twice(links.main, f"anchor {small} cora")
    number = {"reproduce": 6, "search": 5 + 3 + 5 + 5, "compare": 4, "katz": 1}
    number |= {"memberships": 1, "cost": 1, "anchor": 1, "attention": 2}
    assert counts(rows) == number
    others = read(tmp_path / "deviations.jsonl")
    assert len(others) == 1
    for row in rows + others:
        seen = {"search": {"val"}, "attention": {"val"}, "reproduce": {"test"}, "katz": {"test"}}
        if row["task"] not in ("memberships", "cost"):
            assert {"val", "test"} & row.keys() == seen.get(row["task"], {"val", "test"})
        for part in {"val", "test"} & row.keys():
            assert all(0 < score <= 100 for score in row[part].values())
        # Steps are kept of what the figure shows, and of the reproduction.
        guided = row["task"] == "compare" and row["guide"] in ("original", "nmm")
        assert ("curve" in row) == (guided or row["task"] == "reproduce")
    for row in pick(rows, task="attention") + others:
        assert row["settings"]["width"] == row["settings"]["num_communities"]
        assert row["settings"]["own_attention"] == (row.get("reading") != "first layer shared")
    files = {"links": rows, "deviations": others}
    assert all(make(files).count("\n") > 1 for make in TABLES)
    assert len(FIGURES["link_bound.png"](files).axes[0].lines) == 4


@pytest.fixture
def small_nodes(smaller):
    """Ninety nodes of three labels in place of the graphs."""
    hood, y = to_hood(nx.random_regular_graph(12, 90, seed=0)), torch.arange(90) % 3
    edges = torch.stack([hood.source, hood.target])[:, hood.source != hood.target]
    whole = Data(x=F.one_hot(y, 3) + torch.randn(90, 3), edge_index=edges, y=y)
    whole = random_split(whole, 0.3, 0.2, 0.5, seed=0)
    short = {name: nodes.CHANGES[name] | {"num_epochs": 2} for name in ("none", "gamma 0")}
    smaller(nodes, load=lambda name, root: (whole, hood), CHANGES=short)
    smaller(fits, NUM_EPOCHS=2)
    return (
        "--datasets cora --backbones gcn --num-trials 1 --num-seeds 1 --num-splits 1 --ratios 0.2"
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_nodes(small_nodes, twice):
    tasks = "search accuracy pairs sizes deviations predicted"
    rows = twice(nodes.main, f"{tasks} {small_nodes}")
    each = 3 + 2 + 3 + 2  # a fit of an NMM has no temperature scaling
    number = {"search": 4, "accuracy": each, "pairs": each, "sizes": each, "deviations": 2}
    assert counts(rows) == number | {"predicted": 3}
    gained = {row["method"]: row for row in pick(rows, task="pairs")}
    for row in gained.values():
        base, ours = gained["backbone, temperature"], row.get("conditional", row["own product"])
        known = row["on temperature"]
        assert known["mean"] == pytest.approx(ours - base["own product"], abs=1e-5)
        assert known["low"] <= known["mean"] <= known["high"]
    assert all(0 <= row["sequential"] <= 1 for row in pick(rows, task="deviations"))
    assert all(math.isfinite(row["joint"]) for row in rows if "joint" in row)
    searched = "search accuracy --settings-of NMM --searched NMM"
    again = twice(nodes.main, f"{searched} {small_nodes}")
    assert len(again) == 2 + each
    assert all(row["settings of"] == "NMM" for row in again[2:])
    # A method alone has the same draws as among others.
    for row in twice(nodes.main, f"pairs {small_nodes} --methods NMM", "alone"):
        seconds = {name: row[name] for name in row if name == "fit seconds"}
        assert gained[row["method"]] | seconds == row


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Sparse (CSR|invariant):UserWarning")
def test_heterophilous_graphs(tmp_path, twice, smaller, monkeypatch):
    """A cycle of sixty nodes with alternating labels, as the real graphs are stored."""
    y, split = torch.arange(60) % 2, torch.rand(1, 60)
    masks = {"train_masks": split < 0.5, "val_masks": (split >= 0.5) & (split < 0.7)}
    masks |= {"test_masks": split >= 0.7}
    edges = torch.stack([torch.arange(60), torch.arange(1, 61) % 60], 1)
    stored = {"node_features": torch.randn(60, 3), "node_labels": y, "edges": edges}
    (tmp_path / "heterophilous").mkdir()
    np.savez(tmp_path / "heterophilous" / "cycle.npz", **stored | masks)
    smaller(data, HETEROPHILOUS=["cycle"])
    smaller(nodes, NUM_NODES=20)
    monkeypatch.setitem(nodes.SETTINGS, "num_epochs", 2)
    small = f"--datasets cycle --backbones mlp gcn --num-splits 1 --data-root {tmp_path}"
    rows = twice(nodes.main, f"graphs generated {small}")
    assert counts(rows) == {"graphs": 2 * len(nodes.RELABELLED), "generated": 1}
    for row in rows[:-1]:
        assert row["joint"] < 0
        assert ("conditional" in row) == (row["method"] != "backbone")
    assert rows[-1].keys() >= {"truth", "plain", "relabelled", "independent"}
    # A sparse matrix in place of messages changes no prediction.
    smaller(nodes, MANY_EDGES=0)
    for row, other in zip(rows, twice(nodes.main, f"graphs {small}", "sparse"), strict=False):
        assert row["joint"] == pytest.approx(other["joint"], abs=1e-3)


def checkerboard():
    """A grid whose labels alternate along edges, and whose features say little."""
    torch.manual_seed(0)
    graph = nx.grid_2d_graph(12, 12)
    hood = to_hood(nx.convert_node_labels_to_integers(graph))
    y = torch.tensor([(i + j) % 2 for i, j in graph])
    parts = zip(("train", "val", "test"), torch.randperm(144).split((60, 30, 54)), strict=True)
    masks = {f"{name}_mask": index_to_mask(members, 144) for name, members in parts}
    edges = torch.stack([hood.source, hood.target])[:, hood.source != hood.target]
    return Data(x=F.one_hot(y, 2) + 1.5 * torch.randn(144, 2), edge_index=edges, y=y, **masks)


@pytest.mark.slow
def test_spn(twice, smaller):
    """It learns from both ends of edges: more accurate than features, and jointly more likely."""
    smaller(spn, RATES=(0.01,), SHARPNESS=(1.0,), NUM_EPOCHS=80)
    board = checkerboard()
    smaller(nodes.on_top, load=lambda *args: (board, None))
    smaller(nodes, load=lambda *args: (board, None))
    small = "--datasets cora --backbones gcn --ratios 0.6 --num-splits 1"
    rows = twice(nodes.main, f"published random {small}")
    assert counts(rows) == {"published": 3, "random": 1}
    for row in rows:
        assert row["test"]["accuracy"] > 0.6
        assert row["joint"] > -row["test"]["nll"] - 1e-3  # SPN models the labels' dependence
        assert row["pairs"] > row["own product"] - 1e-3


@pytest.fixture
def on_cliques(smaller, twice):
    """Run tasks on a graph of 24 cliques, most nodes of which share a label."""
    hood, y = (
        to_hood(nx.connected_caveman_graph(24, 10)),
        torch.arange(24).repeat_interleave(10) % 3,
    )
    y = torch.where(torch.rand(240) < 0.2, torch.randint(3, (240,)), y)
    edges, x = torch.stack([hood.source, hood.target]), F.one_hot(y, 3) + torch.randn(240, 3)
    graph = Data(x=x, edge_index=edges, y=y)
    for module in (data, on_top):
        smaller(module, graph=lambda name, root: (graph, hood))
    smaller(data, NUM_EPOCHS=3, NUM_OPEN=10)
    smaller(on_top, SIZES=[5], SHARES=[0.0, 0.5], QUESTIONS=2, SHOWN=[0, 2])
    small = "--graphs digits --backbones gcn --num-folds 1"
    return lambda tasks: twice(on_top.main, f"{tasks} {small}")


@pytest.mark.slow
def test_methods_on_splits(on_cliques):
    names = ["raw", "GATS", "CaGCN", "C&S", "three numbers", "StackedNMM"]
    rows = on_cliques(
        f"splits edges --splits 100 --methods {' '.join(n for n in names if ' ' not in n)}"
    )
    by_name = {row["method"]: row for row in pick(rows, task="splits")}
    for name in set(by_name) - {"raw"}:
        assert by_name[name]["test"]["nll"] < by_name["raw"]["test"]["nll"]
    assert by_name["StackedNMM"]["joint"] > -by_name["StackedNMM"]["test"]["nll"]
    pairs = {row["method"]: row["all"] for row in pick(rows, task="edges")}
    assert pairs.keys() == by_name.keys()
    assert pairs["StackedNMM"]["nll"] < pairs["raw"]["nll"]
    assert pairs["raw"]["nll"] == pytest.approx(-by_name["raw"]["own product"], abs=1e-4)


@pytest.mark.slow
def test_labels_counts_weights_priors_and_questions(on_cliques):
    rows = on_cliques("labels counts weights priors --splits 100") + on_cliques(
        "questions --splits 0"
    )
    number = {"labels": 2 * 5, "counts": 1, "weights": 2, "priors": 2}
    assert counts(rows) == number | {"questions": len(on_top.RULES)}
    of = {task: pick(rows, task=task) for task in counts(rows)}
    for name in ("joint", "own product", "temperature"):
        assert 0 <= of["counts"][0][name]["width"] <= 5
    nll = {(row["share"], row["method"]): row["test"]["nll"] for row in of["labels"]}
    for method in ("C&S", "label propagation", on_top.UPDATED):
        assert nll[0.5, method] < nll[0.0, method]
    plain, weighted = of["weights"]
    assert plain["test"] != weighted["test"]
    assert all(row["joint"] > -row["test"]["nll"] - 0.01 for row in of["weights"])
    first, entropy, chance = of["questions"]
    assert first["curve"].keys() == {"0", "2"}
    # All rules begin with the same labels, and entropy agrees with itself.
    assert first["curve"]["0"] == entropy["curve"]["0"] == chance["curve"]["0"]
    assert entropy["alike"] == pytest.approx(1)


@pytest.mark.slow
def test_all_test_labels(on_cliques, smaller, monkeypatch):
    """A chain of one block is the product of the marginals, and two estimates agree."""
    monkeypatch.syspath_prepend(on_top.EXAMPLES)
    example = import_module("counts_of_a_region")
    smaller(example, SIZE=20, NUM_DRAWS=20, FEW_DRAWS=2, CHAIN_BLOCKS=1)
    smaller(stages, CHAIN=1, STAGES=(1, 3))
    smaller(on_top, LARGE=[10_000], MAPS=[0])
    smaller(sets, SIZES=(2, None), NUM_SETS=3, NUM_DRAWS=4)
    every = on_cliques("revealed sets maps large --splits 100")
    assert counts(every) == {"revealed": 13, "sets": 2 * 6, "maps": 4 + 3, "large": 1}
    rows, large = pick(every, task="revealed"), every[-1]
    assert large["10 blocks"]["joint"] == pytest.approx(large["1 blocks"]["joint"], abs=0.01)
    joint = {row["method"]: row["joint"] for row in rows}
    for name in ("C&S", "the pool"):
        assert joint[f"{name} as a chain"] == pytest.approx(joint[name], abs=1e-4)
    assert joint["ensemble"] != joint["dropout"]
    assert joint["StackedNMM"] > joint["StackedNMM, product of marginals"]
    assert rows[-1]["blocks"]["1"] == pytest.approx(joint["StackedNMM"], abs=0.02)
    assert rows[-1]["joint"] == rows[-1]["blocks"][str(rows[-1]["chosen"])]
    assert all("|" in make({"calibration": every}) for make in ON_TOP[-5:])


@pytest.fixture
def small_tables(smaller):
    """Two tables of three clouds of rows, and one classifier."""

    def drawn(seed):
        for name, spread in {"near": 1.0, "far": 6.0}.items():
            rows, labels = make_blobs(240, 4, centers=3, cluster_std=spread, random_state=seed)
            yield name, (rows, labels, np.arange(60), np.arange(60, 240))

    kinds = {"logistic regression": KINDS["logistic regression"]}
    smaller(tabular, keel=drawn, KINDS=kinds, ALONE=())


@pytest.mark.slow
def test_tables_with_few_labels(small_tables, tmp_path):
    path = ["--seeds", "0", "--results", str(tmp_path / "rows.jsonl")]
    rows = tabular.main(["tables", "--classifiers", *tabular.KINDS, *path]).rows
    assert len(rows) == 2 * len(tabular.METHODS)
    found = {(row["table"], row["method"]): row for row in rows}
    for method in tabular.METHODS:
        assert found["near", method]["accuracy"] > 0.9, method
        assert found["far", method]["nll"] >= 0
    near, far = (found[name, "NeighborMixtureClassifier"] for name in ("near", "far"))
    assert near["agreement"] > 0.9 > far["agreement"]
    rows = pick(tabular.main(["new_rows", *path]).rows, task="new_rows")
    assert [row["rows"] for row in rows] == ["fitted", "new"] * 2
    fitted, new = pick(rows, table="near")
    assert min(fitted["accuracy"], new["accuracy"]) > 0.9
    assert abs(fitted["accuracy"] - new["accuracy"]) < 0.05
    row = tabular.one_size(2000, "exact")
    assert row["accuracy"] > 0.5
    assert min(row["seconds"].values()) >= 0


@pytest.mark.slow
def test_folds_on_a_graph(smaller, twice):
    """On the digits, where the network of all labels is better than the one of half of them."""
    split = random_split(digits(), train=0.03, val=0.1, test=0.5, seed=0)
    smaller(tabular, planetoid=lambda name, root: split)
    rows = twice(tabular.main, "folds --graphs cora --backbones gcn --splits 0")
    nll = {row["method"]: row["nll"] for row in rows}
    assert nll["StackedNMM, five folds"] < nll["temperature, five folds"] < nll["temperature"]
    assert nll["StackedNMM, five folds"] < nll["StackedNMM"]
