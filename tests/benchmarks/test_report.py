# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Tables of node classification: every stored row is in one, and what is compared is paired."""

import json
import statistics
from importlib import import_module

import pytest
import torch
from documents import ROOT, load

RESULTS = ROOT / "benchmarks" / "results" / "nodes.jsonl"
GRAPHS = {"cora": "Cora", "citeseer": "CiteSeer", "pubmed": "PubMed"}
#: Where each task's rows are looked for. A temperature changes no prediction.
PLACES = {"accuracy": ("accuracy", "quality"), "pairs": ("pairs",), "sizes": ("sizes",),
          "search": ("searches",), "deviations": ("deviations",),
          "communities": ("communities",), "predicted": ("predicted",)}  # fmt: skip


@pytest.fixture(scope="module")
def tables_of():
    files = "benchmarks/nodes_tables.py", "benchmarks/nodes_predictions_tables.py"
    makers = [load(file).tables for file in files]
    return lambda rows: {k: text for make in makers for k, text in make(rows).items()}


def name_of(row):
    """What a reader looks for, written down apart from the code that makes the tables."""
    kind = {"gcn": "GCN", "gat": "GAT", "appnp": "APPNP", "mlp": "MLP"}.get(row["backbone"], "?")
    first, _, after = row["method"].partition(", ")
    name = first.replace("NMM", "NMM-" + kind).replace("backbone", kind)
    after, _, resolution = after.partition(" ")
    names = {"": name, "temperature": f"{name} + temperature"}
    names["pooled"] = f"StackedNMM with its pool on {name}"
    name = names.get(after, f"StackedNMM on {name}")
    if resolution:  # of communities
        return f"{name}, {after} at {float(resolution):g}"
    given = row.get("settings of", "").replace("NMM", "the NMM's search")
    return name + (f" (settings of {given})" if given else "")


def shown(tables, row):
    """Whether the tables of the row's task have numbers for it."""
    places = PLACES[row["task"]]
    if "temperature" in row["method"]:
        places = [name for name in places if name != "accuracy"]
    return all(in_table(tables[name], row) for name in places)


def in_table(table, row):
    graph = GRAPHS.get(row["dataset"], row["dataset"])
    lines = [[cell.strip() for cell in line.strip("|").split("|")]
             for line in table.replace("\\|", "/").splitlines()]  # fmt: skip
    which = f"random splits, {row['ratio']}" if row.get("ratio") else "public split"
    first, column = {
        "communities": (f"{graph}, {which} / {name_of(row)}", "runs"),
        "accuracy": (name_of(row), graph),
        "search": (name_of(row), graph),
        "pairs": (name_of(row), f"{graph} {row.get('ratio')}"),
        "sizes": (f"{graph}, {name_of(row)}", str(row.get("ratio"))),
        "deviations": (str(row.get("change")).replace("none", "ours"), "seeds"),
        "predicted": (f"{graph} / {name_of(row)}", "seeds"),
    }[row["task"]]
    if column not in lines[0]:
        return False
    place, left = lines[0].index(column), 1 + (row["task"] in ("communities", "predicted"))
    return any(" / ".join(cells[:left]) == first and cells[place] for cells in lines[2:])


FIELDS = ("task", "dataset", "backbone", "method", "settings of", "ratio", "change")


def hidden(tables, rows):
    kinds = {tuple(row.get(f) for f in FIELDS): row for row in rows}
    return sorted(str(key) for key, row in kinds.items() if not shown(tables, row))


def read():
    return [json.loads(line) for line in RESULTS.read_text().splitlines()]


def test_communities_are_compared_seed_by_seed(tables_of):
    base = {"task": "communities", "dataset": "cora", "backbone": "gcn"}
    rows = [
        base | {"method": f"backbone, {name}", "seed": seed, "joint": (1 + seed / 10) * joint,
                "test": {"nll": -(1 + seed / 10) * joint}, "own product": joint,
                "val joint": seen}
        for name, joint, seen in (("stacked", -0.5, -0.6), ("communities 4.0", -0.3, -0.5),
                                  ("weighted 2.0", -0.1, -0.7))
        for seed in range(3)
    ]  # fmt: skip
    line = tables_of(rows)["communities"].splitlines()[3]
    assert "at 4 | 3 | -0.330 ± 0.030 | +0.2200 ± 0.0200 † |" in line
    assert "| 0.330 ± 0.030 | -0.2200 ± 0.0200 † |" in line
    # What the validation nodes choose is told of, not what the test nodes would.
    assert "(communities at 4)" in tables_of(rows)["with communities"]
    for row in rows[6:]:
        row["val joint"] = -0.4
    assert "(weighted at 2)" in tables_of(rows)["with communities"]


def test_every_stored_row_is_in_a_table(tables_of):
    assert hidden(tables_of(read()), read()) == []


def test_new_methods_are_in_the_tables(tables_of):
    """A method, a graph and a backbone that no table was written for, and a single seed."""
    rows = [r for r in read() if r["dataset"] == "cora" and r["backbone"] in ("gcn", "mlp")]
    rows = [r for r in rows if r["task"] in PLACES and r["task"] != "search"]
    new = [
        next(r for r in rows if r["task"] == task and r["method"] == "backbone") | change
        for task in ("accuracy", "pairs", "sizes")
        for change in ({"method": "GMNN"}, {"dataset": "photo"}, {"seed": 77, "method": "other"})
    ]
    assert hidden(dict.fromkeys(sum(PLACES.values(), ()), "|a|\n|-|"), new)  # the test can fail
    tables = tables_of(rows + new)
    assert hidden(tables, rows + new) == []
    assert "| GMNN | " in tables["pairs"]
    line = next(s for s in tables["accuracy"].splitlines() if s.startswith("| other |"))
    assert "(1 seed)" in line


def test_what_is_compared_is_paired(tables_of):
    """
    Means over splits are over those that all have; means over seeds over all, and a test over the
    common ones. Who has fewer is shown, and says so.
    """
    seeds = {"backbone": range(6), "backbone, temperature": range(6), "NMM": range(1, 5),
             "NMM, stacked": (9,)}  # fmt: skip
    torch.manual_seed(0)
    rows, values = [], {}
    for method, seed in ((m, s) for m, known in seeds.items() for s in known):
        # The seeds that the NMM lacks have the backbone's worst values.
        score = 0.5 + 0.01 * torch.rand(()).item() - 0.4 * (seed in (0, 5)) + 0.01 * ("N" in method)
        values[method, seed] = score
        same = {"dataset": "cora", "backbone": "gcn", "method": method, "seed": seed}
        test = {"accuracy": score, "nll": -score, "ece": 0.0}
        rows.append(same | {"task": "accuracy", "joint": 0.0, "test": test})
        rows.append(same | {"task": "pairs", "ratio": 0.2, "own product": score})
    tables = tables_of(rows)

    def found(name):
        lines = tables[name].splitlines()
        return {s.split("|")[1].strip(): s.split("|")[2].strip() for s in lines}

    def mean(method, seeds):
        return statistics.mean(values[method, seed] for seed in seeds)

    hits, pairs = found("accuracy"), found("pairs")
    assert hits["GCN"].startswith(f"{100 * mean('backbone', range(6)):.1f} ± ")
    assert "seed" not in hits["GCN"]
    assert hits["NMM-GCN"].startswith(f"{100 * mean('NMM', range(1, 5)):.1f} ± ")
    assert hits["NMM-GCN"].endswith("(4 seeds)")
    assert hits["StackedNMM on NMM-GCN"].endswith("(1 seed)")
    assert "nan" not in "".join(tables.values())
    gap = [100 * (values["NMM", s] - values["backbone", s]) for s in range(1, 5)]
    assert f"| {statistics.mean(gap):+.1f} ± " in tables["against backbone"]
    for method, name in (("backbone", "GCN"), ("NMM", "NMM-GCN")):
        assert pairs[name].startswith(f"{mean(method, range(1, 5)):.3f} ± ")
        assert "split" not in pairs[name]
    assert pairs["*GCN, number of splits*"] == "4"
    assert pairs["StackedNMM on NMM-GCN"].endswith("(1 split)")


def test_claims_follow_from_the_rows(tables_of):
    """The first screen's counts: three cells, in which the NMM is worse, much worse, better."""
    rows, noise = [], (0.0, 0.01, -0.01, 0.02)
    for dataset, gap in (("cora", 0.005), ("citeseer", 0.2), ("pubmed", -0.005)):
        for method in ("backbone", "backbone, temperature", "backbone, stacked", "NMM",
                       "NMM, stacked"):  # fmt: skip
            for seed in range(4):
                nll = 1.0 + (gap + noise[seed] * (1 + gap) if method == "NMM" else 0.0)
                test = {"accuracy": 0.5 + 0.1 * seed, "nll": nll, "ece": 0.1}
                rows.append({"task": "accuracy", "dataset": dataset, "backbone": "gcn",
                             "method": method, "seed": seed, "joint": -nll,
                             "test": test})  # fmt: skip
    rows += [
        {"task": "pairs", "dataset": "cora", "backbone": "gcn", "method": method, "seed": seed,
         "ratio": 0.2, "own product": -1.0, "conditional": -1.0 + gain, "prior": -1.0}
        for method, gain in (("NMM", 0.002), ("NMM, stacked", 0.01))
        for seed in range(3)
    ]  # fmt: skip
    text = " ".join(tables_of(rows)["reproduced nodes"].split())
    assert "worse than the backbone's in 2 of 3 cells, significantly in 1 (CiteSeer GCN" in text
    assert "significantly higher than the backbone's in 0 of 3 cells" in text
    assert "is worth 0.0020 nats" in text
    assert "StackedNMM 0.0100" in text


def gains_of(num_nodes, num_pairs, hub=0.0):
    generator = torch.Generator().manual_seed(1)
    mask = torch.rand(2 * num_nodes, generator=generator) < 0.5
    ids = mask.nonzero().flatten()
    pairs = torch.combinations(ids)
    pairs = pairs[torch.randperm(len(pairs), generator=generator)[:num_pairs]].T
    gain = torch.randn(num_pairs, generator=generator, dtype=torch.double)
    gain[(pairs == pairs[0, 0]).any(0)] += hub
    return mask, ids, pairs, gain


def test_what_two_nodes_give():
    gains = import_module("benchmarks.nodes.fits")
    mask, ids, pairs, gain = gains_of(20, 60, hub=3.0)
    found = gains.summary(gain, pairs, mask)
    together = (gain[(pairs == a).any(0) | (pairs == b).any(0)].sum() / 60
                for a, b in torch.combinations(ids))  # fmt: skip
    assert found["two nodes"] == pytest.approx(max(together).item())
    assert found["median"] == gain.sort().values[29].item()
    assert found["share"] == pytest.approx((gain > 0).sum().item() / 60)


def test_interval_is_a_bootstrap_over_nodes():
    """As drawn node by node, far wider than over pairs where one hub carries the mean."""
    gains = import_module("benchmarks.nodes.fits")
    mask, ids, pairs, gain = gains_of(40, 300, hub=8.0)
    before = torch.get_rng_state()
    found = gains.summary(gain, pairs, mask, num_resamples=2000)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(5)
    means = []
    for _ in range(2000):
        drawn = ids[torch.randint(len(ids), (len(ids),))]
        times = torch.bincount(drawn, minlength=len(mask)).double()
        weight = times[pairs[0]] * times[pairs[1]]
        means.append((weight * gain).sum() / weight.sum())
    low, high = torch.stack(means).quantile(torch.tensor([0.025, 0.975]).double()).tolist()
    width = high - low
    assert found["low"] == pytest.approx(low, abs=0.08 * width)
    assert found["high"] == pytest.approx(high, abs=0.08 * width)
    assert width > 2 * 1.96 * gain.std().item() / 300**0.5
    constant = gains.summary(torch.full_like(gain, 0.25), pairs, mask)
    assert constant["low"] == constant["high"] == pytest.approx(0.25)


def test_small_runs_are_stored_only_where_one_says(tmp_path):
    """Rows of a small run among those of the whole would pass for measurements."""
    common, rows = import_module("benchmarks.shared.common"), tmp_path / "rows.jsonl"

    def stored(*argv):
        return common.started(argv, "", results=rows).results

    assert stored() == rows
    assert stored("--smoke") is None
    assert stored("--smoke", "--results", f"{tmp_path / 'small'}") == tmp_path / "small"


def test_no_line_of_a_paragraph_begins_a_list():
    """Markdown would take "1. And" at the start of a line for the first point of a list."""
    wrapped = import_module("benchmarks.shared.common").wrapped
    for words in range(40, 50):
        text = "x " * words + "less in 1. It is 2) so, by 3.5 to 4."
        lines = wrapped(text, "  ").splitlines()
        assert " ".join(line.strip() for line in lines) == text
        assert all(len(line) < 100 for line in lines)
        assert not any(line.strip().startswith(("1. ", "2) ")) for line in lines)


def test_training_sizes_are_held_against_the_figure(tables_of):
    """Two shares: at one the NMM is surely above its backbone, at the other below it."""
    base = {"task": "sizes", "dataset": "cora", "backbone": "gat"}
    rows = [
        base | {"method": method, "ratio": ratio, "seed": seed,
                "test": {"accuracy": 0.8 + more * (1 + seed / 100), "nll": 0.5}}
        for ratio, sign in ((0.1, 1), (0.5, -1))
        for method, more in (("backbone", 0.0), ("NMM", 0.01 * sign))
        for seed in range(3)
    ]  # fmt: skip
    text = " ".join(tables_of(rows)["few labels"].split())
    assert "is above in 1 of 2 cells (graph, backbone and share), significantly in 1" in text
    assert "significantly below in 1." in text
    assert "NMM +1.0 / -1.0 (Cora GAT)" in text
