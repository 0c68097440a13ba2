# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
Tables of node_classification.py's results, for report.py. Which methods a table shows follows
from the rows: none is left out.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from pathlib import Path

from node_classification import Results
from runs import GRAPHS, NAMES, Runs, difference, label, mark, mean, method_of, p_value, sd, table

RATIOS = (0.2, 0.4, 0.6)


def blocks(runs: Runs) -> Iterator[tuple[str, str]]:
    """Each backbone with each of its methods, in the order of the tables."""
    for kind in runs.values("backbone", NAMES):
        for method in runs.methods(backbone=kind):
            yield kind, method


def accuracy(runs: Runs) -> str:
    """Accuracy in percent, mean ± sd; † and ‡ mark differences from the backbone alone."""
    rows, graphs, seen = [], runs.values("dataset", GRAPHS), set()
    for kind, method in blocks(runs):
        row = [label(method, kind)]
        hits = {(r["dataset"], r["seed"]): r["test"]["accuracy"]
                for r in runs.block(backbone=kind) if method_of(r) == method}  # fmt: skip
        if (same := (kind, tuple(sorted(hits.items())))) in seen:
            continue  # a temperature changes no prediction; the next table has it
        seen.add(same)
        for dataset in graphs:
            key = {"dataset": dataset, "backbone": kind}
            values, remark = runs.whole("test.accuracy", method, **key)
            base = runs.get("test.accuracy", "backbone", **key)
            spread = f" ± {100 * sd(values):.1f}" if len(values) > 1 else ""
            cell = f"{100 * mean(values):.1f}{spread}" if values else ""
            row.append(cell + (mark(values, base) + remark if values else ""))
        rows.append(row)
    return table(["accuracy", *(GRAPHS.get(g, g) for g in graphs)], rows)


def quality(runs: Runs) -> str:
    """NLL, ECE and the joint likelihood of the test set on the public split."""
    rows, graphs = [], runs.values("dataset", GRAPHS)
    for kind, method in blocks(runs):
        row = [label(method, kind)]
        for dataset in graphs:
            key = {"dataset": dataset, "backbone": kind}
            values, remark = runs.whole("test.nll", method, **key)
            if not values:
                row.append("")
                continue
            more = [mean(runs.whole(f, method, **key)[0]) for f in ("test.ece", "joint")]
            base = runs.get("test.nll", "backbone, temperature", **key)
            spread = f" ± {sd(values):.3f}" if len(values) > 1 else ""
            cell = f"{mean(values):.3f}{spread}{mark(values, base, -1)}"
            row.append(" / ".join([cell, *(f"{v:.3f}" for v in more)]) + remark)
        rows.append(row)
    head = ["NLL / ECE / log p(test \\| train)", *(GRAPHS.get(g, g) for g in graphs)]
    return table(head, rows)


def against_backbone(runs: Runs) -> str:
    """The paper's claim: what the plain NMM changes, seed by seed."""
    fields = [("test.accuracy", "", "", 100, 1), ("test.nll", "", "", 1, 3),
              ("test.nll", "", ", temperature", 1, 3),
              ("test.nll", ", stacked", ", stacked", 1, 3)]  # fmt: skip
    rows = []
    for dataset in runs.values("dataset", GRAPHS):
        for kind in runs.values("backbone", NAMES, dataset=dataset):
            key = {"dataset": dataset, "backbone": kind}
            for given in ("", ", settings of NMM"):
                if "NMM" + given not in runs.methods(**key):
                    continue
                name = NAMES.get(kind, kind) + (" (settings of the NMM's search)" * bool(given))
                row = [GRAPHS.get(dataset, dataset), name]
                for field, ours, theirs, unit, digits in fields:
                    a = runs.get(field, "NMM" + ours + given, **key)
                    b = runs.get(field, "backbone" + theirs + given, **key)
                    row.append(change(a, b, unit, digits))
                rows.append(row)
    head = ["plain NMM minus", "backbone", "accuracy, points", "NLL", "NLL, backbone + temperature",
            "NLL, StackedNMM on either"]  # fmt: skip
    return table(head, rows, left=2)


def change(a: dict[int, float], b: dict[int, float], unit: float = 1, digits: int = 3) -> str:
    """A paired difference, its sd over seeds and p."""
    gap, spread, p, number = difference(a, b)
    if number < 3:
        return ""
    return f"{unit * gap:+.{digits}f} ± {unit * spread:.{digits}f} ({p_value(p)})"


def searches(path: Path) -> str:
    """How many settings were drawn, and those that the validation nodes chose."""
    results, runs, rows = Results(path), Runs.read(path, "search"), []
    graphs = runs.values("dataset", GRAPHS)
    names = {"lr": "lr", "weight_decay": "decay", "dropout": "dropout", "floor": "floor",
             "gamma": "gamma", "weight": "weight", "temperature": "temperature",
             "memory": "memory"}  # fmt: skip
    for kind, method in blocks(runs):
        row = [label(method, kind)]
        for dataset in graphs:
            found = runs.block(dataset=dataset, backbone=kind, method=method)
            cell = ""
            if found:
                number, drawn = len({r["trial"] for r in found}), found[0]["settings"].keys()
                seeds = min(sum(r["trial"] == t["trial"] for r in found) for t in found)
                best = results.chosen(dataset, kind, method) if seeds > 1 else {}
                cell = f"{number}: " + ", ".join(f"{names[k]} {best[k]:g}" for k in drawn if best)
                cell += "not ended" * (not best)
            row.append(cell)
        rows.append(row)
    return table(["trials, and the settings chosen", *(GRAPHS.get(g, g) for g in graphs)], rows)


def pairs(runs: Runs) -> str:
    """PLL given the training labels, ± sd over splits; in brackets own product and prior."""
    rows, graphs = [], runs.values("dataset", GRAPHS)
    cells = [(d, r) for d in graphs for r in runs.values("ratio", RATIOS, dataset=d)]
    for kind in runs.values("backbone", NAMES):
        numbers = [len(runs.shared(dataset=d, ratio=r, backbone=kind)) for d, r in cells]
        rows.append([f"*{NAMES.get(kind, kind)}, number of splits*", *map(str, numbers)])
        for method in runs.methods(backbone=kind):
            row = [label(method, kind)]
            for dataset, ratio in cells:
                key = {"dataset": dataset, "backbone": kind, "ratio": ratio}
                product, remark = runs.paired("own product", method, **key)
                value = runs.paired("conditional", method, **key)[0] or product
                if not value:
                    row.append("")
                    continue
                cell = f"{mean(value):.3f}" + (f" ± {sd(value):.3f}" if len(value) > 1 else "")
                prior = runs.paired("prior", method, **key)[0]
                if prior:
                    cell += f" ({mean(product):.3f}, {mean(prior):.3f})"
                row.append(cell + remark.replace("seed", "split"))
            rows.append(row)
    return table(["PLL", *(f"{GRAPHS.get(d, d)} {r}" for d, r in cells)], rows)


def gains(runs: Runs) -> str:
    """What pairs gain on the backbone with temperature scaling: means, medians, hubs."""
    rows = []
    for dataset in runs.values("dataset", GRAPHS):
        for kind in runs.values("backbone", NAMES, dataset=dataset):
            key = {"dataset": dataset, "backbone": kind}
            for method in runs.methods(**key):
                cells, found, own = [], [], []
                for ratio in RATIOS:
                    by_seed = runs.get("on temperature", method, ratio=ratio, **key)
                    means = {seed: row["mean"] for seed, row in by_seed.items()}
                    spread = f" ± {sd(means):.3f}" if len(means) > 1 else ""
                    cells.append(f"{mean(means):+.3f}{spread} ({len(means)})" if means else "")
                    found += by_seed.values()
                    own += runs.get("on own product", method, ratio=ratio, **key).values()
                if not found or method == "backbone, temperature":
                    continue
                sides = sum(r["low"] > 0 for r in found), sum(r["high"] < 0 for r in found)
                two = statistics.mean(row["two nodes"] for row in found)
                rows.append([f"{GRAPHS.get(dataset, dataset)}, {label(method, kind)}", *cells,
                             f"{sides[0]}, {sides[1]} of {len(found)}", f"{two:.3f}",
                             middle(found), middle(own)])  # fmt: skip
    head = ["mean gain per pair", *map(str, RATIOS), "interval above, below 0", "two nodes",
            "median pair, pairs that gain", "the same on own product"]  # fmt: skip
    return table(head, rows)


def middle(rows: list[dict]) -> str:
    """The median pair and the share of pairs that gain, means over fits."""
    if not rows:
        return ""
    median, share = (statistics.mean(row[name] for row in rows) for name in ("median", "share"))
    return f"{median:+.4f}, {100 * share:.0f} %"


def on_top(runs: Runs) -> str:
    """PLL of StackedNMM minus that of temperature scaling, on the same trained classifier."""
    rows = []
    for dataset in runs.values("dataset", GRAPHS):
        for kind in runs.values("backbone", NAMES, dataset=dataset):
            row, seconds = [], []
            for ratio in RATIOS:
                key = {"dataset": dataset, "backbone": kind, "ratio": ratio}
                ours = runs.get("conditional", "backbone, stacked", **key)
                own = runs.get("own product", "backbone, stacked", **key)
                base = runs.get("own product", "backbone, temperature", **key)
                seconds += runs.get("fit seconds", "backbone, stacked", **key).values()
                gap, spread, p, number = difference(ours, base)
                share = difference(ours, own)[0]
                star = " *" if p < 0.05 else ""
                wide = f" ± {spread:.3f}" if number > 2 else ""
                row.append(f"{gap:+.3f}{wide}{star} ({share:+.3f}; {number})" if number else "")
            time = f"{statistics.median(seconds):.1f}" if seconds else ""
            rows.append([GRAPHS.get(dataset, dataset), NAMES.get(kind, kind), *row, time])
    head = ["PLL gained on temperature scaling", "classifier", *map(str, RATIOS), "seconds a fit"]
    return table(head, rows, left=2)


def sizes(runs: Runs) -> str:
    """Accuracy and NLL for each share of training nodes."""
    rows, ratios = [], runs.values("ratio", (0.1, 0.2, 0.3, 0.4, 0.5))
    for dataset in runs.values("dataset", GRAPHS):
        for kind in runs.values("backbone", NAMES, dataset=dataset):
            for method in runs.methods(dataset=dataset, backbone=kind):
                row = [f"{GRAPHS.get(dataset, dataset)}, {label(method, kind)}"]
                for ratio in ratios:
                    key = {"dataset": dataset, "backbone": kind, "ratio": ratio}
                    values, remark = runs.paired("test.accuracy", method, **key)
                    nll = runs.paired("test.nll", method, **key)[0]
                    base = runs.get("test.accuracy", "backbone", **key)
                    if not values:
                        row.append("")
                        continue
                    gap, spread, _, number = difference(values, base)
                    sign = f" ({100 * gap:+.1f} ± {100 * spread:.1f})" if number > 2 else ""
                    gain = sign if method != "backbone" else ""
                    cell = f"{100 * mean(values):.1f}{gain} / {mean(nll):.3f}"
                    row.append(cell + remark.replace("seed", "split"))
                rows.append(row)
    return table(["accuracy (against the backbone) / NLL", *map(str, ratios)], rows)


def deviations(runs: Runs) -> str:
    """One change of the recipe at a time, against ours, seed by seed."""
    rows, changes = [], list(dict.fromkeys(row["change"] for row in runs.rows))
    key = {"dataset": "cora", "backbone": "gcn"}
    base = {f: runs.get(f, "NMM", change="none", **key) for f in ("test.accuracy", "test.nll")}
    for name in changes:
        found = {f: runs.get(f, "NMM", change=name, **key) for f in base}
        hits, nll = found["test.accuracy"], found["test.nll"]
        spread = [f" ± {100 * sd(hits):.1f}", f" ± {sd(nll):.3f}"] if len(hits) > 1 else ["", ""]
        row = [name if name != "none" else "ours", str(len(hits)),
               f"{100 * mean(hits):.1f}{spread[0]}",
               change(hits, base["test.accuracy"], 100, 1) if name != "none" else "",
               f"{mean(nll):.3f}{spread[1]}",
               change(nll, base["test.nll"]) if name != "none" else "",
               change(runs.get("sequential", "NMM", change=name, **key), hits, 100, 1)]  # fmt: skip
        rows.append(row)
    head = ["Cora, NMM-GCN", "seeds", "accuracy", "minus ours, points", "NLL", "minus ours",
            "predicted one by one, points"]  # fmt: skip
    return table(head, rows)


def epochs(path: Path) -> str:
    if not path.exists():
        return ""
    rows = []
    for row in json.loads(path.read_text()):
        times = [f"{row['ms'][n]:.1f}" for n in ("backbone", "networks", "NMM")]
        ratios = [f"{ratio:.2f}" for ratio in row["ratios"]]
        rows.append([GRAPHS[row["dataset"]], NAMES[row["backbone"]], *times, *ratios])
    head = ["graph", "backbone", "backbone, ms", "networks, ms", "NMM, ms", "NMM / networks",
            "with agreement", "in Pyro"]  # fmt: skip
    return table(head, rows, left=2)


def tests(runs: Runs, against: str) -> list[str]:
    """Paired differences in PLL of every row from one without correlation."""
    lines = []
    for dataset in runs.values("dataset", GRAPHS):
        for kind in runs.values("backbone", NAMES, dataset=dataset):
            for method in runs.methods(dataset=dataset, backbone=kind):
                for ratio in RATIOS:
                    key = {"dataset": dataset, "backbone": kind, "ratio": ratio}
                    ours = runs.get("conditional", method, **key)
                    ours = ours or runs.get("own product", method, **key)
                    gap, _, p, number = difference(ours, runs.get("own product", against, **key))
                    if number > 2 and method != against:
                        lines.append(f"{dataset:9} {kind:6} {ratio} {method:28} - {against}: "
                                     f"{gap:+.4f}  p {p:.4f}  n {number}")  # fmt: skip
    return lines
