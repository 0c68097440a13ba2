# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The documents' code and the examples run, and reach what they claim."""

import importlib.util
import math
import re
import sys
import time

import pyro
import pytest
import scipy.stats
import torch
from documents import DOCUMENTS, ROOT, SNIPPETS, anchors, links, run_page
from torch_geometric.datasets import KarateClub
from torch_geometric.utils import to_dense_adj

from pyro_nmm import Neighborhood, NeighborMixture
from pyro_nmm.datasets.nodes import digits, planetoid, random_split, select_split
from pyro_nmm.metrics import mean_log_prob
from pyro_nmm.models import Annotators, grid_edges, ising


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


@pytest.fixture(autouse=True)
def as_a_user():
    torch.set_default_dtype(torch.float)


def test_readme_on_top_of_a_classifier(capsys):
    """The first snippet, with a classifier that is too sure of itself."""
    data = random_split(digits(), train=0.05, val=0.1, test=0.5, seed=0)
    truth = torch.nn.functional.one_hot(data.y).float() + 0.6 * torch.randn(1797, 10)
    namespace = {"data": data, "model": lambda x, edge_index: 20 * truth}
    code = SNIPPETS["README.md"][0].rstrip().rpartition("\n")
    exec(f"{code[0]}\njoint = {code[2]}", namespace)
    test = data.test_mask
    probs = {"alone": (20 * truth).softmax(-1), "NMM": namespace["posterior"].marginals()}
    likelihood = {
        k: mean_log_prob(p[test].clamp(min=1e-12), data.y[test]) for k, p in probs.items()
    }
    assert likelihood["NMM"] > likelihood["alone"] + 0.5
    assert namespace["joint"] / test.sum() > likelihood["NMM"] - 0.01


def test_quick_start_of_the_readme(capsys):
    code = SNIPPETS["README.md"][1]
    assert len(code.splitlines()) <= 25
    exec(compile(code, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    accuracy = float(re.search(r"accuracy ([\d.]+)", printed).group(1))
    assert accuracy > 0.75


def test_every_snippet_of_the_docs_is_run_here():
    run = {"README.md", "denoising.md", "links.md", "node-classification.md"}
    run |= {"variational-family.md", "latent-labels.md", "annotators.md", "distributed.md"}
    assert SNIPPETS.keys() == run | {"pyro.md"}
    assert len(SNIPPETS["README.md"]) == 2


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
    found = run_page("node-classification.md")
    data, scores, later = found["data"], found["scores"], found["later"]
    test, val = data.test_mask, data.val_mask
    assert mean_log_prob(found["marginals"][test], data.y[test]) > mean_log_prob(
        scores.softmax(-1)[test], data.y[test]
    )
    assert found["joint"] / test.sum() > mean_log_prob(found["marginals"][test], data.y[test])
    assert found["more"] > found["joint"] - 0.02 * test.sum()  # with communities as sources
    assert torch.equal(later.predict()[val], data.y[val])
    sharper = found["sharper"].marginals()[test]
    assert mean_log_prob(sharper, data.y[test]) > mean_log_prob(
        scores.softmax(-1)[test], data.y[test]
    )
    inside = found["sets"][range(int(test.sum())), data.y[test]].mean()
    assert inside == pytest.approx(0.95, abs=0.03)  # of 898 sets, calibrated on 630 nodes
    assert found["sets"].sum(1).mean() < 1.5
    for posterior in (later, found["trained"]):
        assert (posterior.predict() == data.y)[test].float().mean() > 0.9
    assert found["pyro"].param("loc") > 1  # concentrations above the prior's median


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
    assert (page["field"].predict() == page["truth"]).float().mean() > 0.95
    inside = re.findall(r"right in (\S+) of the cases, (\S+) to (\S+)", capsys.readouterr().out)
    rates = [1 - 2 / 3 * share for share in (0.2, 0.3, 0.4, 0.5, 0.6)]
    for rate, (_, low, high) in zip(rates, inside, strict=True):
        assert float(low) - 0.05 < rate < float(high) + 0.05


@pytest.mark.slow
def test_docs_annotators(capsys):
    pyro.set_rng_seed(0)
    page = run_page("annotators.md")
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
    # A handful of hidden links says nothing; those that were fitted must be likelier than others.
    known = pair.link_logits(split.train, split.train, x)
    assert known.mean() > pair.link_logits(split.test_false, split.train, x).mean() + 0.2


@pytest.mark.slow
def test_docs_denoising(capsys):
    run_page("denoising.md")
    error, inside = re.findall(r"(\d+\.\d+)", capsys.readouterr().out)
    assert float(error) < 15
    assert 0.85 < float(inside) < 0.995


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_docs_link_to_what_is_there(path):
    for file, anchor in links(path):
        assert file.exists(), file
        assert not anchor or anchor in anchors(file.read_text()), f"{file.name}#{anchor}"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_karate(tmp_path):
    karate = load("examples/karate.py")

    args = karate.parser().parse_args(["--output", str(tmp_path / "out" / "karate.png")])
    result = karate.main(args)
    assert args.output.stat().st_size > 50_000
    assert result["accuracy"] > 0.8
    assert result["bound"] <= result["log_prob"] + 0.01
    assert result["log_prob"] - result["bound"] < 0.02
    assert result["error"] < 0.02


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_node_classification(tmp_path):
    node_classification = load("examples/node_classification.py")

    def run(*options):
        output = ["--output", str(tmp_path / "digits.png"), "--num-epochs", "60", *options]
        args = node_classification.parser().parse_args(output)
        return args, node_classification.main(args)

    args, result = run("--checkpoint", str(tmp_path))
    assert args.output.stat().st_size > 50_000
    alone, together = result["GCN"], result["NMM-GCN + StackedNMM"]
    assert together["accuracy"] > 0.93
    for name, row in result.items():
        if "StackedNMM" in name:
            assert row["NLL"] < alone["NLL"]
            assert row["PLL"] > alone["PLL"]
    assert result["joint"] > -alone["NLL"]
    seconds = "s/epoch"
    again = run("--checkpoint", str(tmp_path))[1]  # resumes at the end: the same numbers
    for name in ("GCN", "NMM-GCN + StackedNMM"):
        del result[name][seconds], again[name][seconds]
        assert again[name] == result[name]
    shared = run("--shared", "--consistency", "0")[1]
    assert shared["NMM-GCN + StackedNMM"]["accuracy"] > 0.9


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_benchmark_of_node_classification(tmp_path):
    """Its smallest size runs through all tasks, and a second run has nothing left to do."""
    benchmark = load("benchmarks/nodes.py")

    path = tmp_path / "results.jsonl"
    small = ["--smoke", "--results", str(path)]
    tasks = ["search", "accuracy", "pairs", "sizes", "deviations", "communities", *small]
    results = benchmark.main(tasks)
    lines = path.read_text().splitlines()
    assert len(lines) == len(results.rows) == 2 * 2 + 3 * (3 + 2 + 3 + 2) + 13 + 2 * 4
    assert len(benchmark.main(tasks).rows) == len(lines)
    pairs = {row["method"]: row for row in results.rows if row["task"] == "pairs"}
    for row in results.rows:
        if row["task"] == "pairs":
            known, base = row["on temperature"], pairs["backbone, temperature"]
            ours = row.get("conditional", row["own product"])
            assert known["mean"] == pytest.approx(ours - base["own product"], abs=1e-5)
            assert known["low"] <= known["mean"] <= known["high"]
        if row["task"] == "deviations":
            assert 0 < row["sequential"] < 1
    own = ["--settings-of", "NMM", "--searched", "NMM"]
    again = benchmark.main(["search", "accuracy", *own, *small]).rows
    assert len(again) == len(lines) + 2 + 10
    assert all(row["settings of"] == "NMM" for row in again[-10:])

    alone = tmp_path / "alone.jsonl"  # a method by itself draws what it draws among others
    tasks = ["pairs", "--smoke", "--methods", "NMM", "--results", str(alone)]
    for row in benchmark.main(tasks).rows:
        same = next(
            r for r in results.rows if r["task"] == "pairs" and r["method"] == row["method"]
        )
        assert same | {"fit seconds": row["fit seconds"]} == row


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_ising(tmp_path):
    example = load("examples/ising.py")
    args = example.parser().parse_args(
        ["--output", str(tmp_path / "ising.png"), "--num-steps", "200", "--width", "30"]
    )
    result = example.main(args)
    assert args.output.stat().st_size > 50_000
    assert 0 < result["NMM"]["KL"] < 0.7 * result["mean field"]["KL"]
    assert result["NMM"]["error"] < 0.9 * result["mean field"]["error"]


@pytest.mark.slow
def test_benchmark_of_random_fields(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    benchmark = importlib.import_module("fields")  # by its name, as its other processes do
    path = tmp_path / "fields.jsonl"
    tasks = ["strips", "letter", "plain", "amortized", "scaling"]
    tasks += ["--smoke", "--results", str(path)]
    rows = benchmark.main(tasks).rows
    assert len(rows) == len(path.read_text().splitlines()) == 3 + 1 + 3 + 1 + 2
    assert len(benchmark.main(tasks).rows) == len(rows)
    for height, width, coupling in ((5, 4, 0.3), (1, 6, 0.5), (6, 1, 0.4), (7, 7, 0.9)):
        field = ising(grid_edges(height, width), coupling, torch.zeros(height * width).double())
        log_z = field.log_normalizer().item()
        assert abs(benchmark.kac_ward(height, width, coupling) - log_z) < 1e-9


@pytest.mark.slow
def test_benchmark_of_hidden_fields(tmp_path):
    benchmark = load("benchmarks/hidden.py")
    path = tmp_path / "hidden.jsonl"
    tasks = ["normalizers", "select", "compare", "--smoke", "--results", str(path)]
    rows = benchmark.main(tasks).rows
    sizes = len(benchmark.COUPLINGS), 3 * len(benchmark.SOURCES), 3 * 5
    assert len(rows) == len(path.read_text().splitlines()) == sum(sizes)
    assert len(benchmark.main(tasks).rows) == len(rows)
    for row in rows:
        if row["task"] == "compare":
            assert 0 <= row["Brier"] <= 2
            assert 0 <= row["accuracy"] <= 1
            assert row["method"] != "independent" or row["bound"] == row["log evidence"]


@pytest.mark.slow
def test_benchmark_of_noisy_labels(tmp_path):
    benchmark, tables = load("benchmarks/annotators.py"), load("benchmarks/annotators_tables.py")
    path, folder = tmp_path / "annotators.jsonl", write_section(tmp_path / "dlpfc")
    kinds = ["cortex", "halves", "graphs", "simulated", "model", "coverage"]
    tasks = [*kinds, "--smoke", "--sections", "151673", "--data-root", str(folder.parent)]
    tasks += ["--results", str(path)]
    rows = benchmark.main(tasks).rows
    assert len(rows) == len(path.read_text().splitlines())
    assert len(benchmark.main(tasks).rows) == len(rows)
    found = {row["task"] for row in rows}
    assert found == set(kinds)
    for row in rows:
        if "ARI" in row:
            assert -1 <= row["ARI"] <= 1
        if "log score" in row:
            assert row["log score"] <= 0
            assert 0 <= row["ECE"] <= 1
    assert all("Nothing" not in text for text in tables.tables(rows).values())


def write_section(folder):
    """A section of 12 x 16 spots in two layers, of which the clusterings tell something."""
    folder.mkdir()
    truth = torch.arange(192) % 16 >= 8
    names = [f"{i}_{kind}{end}" for end in ("", "_spatial") for kind in ("PCA", "UMAP")
             for i in range(5)]  # fmt: skip
    answers = torch.where(torch.rand(192, 20) < 0.3, torch.randint(5, (192, 20)), truth[:, None])
    lines = [",".join(["key", "ground_truth", *names])]
    places = []
    for i, row in enumerate(answers.tolist()):
        layer = "NA" if i == 7 else f"Layer_{int(truth[i])}"
        lines.append(",".join([f"151673_S{i}", layer, *(str(a + 1) for a in row)]))
        y, x = divmod(i, 16)
        places.append(f"S{i},1,{y},{2 * x + y % 2},0,0")
    (folder / "cluster_labels_151673.csv").write_text("\n".join(lines) + "\n")
    (folder / "tissue_positions_151673.txt").write_text("\n".join(places) + "\n")
    return folder


def test_names_of_labels_that_have_none():
    """A label for each layer; one left over is that of the layer that it overlaps with most."""
    fits = load("benchmarks/annotators_fits.py")
    y = torch.tensor([0, 0, 0, 1, 1, 1, -1])
    labels = torch.tensor([2, 2, 0, 1, 1, 0, 0])
    found = fits.clustering_scores(torch.eye(3)[labels], y)
    assert found["accuracy"] == pytest.approx(5 / 6)
    alone = fits.clustering_scores(
        torch.eye(2)[(y == 1).long()], torch.tensor([0, 0, 2, 1, 1, 1, -1])
    )
    assert alone["accuracy"] == pytest.approx(5 / 6)
    renamed = fits.renamed(torch.stack([labels, (labels + 1) % 3], 1))
    assert torch.equal(renamed[:, 0], renamed[:, 1])


def test_coupling_of_the_rival_is_that_of_the_pseudo_likelihood():
    fits, edges = load("benchmarks/annotators_fits.py"), grid_edges(8, 8)
    labels = torch.nn.functional.one_hot(torch.randint(2, (64,)), 2).float()
    field = fits.Potts(
        Annotators(2), torch.zeros(64, 1).long(), torch.cat([edges, edges.flip(0)], 1)
    )
    numbers = torch.zeros(3)
    for _ in range(20):
        numbers = field.raise_pseudo_likelihood(numbers, labels)
    around = field.around(labels)

    def value(coupling):
        logits = coupling * around + numbers[1:]
        return (labels * logits.log_softmax(-1)).sum(-1).mean() - 1e-4 * coupling**2

    best = max(torch.linspace(-1, 1, 401).tolist(), key=value)
    assert numbers[0].item() == pytest.approx(best, abs=0.01)


@pytest.mark.slow
def test_benchmark_of_repelling_labels(tmp_path):
    benchmark = load("benchmarks/repelling.py")
    path = tmp_path / "repelling.jsonl"
    tasks = ["graphs", "generated", "--smoke", "--results", str(path)]
    rows = benchmark.main(tasks).rows
    assert len(rows) == len(path.read_text().splitlines()) == 2 * len(benchmark.METHODS) + 1
    assert len(benchmark.main(tasks).rows) == len(rows)
    for row in rows[:-1]:
        assert row["joint"] < 0
        assert ("conditional" in row) == (row["method"] != "backbone")
    assert rows[-1].keys() >= {"truth", "plain", "relabelled", "independent"}


def test_annealed_evidence_of_hidden_labels():
    """Against the exact sum, of a few pixels."""
    fits = load("benchmarks/hidden_fits.py")
    field = fits.HiddenField(torch.tensor([-1.2, -0.4, 0.1, 1.3]), 2, 2, 1)
    with torch.no_grad():
        alpha, logits, evidence = field.parts()
        labels = torch.cartesian_prod(*[torch.arange(3)] * 4)
        log_prob = NeighborMixture(field.hood, alpha, logits).log_prob(labels)
        truth = (log_prob + evidence[torch.arange(4), labels].sum(1)).logsumexp(0)
    value, error, _ = fits.annealed_log_evidence(field, 20, 500)
    assert error < 0.05
    assert abs(value - truth.item()) < 4 * error


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_link_prediction(tmp_path):
    example = load("examples/link_prediction.py")
    args = example.parser().parse_args(["--output", str(tmp_path / "links.png")])
    args.num_steps = 150
    result = example.main(args)
    assert args.output.stat().st_size > 50_000
    for row in result.values():
        assert row["AP"] > 75
        assert row["loss"] < 0.75
    args = example.parser().parse_args(["--dataset", "synthetic", "--num-steps", "2"])
    args.output = None
    assert example.main(args).keys() == {"original", "nmm"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_annotators(tmp_path):
    example = load("examples/annotators.py")
    args = example.parser().parse_args(["--output", str(tmp_path / "annotators.png")])
    result = example.main(args)
    assert args.output.stat().st_size > 50_000
    majority, plain, consensus = (
        result[name] for name in ("Majority vote", "Dawid-Skene", "Consensus")
    )
    assert majority["accuracy"] < plain["accuracy"] < consensus["accuracy"] - 0.1
    assert consensus["NLL"] < 0.2 * plain["NLL"]
    assert consensus["ECE"] < 0.02
    rates, quality = result["rates"], result["quality"]
    assert ((quality.low - 0.03 < rates) & (rates < quality.high + 0.03)).all()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_annotators_of_a_section(tmp_path):
    """Files as those of the cortex: a strip of two layers, clustered badly six times."""
    example, (height, width) = load("examples/annotators.py"), (16, 24)
    folder = tmp_path / "dlpfc"
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    names = [f"method{m}_PCA" for m in range(6)]
    places, rows = [], [",".join(["key", "ground_truth", *names, "method0_PCA_spatial"])]
    for row in range(height):
        for column in range(row % 2, 2 * width, 2):
            layer, name = int(column >= width), f"spot{row}.{column}"
            wrong = torch.rand(6, generator=generator) < 0.25
            seen = [layer ^ int(x) for x in wrong]
            places.append(f"{name},1,{row},{column},0,0")
            layer = f"Layer_{layer + 1}" if column > 1 else ""
            rows.append(",".join([f"7_{name}", layer, *[str(x + 1) for x in seen], "1"]))
    (folder / "tissue_positions_7.txt").write_text("\n".join(places))
    (folder / "cluster_labels_7.csv").write_text("\n".join(rows))
    output = tmp_path / "cortex.png"
    options = ["--data-root", tmp_path, "--section", "7", "--num-labels", "2", "--output", output]
    result = example.main(example.parser().parse_args([*map(str, options)]))
    assert output.stat().st_size > 50_000
    assert result["Consensus"] > 0.9
    assert result["quality"].mean.shape == (6,)


@pytest.mark.slow
def test_denoising(tmp_path):
    example = load("examples/denoising.py")
    small = ["--num-steps", "120", "--width", "8", "--depth", "1", "--crop", "64", "--lr", "0.003"]
    args = example.parser().parse_args([*small, "--output", str(tmp_path / "denoising.png")])
    result = example.main(args)
    assert args.output.stat().st_size > 50_000
    assert result["U-Net"]["PSNR"] > result["noisy"]["PSNR"] + 1
    assert result["NMM"]["PSNR"] > result["noisy"]["PSNR"] + 1
    assert 0.7 < result["NMM"]["coverage"] < 1


@pytest.mark.slow
def test_benchmark_of_batches(tmp_path, monkeypatch):
    benchmark = load("benchmarks/batches.py")
    path = tmp_path / "batches.jsonl"
    tasks = ["training", "bound", "throughput", "--smoke", "--results", str(path)]
    monkeypatch.setattr(benchmark, "processes", lambda key, root, n: time.sleep(n / 1000))
    rows = benchmark.main(tasks).rows
    assert len(rows) == len(path.read_text().splitlines()) == 3 + 3 + 2
    assert len(benchmark.main(tasks).rows) == len(rows)
    parts = {row["way"]: row for row in rows if row["task"] == "bound"}
    for row in parts.values():
        assert row["bound"] < row["estimate"] + 0.01
    assert parts["random"]["estimate"] < parts["clusters"]["estimate"]
    tables = load("benchmarks/batches_tables.py").tables(rows)
    for name in ("batch training", "batch bounds", "batch throughput"):
        assert tables[name].count("\n") > 1


@pytest.mark.slow
def test_benchmark_of_denoising(tmp_path):
    benchmark, tables = load("benchmarks/images.py"), load("benchmarks/images_tables.py")
    path = tmp_path / "images.jsonl"
    small = ["--smoke", "--results", str(path), "--checkpoints"]
    tasks = ["train", "test", "cost", *small, str(tmp_path)]
    rows = benchmark.main(tasks).rows
    number = len(benchmark.METHODS)
    trained = 5 + 4 + (number - 2) + 5  # in one phase, the trunk, on it, and in one phase again
    assert len(rows) == len(path.read_text().splitlines()) == trained + 4 * number + 1
    assert len(benchmark.main(tasks).rows) == len(rows)
    tested = [row for row in rows if row["task"] == "test"]
    noise = 20 * math.log10(255 / 25)  # which an untrained network leaves, and an NMM averages
    for row in tested:
        if row["method"] in ("NMM-Gaussian", "NMM-paper"):  # attend mostly to the pixel itself
            continue
        mixes = row["method"].startswith("NMM")
        more = 5 if mixes else 0
        assert more < row["PSNR"] - noise < more + 2
        best = row.get("log p, scaled", row["log p"])
        assert -5 < best < -4
        if "joint" in row:
            assert best >= row["log p"]
            gap = row["joint"] - row["log p"]
            assert gap > 0.01 if mixes else abs(gap) < 1e-6
        if row["method"] != "U-Net-widths":
            assert 0.85 < row["coverage"] < (1 if more else 0.95)
            assert 60 < row["length"] < 90
    found = {name: text.count("\n") for name, text in tables.tables(rows).items()}
    assert found["denoised"] == 1 + 2 * number
    assert found["denoising steps"] == 1 + 2 * len(tables.STEPS)
    assert found["joint images"] == 1 + 2 * len(benchmark.PARTS)
    assert found["denoising cost"] == 2
    load("benchmarks/figures.py").denoising_steps(rows, tmp_path)
    assert (tmp_path / "denoising_steps.png").stat().st_size > 10_000
    rows = joint_rows(benchmark, [*small, str(tmp_path)], len(rows))
    load("benchmarks/images_figures.py").spectra(rows, tmp_path / "spectra.png")
    assert (tmp_path / "spectra.png").stat().st_size > 10_000
    path.unlink()
    tasks = ["test", "--methods", "NMM", "--crop", "32", *small]
    assert len(benchmark.main([*tasks, str(tmp_path)]).rows) == 4
    other = [str(tmp_path), "--noise", "25", "50", "--datasets", "kodak24"]
    assert len(benchmark.main([*tasks, *other]).rows) == 4 + 2
    path.unlink()
    with pytest.raises(ValueError, match=r"NMM\.0\.fitted\.pt is not there for .*, run train"):
        benchmark.main([*tasks, str(tmp_path / "none")])


def joint_rows(benchmark, small, before):
    """What tiles and spectra add, of networks that give a joint distribution alone."""
    tasks = ["tiles", "spectra", "--methods", "U-Net", "U-Net-widths", "NMM", *small]
    rows = benchmark.main(tasks).rows
    assert len(rows) == before + 2 * 2 * 4
    assert len(benchmark.main(tasks).rows) == len(rows)
    for row in rows[before:]:
        alone = row["method"] == "U-Net-widths"
        if row["task"] == "tiles":
            gaps = [row[f"joint {side}"] - row["log p"] for side in (2, 4, 8, 16)]
            assert all(abs(gap) < 1e-6 if alone else gap > 0.01 for gap in gaps)
            assert alone or gaps == sorted(gaps)
        else:
            assert all(len(row[name]) == 16 for name in ("error", "sample", "another", "apart"))
    joint, claims = load("benchmarks/images_joint_tables.py"), load("benchmarks/images_claims.py")
    found = {name: text.count("\n") for name, text in joint.tables(rows).items()}
    assert found == {"denoising tiles": 1 + 2 * 2, "denoising spectra": 1 + 2 * 2 * 3}
    assert "for the U-Net with widths" in " ".join(claims.spectra_claim(rows).split())
    return rows


@pytest.mark.parametrize("name", ["log p", "log p, logistic"])
def test_densities_of_grey_levels(name):
    """Masses that sum to one, as SciPy's, far out too."""
    density = load("benchmarks/images_scores.py").DENSITIES[name]
    law = {"log p": scipy.stats.norm, "log p, logistic": scipy.stats.logistic}[name]
    floor = 0.0 if name == "log p" else 1e-5
    for mean in (-3.0, 100.2, 254.9):
        at = torch.tensor([mean], dtype=torch.double)
        found = [density(at, torch.tensor([k]), 8.0) for k in range(256)]
        assert sum(map(math.exp, found)) == pytest.approx(1)
        for k in (0, 1, 41, 100, 160, 254, 255):
            gap = abs(k - mean)
            mass = law.sf((gap - 0.5) / 8) - law.sf((gap + 0.5) / 8)
            mass = law.cdf((0.5 - mean) / 8) if k == 0 else mass
            mass = law.sf((254.5 - mean) / 8) if k == 255 else mass
            mass = (20 * mass + floor) / (20 + 256 * floor)
            assert found[k] == pytest.approx(math.log(mass), rel=1e-6)


@pytest.mark.slow
def test_benchmark_of_link_prediction(tmp_path):
    benchmark, tables = load("benchmarks/links.py"), load("benchmarks/links_tables.py")
    path = tmp_path / "links.jsonl"
    tasks = ["reproduce", "search", "compare", "memberships", "katz", "cost"]
    tasks += ["--smoke", "--results", str(path)]
    rows = benchmark.main(tasks).rows
    assert len(rows) == len(path.read_text().splitlines()) == 6 + (2 + 3) + 6 + 1 + 3 + 1
    assert len(benchmark.main(tasks).rows) == len(rows)
    found = tables.tables(rows)
    for name in ("links", "against paper", "bounds", "reproduced", "memberships", "link cost"):
        assert found[name].count("\n") > 1
    load("benchmarks/figures.py").link_bound(rows, tmp_path)
    assert (tmp_path / "link_bound.png").stat().st_size > 10_000


@pytest.mark.slow
def test_deviations_of_links_and_fields(tmp_path):
    benchmark = load("benchmarks/deviations.py")
    tasks = ["links", "fields", "--smoke", "--results", str(tmp_path / "deviations.jsonl")]
    rows = benchmark.main(tasks).rows
    assert [row["change"] for row in rows] == ["own attention", *["", "no groups"] * 3]
    assert rows[0]["settings"]["width"] == rows[0]["settings"]["num_communities"]
    assert len(benchmark.main(tasks).rows) == len(rows)


def test_katz_counts_walks():
    """Against powers of the adjacency matrix, with more pairs than one block."""
    katz, edge_index = load("benchmarks/references.py"), KarateClub()[0].edge_index
    graph = to_dense_adj(edge_index)[0].double()
    powers = torch.stack([graph.matrix_power(n) for n in range(1, 5)])
    pairs = torch.cartesian_prod(torch.arange(34), torch.arange(34)).T
    counts = katz.walks(edge_index, 34, pairs, longest=4)
    assert torch.equal(counts, powers.flatten(1))
    whole = torch.linalg.inv(torch.eye(34) - 0.001 * graph) - torch.eye(34)
    torch.testing.assert_close(
        katz.katz_index(counts, 0.001), whole.flatten(), rtol=1e-4, atol=1e-9
    )


@pytest.mark.slow
def test_smaller_benchmarks(tmp_path):
    epochs, tightness = load("benchmarks/epochs.py"), load("benchmarks/tightness.py")
    assert len(epochs.main(["--smoke", "--results", str(tmp_path / "epochs.json")])) == 3
    output = tmp_path / "bound.png"
    for row in tightness.main(["--smoke", "--output", str(output)]):
        assert row["pair bound"] < row["pair exact"] + 0.01
        assert row["test bound"] < row["test estimate"] + 0.01
    assert output.stat().st_size > 10_000


def test_tables_of_the_documents_are_those_of_the_results():
    """Every table between markers is what the committed results give, and all have a place."""
    report = load("benchmarks/report.py")
    texts = {path: path.read_text() for path in report.DOCUMENTS}
    tables = report.main(report.parser().parse_args([]))
    for path, text in report.written(texts, tables).items():
        for name in report.markers(text):
            assert report.insert(texts[path], name, tables[name]) == texts[path], name
        assert text == texts[path]
    with pytest.raises(ValueError, match="0 of the documents have markers <!-- other -->"):
        report.written(texts, tables | {"other": ""})
    with pytest.raises(ValueError, match="no table is called strips"):
        report.written(texts, {k: v for k, v in tables.items() if k != "strips"})


@pytest.mark.data
def test_cora_loads(request):
    root = request.config.getoption("--data-root")
    data = select_split(planetoid("cora", root))
    assert data.x.layout == torch.sparse_csr
    assert [int(data[f"{m}_mask"].sum()) for m in ("train", "val", "test")] == [140, 500, 1000]
    torch.testing.assert_close(data.x.to_dense().sum(-1), torch.ones(2708))
    assert data.edge_index.shape == (2, 10556)
    assert data.y.shape == (2708,)
