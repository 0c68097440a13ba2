# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Hidden fields and noisy labels: small runs, rivals, and tables."""

import pytest
import torch
from torch.nn.functional import one_hot
from torch_geometric.datasets import KarateClub

from benchmarks.latent import annotators, hidden, rivals, tables
from benchmarks.shared.records import RESULTS, read
from pyro_nmm import NeighborMixture
from pyro_nmm.models import Annotators, grid_edges


@pytest.fixture(autouse=True)
def as_a_user():
    torch.set_default_dtype(torch.float)


def lines(table):
    """Lines of a table as dictionaries."""
    head, _, *body = [
        [cell.strip() for cell in line[1:-1].split("|")] for line in table.split("\n")
    ]
    return [dict(zip(head, cells, strict=True)) for cells in body]


def run_twice(main, options, path):
    """Rows of a run; a second one finds nothing left to do."""
    rows = main([*options.split(), "--results", str(path)]).rows
    assert len(rows) == len(path.read_text().splitlines())
    assert len(main([*options.split(), "--results", str(path)]).rows) == len(rows)
    return rows


def smaller(monkeypatch, module, **constants):
    for name, value in constants.items():
        monkeypatch.setattr(module, name, value)


@pytest.mark.slow
def test_run_of_hidden_fields(tmp_path, monkeypatch):
    smaller(monkeypatch, hidden, SIZE=10, NUM_STEPS=2, SWEEPS=8, ANNEAL=3, ROUNDS=1)
    options = "normalizers select compare --seeds 1 --noise 0.5"
    rows = run_twice(hidden.main, options, tmp_path / "hidden.jsonl")
    assert len(rows) == len(hidden.COUPLINGS) + 3 * len(hidden.SOURCES) + 3 * 5
    for row in rows:
        if row["task"] == "compare":
            assert 0 <= row["Brier"] <= 2
            assert 0 <= row["accuracy"] <= 1
            assert row["method"] != "independent" or row["bound"] == row["log evidence"]


@pytest.mark.slow
def test_run_of_annotators(tmp_path, monkeypatch):
    smaller(monkeypatch, rivals, NUM_STEPS=4, NUM_SWEEPS=4)
    smaller(monkeypatch, annotators, SECTIONS=["151673"], NUMBERS=[3, 5], STARTS=1, DRAWS=1)
    smaller(monkeypatch, annotators, NUM_STEPS=2, NUM_EPOCHS=2, HEIGHT=8)
    smaller(monkeypatch, annotators, load=lambda name, root: (KarateClub()[0], None))
    write_section(tmp_path / "dlpfc")
    options = "halves cortex graphs simulated model --num-seeds 1 --levels 0.7 --data-root"
    rows = run_twice(annotators.main, f"{options} {tmp_path}", tmp_path / "annotators.jsonl")
    counts = {"halves": 6, "cortex": 11 + 2 + 4 + 2, "graphs": 1}
    counts |= {"simulated": 17 + 17 + 18, "model": 12 + 11}
    for task, number in counts.items():
        assert sum(row["task"] == task for row in rows) == number
    for row in rows:
        assert -1 <= row.get("ARI", 0) <= 1
        assert row.get("log score", 0) <= 0
        assert 0 <= row.get("ECE", 0) <= 1
    found = [make({"annotators": rows}) for make in tables.TABLES if "hidden" not in make.__name__]
    assert all("|" in text for text in found)


def write_section(folder):
    """A section of 8 x 10 spots in two layers, of which the clusterings tell something."""
    folder.mkdir()
    truth = torch.arange(80) % 10 >= 5
    names = [f"{i}_{kind}{end}" for end in ("", "_spatial") for kind in ("PCA", "UMAP")
             for i in range(5)]  # fmt: skip
    answers = torch.where(torch.rand(80, 20) < 0.3, torch.randint(5, (80, 20)), truth[:, None])
    labels = [",".join(["key", "ground_truth", *names])]
    places = []
    for i, row in enumerate(answers.tolist()):
        layer = "NA" if i == 7 else f"Layer_{int(truth[i])}"
        labels.append(",".join([f"151673_S{i}", layer, *(str(a + 1) for a in row)]))
        y, x = divmod(i, 10)
        places.append(f"S{i},1,{y},{2 * x + y % 2},0,0")
    (folder / "cluster_labels_151673.csv").write_text("\n".join(labels) + "\n")
    (folder / "tissue_positions_151673.txt").write_text("\n".join(places) + "\n")


def test_names_of_labels_that_have_none():
    """A label for each layer; one left over is that of the layer that it overlaps with most."""
    y = torch.tensor([0, 0, 0, 1, 1, 1, -1])
    labels = torch.tensor([2, 2, 0, 1, 1, 0, 0])
    found = annotators.clustering_scores(torch.eye(3)[labels], y)
    assert found["accuracy"] == pytest.approx(5 / 6)
    fewer = annotators.clustering_scores(
        torch.eye(2)[(y == 1).long()], torch.tensor([0, 0, 2, 1, 1, 1, -1])
    )
    assert fewer["accuracy"] == pytest.approx(5 / 6)
    # Clusterings that differ by their names alone agree on all nodes; nobody knows the last one.
    answers = torch.stack([labels, (labels + 1) % 3], 1)
    answers[-1] = -1
    found = annotators.without_fit(answers)
    assert torch.equal(found["majority"][:-1], one_hot(labels, 3).double()[:-1])
    assert torch.equal(found["majority"][-1], torch.ones(3).double() / 3)
    assert torch.equal(found["2"][:-1].argmax(1), (labels[:-1] + 1) % 3)


def test_coupling_of_the_rival_maximises_the_pseudo_likelihood():
    edges, labels = grid_edges(8, 8), one_hot(torch.randint(2, (64,)), 2).float()
    both = torch.cat([edges, edges.flip(0)], 1)
    field = rivals.AnnotatedPotts(Annotators(2), torch.zeros(64, 1).long(), both)
    weights = torch.zeros(3)
    for _ in range(20):
        weights = field.raise_pseudo_likelihood(weights, labels)
    around = rivals.around(field.matrix, labels)

    def value(coupling):
        logits = coupling * around + weights[1:]
        return (labels * logits.log_softmax(-1)).sum(-1).mean() - 1e-4 * coupling**2

    best = max(torch.linspace(-1, 1, 401).tolist(), key=value)
    assert weights[0].item() == pytest.approx(best, abs=0.01)


def test_annealed_evidence_of_hidden_labels():
    """Against the exact sum, of a few pixels."""
    field = hidden.HiddenField(torch.tensor([-1.2, -0.4, 0.1, 1.3]), 2, 1)
    with torch.no_grad():
        alpha, logits, evidence = field.parts()
        labels = torch.cartesian_prod(*[torch.arange(3)] * 4)
        log_prob = NeighborMixture(field.hood, alpha, logits).log_prob(labels)
        truth = (log_prob + evidence[torch.arange(4), labels].sum(1)).logsumexp(0)
    value, error, _ = hidden.annealed_log_evidence(field, 20, 500)
    assert error < 0.05
    assert abs(value - truth.item()) < 4 * error


def test_tables_show_every_stored_row():
    files = {name: read(RESULTS / f"{name}.jsonl") for name in ("hidden", "annotators")}
    shown = {make.__name__: lines(make(files)) for make in tables.TABLES}
    stored = [row["task"] for rows in files.values() for row in rows]
    assert sum(int(line["seeds"]) for line in shown["hidden"]) == stored.count("compare")
    searches = [cell for line in shown["hidden_searches"] for cell in list(line.values())[3:]]
    assert len(list(filter(None, searches))) == stored.count("search")
    assert len(shown["hidden_normalizers"]) == stored.count("normalizers")
    assert len(shown["simulated_graphs"]) == stored.count("graphs")
    sections = [line for line in shown["cortex"] if line["section"] != "all"]
    starts = sum(int(line["sections x starts"].removeprefix("1 x ")) for line in sections)
    assert starts == stored.count("cortex")
    halves = [cell for line in shown["cortex_halves"] for cell in list(line.values())[2:]]
    assert 3 * len(list(filter(None, halves))) == stored.count("halves")
    fits = [line for line in shown["simulated_annotators"] if line["fit"] != "chosen"]
    seeds = sum(int(line["seeds"]) for line in fits)
    assert seeds == stored.count("simulated") + stored.count("model")


def hidden_rows():
    """Three seeds of a field, on which the NMM errs by .02 less and has 41 nats less."""
    row = {"task": "compare", "size": 64, "field": "smooth", "noise": 0.5, "error": 0.3}
    row |= {"accuracy": 0.9, "NLL": 0.3, "bound": -4200.0, "settings": {"coupling": 1.0}}
    methods = {"Potts, mean field": 0.0, "NMM, bound": 0.02, "another one": 0.01}
    return [
        row
        | {"method": method, "seed": seed, "Brier": 0.1 - gain + 0.001 * seed}
        | {"log evidence": -4096.0 - 2048 * gain}
        for method, gain in methods.items()
        for seed in range(3)
    ]


def test_table_of_hidden_fields():
    """Differences are paired by seed, and methods that nobody knew are shown."""
    found = lines(tables.hidden({"hidden": hidden_rows()}))
    assert [line["model"] for line in found][::2] == ["Potts, mean field", "another one"]
    assert found[0]["minus Potts, mean field"] == ""
    assert found[1]["minus Potts, mean field"].startswith("-0.020 ± 0.000")
    assert found[0]["log p(w), nats a pixel"].startswith("-1.000 ± 0.000")


def cortex_rows():
    """Sections whose clusterings choose six labels, at which the NMM is ahead by .1 and .3."""
    row = {"task": "cortex", "accuracy": 0.7, "log score": -0.5, "ECE": 0.1, "confidence": 0.8}
    row |= {"entropy": 0.4, "left out": -9.0, "seconds": 2.0, "score": None, "kappa": None}
    cortex = [
        row
        | {"section": section, "labels": labels, "method": method, "seed": seed}
        | {"ARI": 0.3 + gain + (labels == 5) + 0.01 * seed}
        for section, lead in (("a", 0.1), ("b", 0.3))
        for labels in (5, 6)
        for method, gain in (("Dawid-Skene", 0.0), ("NMM, types", lead), ("another one", 0.2))
        for seed in range(3)
    ]
    halves = [
        {"task": "halves", "section": section, "labels": labels, "halving": halving}
        | {"agreement": 0.1 * (labels == 6) + 0.01 * number}
        for section in "ab"
        for labels in (5, 6)
        for number, halving in enumerate(annotators.HALVINGS)
    ]
    return cortex + halves


def test_table_of_cortex():
    """The number of labels is that of the highest agreement, not of the highest ARI."""
    rows = cortex_rows()
    assert annotators.chosen_labels(rows) == {"a": 6, "b": 6}
    found = [
        line for line in lines(tables.cortex({"annotators": rows})) if line["section"] == "all"
    ]
    assert [line["method"] for line in found] == ["Dawid-Skene", "NMM, types", "another one"]
    assert found[1]["ARI"] == "0.510 ± 0.010"
    assert found[1]["sections x starts"] == "2 x 3"
    assert lines(tables.cortex_halves({"annotators": rows}))[0]["chosen"] == "6"


def simulated_rows():
    """Three seeds, in which the fit that predicts better what is left out is the better one."""
    row = {"task": "simulated", "graph": "cora", "level": 0.7, "cell": "copies", "ECE": 0.1}
    row |= {"Brier": 0.2, "seconds": 1.0, "score": -5.0, "kappa": 0.2}
    methods = {"majority": 0.5, "Dawid-Skene": 0.6, "label spreading": 0.55, "another one": 0.1}
    methods |= {"Potts, mean field": 0.7, "Potts, Gibbs": 0.7, "Potts, Gibbs, copies": 0.75}
    methods |= {"NMM, every node": 0.65, "NMM, copies, every node": 0.8}
    return [
        row
        | {"method": method, "seed": seed, "accuracy": right * (1 + 0.02 * seed)}
        | {"log score": right * (1 + 0.1 * seed) - 1, "left out": right - 6.0}
        for method, right in methods.items()
        for seed in range(3)
    ]


def test_tables_of_simulated_annotators():
    """The fit of a method is chosen by the answers alone, be it worse, and compared by seed."""
    rows = simulated_rows()
    [line] = lines(tables.simulated_differences({"annotators": rows}))
    assert list(line.values())[:3] == ["Cora", "copies", "0.7"]
    assert line["Potts, mean field: accuracy"] == "+10.2 ± 0.2 †"
    assert line["Potts, Gibbs sampling: accuracy"] == "+5.1 ± 0.1 †"  # whose copies are chosen
    every = lines(tables.simulated_annotators({"annotators": rows}))
    fits = {(line["method"], line["fit"]): line for line in every}
    assert len([fit for _, fit in fits if fit != "chosen"]) == len({r["method"] for r in rows})
    assert fits["NMM", "chosen"]["accuracy"] == fits["NMM", "copies, every node"]["accuracy"]
    assert fits["NMM", "chosen"]["seconds"] == "2.0"
    worse = [r | {"left out": -9.0} if r["method"].startswith("NMM, copies") else r for r in rows]
    [line] = lines(tables.simulated_differences({"annotators": worse}))
    assert line["Potts, mean field: accuracy"] == "-5.1 ± 0.1 ‡"


def test_counts_of_cells_in_which_the_nmm_is_ahead():
    """A GCN makes all worse; the NMM without it is also compared with rivals that have it."""
    rows = simulated_rows()
    beside = [
        row
        | {"cell": "copies and a GCN", "accuracy": row["accuracy"] - 0.1}
        | {"log score": row["log score"] - 0.9 * row["method"].startswith("NMM")}
        for row in rows
    ]
    found = lines(tables.simulated_counts({"annotators": rows + beside}))
    counts = {line["annotators"]: line["Dawid-Skene: log score"] for line in found}
    mixed = "copies; for the rivals also a GCN"
    assert counts == {"copies": "1 of 1", "copies and a GCN": "0 of 1", mixed: "1 of 1"}
