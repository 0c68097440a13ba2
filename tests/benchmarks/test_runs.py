# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""A small run of every study: how many rows each task stores, and what they must obey."""

import math
from collections import Counter

import networkx as nx
import numpy as np
import pytest
import torch
from graphs import to_hood
from PIL import Image
from scipy.io import savemat
from sklearn.datasets import make_blobs
from torch.nn import functional as F
from torch_geometric.data import Data, InMemoryDataset
from torch_geometric.datasets import KarateClub
from torch_geometric.utils import grid, to_scipy_sparse_matrix

import benchmarks.crowds.run as crowds
import benchmarks.images.run as images
import benchmarks.links.run as links
import benchmarks.maps.run as maps
import benchmarks.nodes.run as nodes
import benchmarks.on_top.run as on_top
import benchmarks.random_fields.run as random_fields
import benchmarks.scale.run as scale
import benchmarks.tabular.run as tabular
from benchmarks.latent import annotators, hidden
from benchmarks.links.data import link_split
from benchmarks.maps import data as of_maps
from benchmarks.maps import programs, rivals
from benchmarks.nodes import fits, spn
from benchmarks.on_top import data, stages
from benchmarks.random_fields import fields
from benchmarks.scale import chains, inference, paths, speed
from benchmarks.shared.records import pick, read
from examples.denoising.training import photographs
from pyro_nmm.datasets import random_split
from pyro_nmm.models import StackedNMM

STUDIES = {}


def study(command, **numbers):
    """A study's small run: its command and rows by task, from a function that makes it small."""

    def register(prepare):
        STUDIES[prepare.__name__] = prepare, command, numbers
        return prepare

    return register


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Sparse:UserWarning")
@pytest.mark.filterwarnings("ignore:.*raise num_steps:UserWarning", "ignore:.*effective draws")
@pytest.mark.parametrize("name", STUDIES)
def test_small_run(name, twice, smaller, tmp_path):
    """Rows are stored once, and their scores are scores."""
    prepare, command, numbers = STUDIES[name]
    main, check = prepare(smaller, tmp_path)
    rows = twice(main, command.format(folder=tmp_path))
    assert Counter(f"{row.get('task')}".replace(" ", "_") for row in rows) == numbers
    for row in rows:
        for part in (row, row.get("test", {}), row.get("answered", {})):
            assert 0 <= part.get("accuracy", 0) <= 1
            assert 0 <= part.get("ECE", part.get("ece", 0)) <= 1
            assert -1e-6 <= part.get("nll", 0) < math.inf
        assert row.get("log score", 0) <= 0
    check(rows)


def by(rows, *names):
    """Rows by the values of some fields."""
    return {tuple(row[n] for n in names) if len(names) > 1 else row[names[0]]: row for row in rows}


def none(rows):
    """Nothing more is asked of the rows."""


@study("answers coverage --sets music --seeds 0 --data-root {folder}", answers=7, coverage=3)
def people(smaller, folder):
    """Two halves of a grid, and four people who are right in three of four answers."""

    def small(root, seed):
        torch.manual_seed(seed)
        edges, places = grid(10, 10)
        y = (places[:, 0] >= 5).long()
        answers = torch.where(torch.rand(100, 4) < 0.25, 1 - y[:, None], y[:, None])
        test, x = torch.arange(100) % 10 == 0, torch.randn(100, 3) + y[:, None]
        answers = answers.where(~test[:, None], -1)
        return Data(x=x, y=y, edge_index=edges, answers=answers, test=test)

    own = {name: crowds.METHODS[name] for name in ("majority", "label spreading", "Potts")}
    networks = {name: crowds.NETWORKS[name] for name in ("GCN, CrowdLayer",)}
    smaller(crowds, METHODS=own, NETWORKS=networks, SIMULATIONS=1, KINDS=["all"], NUM_EPOCHS=20)
    smaller(crowds, SETS=crowds.SETS | {"music": small})

    def check(rows):
        nll = {row["method"]: row["answered"]["nll"] for row in pick(rows, kind="all")}
        assert nll[crowds.OURS] < nll["majority"]

    return crowds.main, check


@study("halves cortex --num-seeds 1 --data-root {folder}", halves=6, cortex=19)
def clusterings(smaller, folder):
    """A section of 8 x 10 spots in two layers, of which the clusterings tell something."""
    smaller(annotators, NUM_SWEEPS=2, SECTIONS=["151673"], NUMBERS=[3, 5], STARTS=1, NUM_STEPS=2)
    (folder / "dlpfc").mkdir()
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
    (folder / "dlpfc/cluster_labels_151673.csv").write_text("\n".join(labels) + "\n")
    (folder / "dlpfc/tissue_positions_151673.txt").write_text("\n".join(places) + "\n")

    def check(rows):
        assert all(-1 <= row["ARI"] <= 1 for row in pick(rows, task="cortex"))

    return annotators.main, check


@study("normalizers select compare --seeds 1 --noise 0.5", normalizers=10, search=6, compare=10)
def pixels(smaller, folder):
    smaller(hidden, SIZE=10, NUM_STEPS=2, SWEEPS=8, ANNEAL=3, ROUNDS=1, FIELDS=["potts", "nmm"])

    def check(rows):
        for row in pick(rows, task="compare"):
            assert 0 <= row["Brier"] <= 2
            assert row["method"] != "independent" or row["bound"] == row["log evidence"]

    return hidden.main, check


@study(
    "reproduce search compare katz --num-searched 1 --num-splits 1 --num-steps 2 "
    "--data-root {folder} --datasets nips12",
    reproduce=6, search=18, compare=4, katz=1,
)  # fmt: skip
def of_links(smaller, folder):
    """The karate club as NIPS12, and with its features as Cora and the authors' splits of it."""
    club = KarateClub()[0]
    for name in ("nips12", "Cora/raw", "Cora/processed", "linkpred_splits/cora"):
        (folder / name).mkdir(parents=True)
    savemat(folder / "nips12/nips12.mat", {"B": to_scipy_sparse_matrix(club.edge_index).tocsc()})
    for name in ("x", "tx", "allx", "y", "ty", "ally", "graph", "test.index"):
        (folder / f"Cora/raw/ind.cora.{name}").touch()
    InMemoryDataset.save([club], folder / "Cora/processed/data.pt")
    for seed in range(2):
        names = ("train_edges", "val_edges", "val_edges_false", "test_edges", "test_edges_false")
        parts = (part.T.numpy() for part in link_split(club.edge_index, 34, seed))
        file = folder / f"linkpred_splits/cora/split_{seed}.npz"
        np.savez(file, **dict(zip(names, parts, strict=True)))

    def check(rows):
        seen = {"search": {"val"}, "reproduce": {"test"}, "katz": {"test"}}
        for row in rows:
            scored = {"val", "test"} & row.keys()
            assert scored == seen.get(row["task"], {"val", "test"})
            assert all(0 < score <= 100 for part in scored for score in row[part].values())

    return links.main, check


def small_graph(smaller, number=90):
    """Nodes of three labels in place of the graphs."""
    hood, y = to_hood(nx.random_regular_graph(12, number, seed=0)), torch.arange(number) % 3
    edges = torch.stack([hood.source, hood.target])[:, hood.source != hood.target]
    whole = Data(x=F.one_hot(y, 3) + torch.randn(number, 3), edge_index=edges, y=y)
    whole = random_split(whole, 0.3, 0.2, 0.5, seed=0)
    short = {name: nodes.CHANGES[name] | {"num_epochs": 2} for name in ("none", "gamma 0")}
    smaller(nodes, load=lambda name, root: (whole, hood), CHANGES=short)
    smaller(nodes, END_TO_END=nodes.END_TO_END | {"num_epochs": 2})
    smaller(fits, NUM_EPOCHS=2)


@study("search accuracy pairs sizes deviations --datasets cora --backbones gcn --num-trials 1 "
       "--num-seeds 1 --num-splits 1 --ratios 0.2",
       search=4, accuracy=10, pairs=10, sizes=10, deviations=2)  # fmt: skip
def of_nodes(smaller, folder):
    small_graph(smaller)

    def check(rows):
        assert all(0 <= row["sequential"] <= 1 for row in pick(rows, task="deviations"))
        assert all(math.isfinite(row["joint"]) for row in rows if "joint" in row)

    return nodes.main, check


@study("end_to_end --datasets cora --backbones mlp --num-seeds 1 --ratios 0.2", end_to_end=10)
def trained(smaller, folder):
    small_graph(smaller)
    return nodes.main, none


@study("graphs --datasets cycle --backbones mlp gcn --num-splits 1 --data-root {folder}", graphs=10)
def heterophilous(smaller, folder):
    """A cycle of sixty nodes with alternating labels, as the real graphs are stored."""
    y, split = torch.arange(60) % 2, torch.rand(1, 60)
    masks = {"train_masks": split < 0.5, "val_masks": (split >= 0.5) & (split < 0.7)}
    masks |= {"test_masks": split >= 0.7}
    edges = torch.stack([torch.arange(60), torch.arange(1, 61) % 60], 1)
    stored = {"node_features": torch.randn(60, 3), "node_labels": y, "edges": edges}
    (folder / "heterophilous").mkdir()
    np.savez(folder / "heterophilous" / "cycle.npz", **stored | masks)
    smaller(data, HETEROPHILOUS=["cycle"])
    smaller(nodes, SETTINGS=nodes.SETTINGS | {"num_epochs": 2})
    return nodes.main, none


@study("published random --datasets cora --backbones gcn --ratios 0.6 --num-splits 1",
       published=3, random=1)  # fmt: skip
def of_spn(smaller, folder):
    """A grid whose labels alternate along edges: SPN is jointly more likely than features."""
    smaller(spn, RATES=(0.01,), SHARPNESS=(1.0,), NUM_EPOCHS=80)
    torch.manual_seed(0)
    hood = to_hood(nx.convert_node_labels_to_integers(graph := nx.grid_2d_graph(12, 12)))
    y = torch.tensor([(i + j) % 2 for i, j in graph])
    edges = torch.stack([hood.source, hood.target])[:, hood.source != hood.target]
    board = Data(x=F.one_hot(y, 2) + 1.5 * torch.randn(144, 2), edge_index=edges, y=y)
    board = random_split(board, 0.4, 0.2, 0.3, seed=0)
    smaller(nodes.on_top, load=lambda *args: (board, None))
    smaller(nodes, load=lambda *args: (board, None))

    def check(rows):
        for row in rows:
            assert row["joint"] > -row["test"]["nll"] - 1e-3  # SPN models the labels' dependence
            assert row["pairs"] > row["own product"] - 1e-3

    return nodes.main, check


def cliques(smaller):
    """24 cliques, most nodes of which share a label."""
    hood, y = to_hood(nx.connected_caveman_graph(24, 10)), torch.arange(240) // 10 % 3
    y = torch.where(torch.rand(240) < 0.2, torch.randint(3, (240,)), y)
    edges, x = torch.stack([hood.source, hood.target]), F.one_hot(y, 3) + torch.randn(240, 3)
    for module in (data, on_top):
        smaller(module, graph=lambda name, root: (Data(x=x, edge_index=edges, y=y), hood))
    smaller(data, NUM_EPOCHS=3, NUM_OPEN=10)
    smaller(on_top, SIZES=[5], SHARES=[0.0, 0.5], QUESTIONS=2, SHOWN=[0, 2])


CLIQUES = "--graphs digits --backbones gcn --num-folds 1 --splits"


@study(f"splits edges {CLIQUES} 100 --methods raw GATS CaGCN C&S StackedNMM", splits=5, edges=5)
def methods_on_splits(smaller, folder):
    cliques(smaller)

    def check(rows):
        split, pairs = (by(pick(rows, task=task), "method") for task in ("splits", "edges"))
        assert all(row["test"]["nll"] < split["raw"]["test"]["nll"]
                   for name, row in split.items() if name != "raw")  # fmt: skip
        assert split["StackedNMM"]["joint"] > -split["StackedNMM"]["test"]["nll"]
        assert pairs["StackedNMM"]["all"]["nll"] < pairs["raw"]["all"]["nll"]
        own = -split["raw"]["own product"]
        assert pairs["raw"]["all"]["nll"] == pytest.approx(own, abs=1e-4)

    return on_top.main, check


@study(f"labels counts priors questions {CLIQUES} 100", labels=10, counts=1, priors=2, questions=2)
def joint_queries(smaller, folder):
    cliques(smaller)

    def check(rows):
        (row,) = pick(rows, task="counts")
        assert all(0 <= row[name]["width"] <= 5 for name in ("joint", "temperature"))
        nll = by(pick(rows, task="labels"), "share", "method")
        for method in ("C&S", "label propagation", on_top.UPDATED):
            assert nll[0.5, method]["test"]["nll"] < nll[0.0, method]["test"]["nll"]
        entropy, chance = pick(rows, task="questions")
        assert entropy["curve"]["0"] == chance["curve"]["0"]
        assert entropy["alike"] == pytest.approx(1)  # entropy agrees with itself

    return on_top.main, check


@study(f"revealed {CLIQUES} 100", revealed=13)
def all_test_labels(smaller, folder):
    """A chain of one block is the product of the marginals, and two estimates agree."""
    cliques(smaller)
    smaller(stages, CHAIN=1, STAGES=(1, 3))

    def check(rows):
        joint = {row["method"]: row["joint"] for row in rows}
        for name in ("C&S", "the pool"):
            assert joint[f"{name} as a chain"] == pytest.approx(joint[name], abs=1e-4)
        assert joint["ensemble"] != joint["dropout"]
        assert joint["StackedNMM"] > joint["StackedNMM, product of marginals"]
        assert rows[-1]["blocks"]["1"] == pytest.approx(joint["StackedNMM"], abs=0.02)
        assert rows[-1]["joint"] == rows[-1]["blocks"][str(rows[-1]["chosen"])]

    return on_top.main, check


@study("tables new_rows --seeds 0", tables=20, new_rows=4)
def tables(smaller, folder):
    """Two tables of three clouds of rows, and one classifier."""

    def drawn(seed):
        for name, spread in {"near": 1.0, "far": 6.0}.items():
            rows, labels = make_blobs(240, 4, centers=3, cluster_std=spread, random_state=seed)
            yield name, (rows, labels, np.arange(60), np.arange(60, 240))

    kind = "logistic regression"
    smaller(tabular, keel=drawn, KINDS={kind: tabular.KINDS[kind]}, ALONE=())

    def main(argv):
        return tabular.main([*argv, "--classifiers", kind])

    def check(rows):
        found = by(pick(rows, task="tables"), "table", "method")
        assert all(found["near", method]["accuracy"] > 0.9 for method in tabular.METHODS)
        near, far = (found[name, tabular.OURS]["agreement"] for name in ("near", "far"))
        assert near > 0.9 > far
        assert tabular.one_size(2000, "exact")["accuracy"] > 0.5

    return main, check


@study("search compare chains --seeds 1 --draws 8 --data-root {folder}",
       search=56, compare=18, chains=2)  # fmt: skip
def counties(smaller, folder):
    """A grid of two halves, a covariate that tells them apart, and a county without neighbours."""
    smaller(of_maps, BLOCK=8)
    smaller(programs, WARMUP=4, SAMPLES=8, KEPT=4, FEW=4, NUM_STEPS=3)
    smaller(rivals, ROUNDS=4, CHAINS=4, NUM_DRAWS=8, MOST_EPOCHS=30)
    edges, places = grid(10, 10)
    x = torch.cat([torch.randn(101, 6), (F.pad(places[:, 0], (0, 1)) - 4.5)[:, None]], 1)
    x[:, 0] += x[:, 6]
    (folder / "election").mkdir()
    files = {"xy": (x, "x1,x2,x3,x4,x5,x6,x7", "%.6f"), "adj": (edges.T + 1, "x1,x2", "%d")}
    for name, (values, head, form) in files.items():
        file = folder / f"election/2012_{name}.csv"
        np.savetxt(file, values.numpy(), form, ",", header=head, comments="")

    names = [name for name, method in maps.METHODS.items() if not method.needs]

    def main(argv):
        return maps.main([*argv, "--methods", *names])

    def check(rows):
        for row in pick(rows, task="compare"):
            assert row["counties"] == 20
            assert row["accuracy"] > 0.5
            if row["split"] == "spatial":
                assert 0 <= row["blocks"]["covered"] <= 1
            if "attention" in row["found"]:
                assert sum(row["found"]["attention"]) == pytest.approx(1, abs=1e-4)

    return main, check


@study("train test --num-steps 5 --watch-every 1 --width 6 --depth 1 --datasets kodak24 "
       "--data-root {folder} --checkpoints {folder} --methods U-Net U-Net-log U-Net-widths NMM",
       train=12, test=4)  # fmt: skip
def photos(smaller, folder):
    """Parts of two photographs, of which one validates. Noise has the PSNR of its deviation."""
    smaller(images, KEPT=1, BATCH=2)
    for name, number in {"bsds300/images/train": 2, "kodak24": 1}.items():
        (folder / name).mkdir(parents=True)
        for each, image in list(photographs().items())[:number]:
            part = image[:, :48, :56].permute(1, 2, 0).byte().numpy()
            Image.fromarray(part).save(folder / name / f"{each}.png")

    def check(rows):
        for row in pick(rows, task="test"):
            more = 5 * (row["method"] == "NMM")  # a U-Net is untrained, an NMM averages
            assert more < row["PSNR"] - 20 * math.log10(255 / 25) < more + 2
            assert max(row["log p"], -5) <= row.get("log p, scaled", row["log p"]) < -4
            if "joint" in row:
                gap = row["joint"] - row["log p"]
                assert gap > 0.01 if more else abs(gap) < 1e-6

    return images.main, check


def small_fields(smaller):
    """Fields of a few pixels, and fits of a few steps."""
    smaller(fields, STRIPS={2: (2, 12), 4: (2, 8), 8: (2, 5)}, SEEDS=range(1), SIZE=6)
    smaller(fields, COUPLINGS={2: [0.4], 4: [1.0], 8: [1.22]})
    smaller(fields, MANY={"few": ((2, 12), (0.1, 0.6), range(2))})
    smaller(random_fields, STEPS=dict.fromkeys(random_fields.STEPS, 4), RUNS=range(1))
    smaller(random_fields, STARTS=1, NARROW={2: [], 4: [], 8: []}, LARGE=[])


@study("strips letter plain amortized many_fields corrected large_corrected wide_corrected",
       strips=1, letter=1, plain=1, amortized=2, many_fields=6, corrected=6,
       **{"large,_corrected": 8})  # fmt: skip
def markov_random_fields(smaller, folder):
    """Divergences are positive, and bounds are above them."""
    small_fields(smaller)

    def check(rows):
        for row in rows:
            if "bound" in row:
                assert row["bound"] < row["mean field"] + 4 * row["error"] + 1e-5
                assert row["bound"] > 0 or row["kind"] == "letter"  # whose log Z is an estimate
        assert all(min(row["KL"]) > 0 for row in pick(rows, task="many fields"))
        strips, _, plain, *_ = rows
        assert strips["mean field"] > 0
        assert strips["NMM bound"] > strips["NMM"] - 4 * strips["error"] > -8 * strips["error"]
        assert plain["log Z"] == pytest.approx(fields.kac_ward(6, 6, plain["coupling"]))
        assert min(plain[name] + plain["log Z"] for name in ("mean field", "NMM", "NMM-CNN")) > 0

    return random_fields.main, check


RIVALS = {
    "strips": ["NMM, 2 steps", "NMM of half, 2 steps", "chains"],
    "plain": ["mean field", "chains", "NMM of half, 2 steps"],
    "letter": ["VAN, 3 steps", "windows 5 x 5, 4 given"],
}
POTTS = ["NMM, 2 steps", "windows 3 x 3, 3 given"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*raise num_steps:UserWarning")
@pytest.mark.parametrize("task", RIVALS)
def test_rivals_on_random_fields(task, tmp_path, smaller):
    """A row for each field and method, once. No divergence is negative."""
    small_fields(smaller)
    exact = fields.noisy_letter(0)[0].log_normalizer().item()
    (tmp_path / "fields.jsonl").write_text(f'{{"task": "letter", "seed": 0, "log Z": {exact}}}\n')
    smaller(random_fields, NARROW={2: RIVALS["strips"], 4: POTTS, 8: POTTS}, LARGE=RIVALS[task])
    for _ in range(2):
        random_fields.main([task, "--results", str(tmp_path / "fields.jsonl")])
        rows = read(tmp_path / "fields_compared.jsonl")
        assert [row["method"] for row in rows] == RIVALS[task] + 2 * POTTS * (task == "strips")
    for row in rows:
        assert -5 * row.get("error", 0.0) - 1e-3 < row["KL"] < 100


@study("variance gradients --shares 0.02 --samples 2 --repeats 3", **{"None": 3}, gradients=2)
def noise(smaller, folder):
    """Gradients of cheaper estimators are less noisy."""

    def check(rows):
        sd = {row["estimator"]: row["sd"] for row in rows if "task" not in row}
        assert sd["reinforce"] > sd["reward_to_go"] > sd["no_score"] > 0

    return scale.main, check


@study("marginals likelihood --shares 0.02 --samples 2 16 --repeats 2", marginals=4, likelihood=3)
def estimates(smaller, folder):
    """Nearer with more draws."""
    smaller(speed, CHAINS=8)

    def check(rows):
        error = by(pick(rows, task="marginals"), "weighted", "draws")
        assert 0 < error[False, 16]["error"] < error[False, 2]["error"] < 0.1
        bound, *found = (row["mean"] for row in pick(rows, task="likelihood"))
        assert abs(bound - found[-1]) < 1 < -bound

    return scale.main, check


@study("draw step growth scale --samples 2 --repeats 1 --sizes 1000 --parts 1 100",
       draw=3, step=6, growth=1, scale=1)  # fmt: skip
def seconds(smaller, folder):
    smaller(speed, MEDIUM=(150, 300, 3), QUERIES={"condition": (2000, 20_000, 4)})
    smaller(speed, in_a_process=lambda threads, function, *args: function(*args))

    def check(rows):
        assert 0 <= rows[-2]["above"] <= rows[-2]["peak"]
        for row in rows:
            each = row["seconds"]
            assert min(each.values() if isinstance(each, dict) else [each]) > 0

    return scale.main, check


@study("concentration --num-seeds 1", concentration=8)
def concentrations(smaller, folder):
    smaller(paths, NODES=60)
    return scale.main, none


def test_queries(smaller):
    class Quick(StackedNMM):
        """With a fit of two steps."""

        def fit(self, *args, **options):
            return super().fit(*args, **options | {"num_steps": 2})

    smaller(speed, StackedNMM=Quick)
    for query in speed.QUERIES:
        row = speed.one_query(query, 200, 1000, 4)
        assert row["edges"] <= 1200
        assert 0 <= row["above"] <= row["peak"]
        assert row["seconds"] > 0
    names = speed.queries(200, "cpu")
    assert len(names) == 17
    names["step with latent labels, four chains"]()


@study("epochs tightness --datasets digits --repeats 1 --num-epochs 10", **{"None": 5})
def of_epochs(smaller, folder):
    def check(rows):
        assert all(len(row["ratios"]) == 3 for row in rows[:3])
        for row in rows[3:]:
            assert row["pair bound"] < row["pair exact"] + 0.01
            assert row["test bound"] < row["test estimate"] + 0.01

    return scale.main, check


@study("parents variance --nodes 200 --steps 3 --labels 2 --sizes 34 --num-gradients 9",
       parents=3, variance=8)  # fmt: skip
def of_chains(smaller, folder):
    return chains.main, none


@study("club readme exact large kernel meetings sizes sweeps many counts --num-sets 1 "
       "--num-samples 20 --warmup 10 --methods kernel --steps 5 --of-readme 34 --sweeps 20 "
       "--repeats 1 --num-pairs 2 --parameters 2 --sizes 30 --plans FieldGibbs --limit 0.3 "
       "--units 4 --chains 1",
       club=1, readme=1, exact=1, large=1, kernel=1, meetings=8, sizes=2, sweeps=1,
       many=3, counts=2)  # fmt: skip
def posteriors(smaller, folder):
    smaller(inference, GRAPHS={"ring": inference.GRAPHS["ring"]}, NODES=9)

    def check(rows):
        assert all(row["kappa"]["low"] <= row["kappa"]["mean"] <= row["kappa"]["high"]
                   for row in rows if row["task"] in ("club", "readme", "exact"))  # fmt: skip

    return inference.main, check
