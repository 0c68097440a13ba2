# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
Tables of nodes.py's results, for report.py. Which methods a table shows follows from
the rows: none is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from statistics import mean, median

import nodes_claims
from common import GRAPHS, grouped, pick, spread, table
from nodes import chosen
from nodes_runs import FORM, NAMES, Runs, gap, label, mark, method_of

RATIOS = (0.2, 0.4, 0.6)
Cell = Callable[[Runs, str], str]


def tables(rows: list[dict]) -> dict[str, str]:
    public, pair_runs, sized, deviated = (
        Runs(pick(rows, task=task)) for task in ("accuracy", "pairs", "sizes", "deviations")
    )
    return {
        "reproduced nodes": nodes_claims.first_screen(public, pair_runs, deviated),
        "against backbone": against_backbone(public),
        "accuracy": accuracy(public),
        "searches": searches(Runs(pick(rows, task="search"))),
        "quality": quality(public),
        "deviations": deviations(deviated),
        "pairs": pairs(pair_runs),
        "hubs": nodes_claims.hubs(pair_runs),
        "gains": gains(pair_runs),
        "on top": on_top(pair_runs),
        "sizes": sizes(sized),
        "few labels": nodes_claims.few_labels(sized),
    }


def blocks(runs: Runs) -> list[tuple[str, str]]:
    """Each backbone with each of its methods, in the order of the tables."""
    kinds = runs.values("backbone", NAMES)
    return [(kind, method) for kind in kinds for method in runs.part(backbone=kind).methods]


def over_graphs(runs: Runs, title: str, cell: Cell, lines: Iterable[tuple[str, str]]) -> str:
    """A line for each backbone's method, a column for each graph."""
    graphs = runs.values("dataset", GRAPHS)
    rows = []
    for kind, method in lines:
        parts = (runs.part(dataset=dataset, backbone=kind) for dataset in graphs)
        rows.append([label(method, kind), *(cell(part, method) for part in parts)])
    return table(" | ".join([title, *(GRAPHS.get(name, name) for name in graphs)]), rows)


def accuracy(runs: Runs) -> str:
    """Accuracy in percent, mean ± sd; † and ‡ mark differences from the backbone alone."""

    def cell(part: Runs, method: str) -> str:
        values, remark = part.whole("test.accuracy", method)
        base = part.get("test.accuracy", "backbone")
        return (
            spread(values.values(), *FORM["test.accuracy"]) + mark(values, base) + remark
            if values
            else ""
        )

    lines: dict[tuple, tuple[str, str]] = {}
    for kind, method in blocks(runs):
        part = [r for r in pick(runs.rows, backbone=kind) if method_of(r) == method]
        hits = frozenset((r["dataset"], r["seed"], r["test"]["accuracy"]) for r in part)
        # A temperature changes no prediction; the next table has it.
        lines.setdefault((kind, hits), (kind, method))
    return over_graphs(runs, "accuracy", cell, lines.values())


def quality(runs: Runs) -> str:
    """NLL, ECE and the joint likelihood of the test set on the public split."""

    def cell(part: Runs, method: str) -> str:
        values, remark = part.whole("test.nll", method)
        if not values:
            return ""
        first = spread(values.values(), 3)
        first += mark(values, part.get("test.nll", "backbone, temperature"), -1)
        more = [f"{mean(part.get(f, method).values()):.3f}" for f in ("test.ece", "joint")]
        return " / ".join([first, *more]) + remark

    return over_graphs(runs, "NLL / ECE / log p(test \\| train)", cell, blocks(runs))


def searches(runs: Runs) -> str:
    """How many settings were drawn, and those that the validation nodes chose."""

    def cell(part: Runs, method: str) -> str:
        found = part.by_method.get(method)
        if not found:
            return ""
        try:
            best = chosen(found, method=method)
            drawn = [f"{k.replace('weight_', '')} {best[k]:g}" for k in found[0]["settings"]]
        except ValueError:
            drawn = ["not ended"]
        return f"{len(grouped(found, 'trial'))}: " + ", ".join(drawn)

    return over_graphs(runs, "trials, and the settings chosen", cell, blocks(runs))


def against_backbone(runs: Runs) -> str:
    """The paper's claim: what the plain NMM changes, seed by seed."""
    fields = [("test.accuracy", "", ""), ("test.nll", "", ""), ("test.nll", "", ", temperature")]
    fields.append(("test.nll", ", stacked", ", stacked"))
    rows = []
    for graph, kind, part in runs.cells():
        for given in ("", ", settings of NMM"):
            if "NMM" + given in part.methods:
                row = [graph, label("backbone" + given, kind)]
                for field, ours, theirs in fields:
                    both = f"NMM{ours}{given}", f"backbone{theirs}{given}"
                    row.append(part.gap(field, *both).text(*FORM[field]))
                rows.append(row)
    head = (
        "plain NMM minus | backbone | accuracy, points | NLL | NLL, backbone + temperature | "
        "NLL, StackedNMM on either"
    )
    return table(head, rows, left=2)


def pairs(runs: Runs) -> str:
    """PLL given the training labels, ± sd over splits; in brackets own product and prior."""

    def cell(part: Runs, method: str) -> str:
        product, remark = part.paired("own product", method)
        prior = part.paired("prior", method)[0]
        text = spread((part.paired("conditional", method)[0] or product).values(), 3)
        if prior:
            text += f" ({mean(product.values()):.3f}, {mean(prior.values()):.3f})"
        return text + remark.replace("seed", "split")

    rows, graphs = [], runs.values("dataset", GRAPHS)
    cells = [(d, r) for d in graphs for r in runs.part(dataset=d).values("ratio", RATIOS)]
    for kind in runs.values("backbone", NAMES):
        parts = [runs.part(dataset=d, ratio=r, backbone=kind) for d, r in cells]
        numbers = [str(len(part.shared())) for part in parts]
        rows.append([f"*{NAMES.get(kind, kind)}, number of splits*", *numbers])
        for method in runs.part(backbone=kind).methods:
            rows.append([label(method, kind), *(cell(part, method) for part in parts)])
    return table("PLL" + "".join(f" | {GRAPHS.get(d, d)} {r}" for d, r in cells), rows)


def gains(runs: Runs) -> str:
    """What pairs gain on the backbone with temperature scaling: means, medians, hubs."""

    def middle(rows: list[dict]) -> str:
        """The median pair and the share of pairs that gain, means over fits."""
        both = [mean(row[name] for row in rows) for name in ("median", "share") if rows]
        return f"{both[0]:+.4f}, {100 * both[1]:.0f} %" if both else ""

    rows = []
    for graph, kind, part in runs.cells():
        for method in part.methods:
            cells, found, own = [], [], []
            for ratio in RATIOS:
                known = part.part(ratio=ratio)
                each = list(known.get("on temperature", method).values())
                means = spread([row["mean"] for row in each], 3, sign="+")
                cells.append(means + f" ({len(each)})" * bool(each))
                found += each
                own += known.get("on own product", method).values()
            if not found or method == "backbone, temperature":
                continue
            sides = sum(r["low"] > 0 for r in found), sum(r["high"] < 0 for r in found)
            cells.append(f"{sides[0]}, {sides[1]} of {len(found)}")
            cells.append(f"{mean(row['two nodes'] for row in found):.3f}")
            rows.append([f"{graph}, {label(method, kind)}", *cells, middle(found), middle(own)])
    head = (
        "mean gain per pair | 0.2 | 0.4 | 0.6 | interval above, below 0 | two nodes | "
        "median pair, pairs that gain | the same on own product"
    )
    return table(head, rows)


def on_top(runs: Runs) -> str:
    """PLL of StackedNMM minus that of temperature scaling, on the same trained classifier."""
    rows, ours = [], "backbone, stacked"
    for graph, kind, part in runs.cells():
        row = []
        for known in (part.part(ratio=ratio) for ratio in RATIOS):
            joint = known.get("conditional", ours)
            found = gap(joint, known.get("own product", "backbone, temperature"))
            share = gap(joint, known.get("own product", ours)).mean
            wide = f" ± {found.sd:.3f}" * (found.seeds > 2) + " *" * (found.p < 0.05)
            cell = f"{found.mean:+.3f}{wide} ({share:+.3f}; {found.seeds})"
            row.append(cell if found.seeds else "")
        fits = part.by_method.get(ours, [])
        seconds = [r["fit seconds"] for r in fits if r["ratio"] in RATIOS and "fit seconds" in r]
        time = f"{median(seconds):.1f}" if seconds else ""
        rows.append([graph, NAMES.get(kind, kind), *row, time])
    head = "PLL gained on temperature scaling | classifier | 0.2 | 0.4 | 0.6 | seconds a fit"
    return table(head, rows, left=2)


def sizes(runs: Runs) -> str:
    """Accuracy and NLL for each share of training nodes."""

    def cell(part: Runs, method: str) -> str:
        values, remark = part.paired("test.accuracy", method)
        if not values:
            return ""
        found = gap(values, part.get("test.accuracy", "backbone"))
        shown = found.seeds > 2 and method != "backbone"
        gain = f" ({100 * found.mean:+.1f} ± {100 * found.sd:.1f})" if shown else ""
        nll = mean(part.paired("test.nll", method)[0].values())
        return f"{100 * mean(values.values()):.1f}{gain} / {nll:.3f}" + remark.replace(
            "seed", "split"
        )

    ratios, rows = runs.values("ratio"), []
    for graph, kind, part in runs.cells():
        parts = [part.part(ratio=ratio) for ratio in ratios]
        for method in part.methods:
            rows.append([f"{graph}, {label(method, kind)}", *(cell(p, method) for p in parts)])
    head = "accuracy (against the backbone) / NLL"
    return table(head + "".join(f" | {ratio}" for ratio in ratios), rows)


def deviations(runs: Runs) -> str:
    """One change of the recipe at a time, against ours, seed by seed."""
    rows, runs = [], runs.part(dataset="cora", backbone="gcn")
    base = runs.part(change="none")
    for (name,) in grouped(runs.rows, "change"):
        part, row = runs.part(change=name), [name if name != "none" else "ours"]
        row.append(str(len(part.get("test.accuracy", "NMM"))))
        for field in FORM:
            values = part.get(field, "NMM")
            row.append(spread(values.values(), *FORM[field]))
            change = gap(values, base.get(field, "NMM")).text(*FORM[field])
            row.append(change if name != "none" else "")
        hits = part.get("test.accuracy", "NMM")
        row.append(gap(part.get("sequential", "NMM"), hits).text(1, 100))
        rows.append(row)
    head = (
        "Cora, NMM-GCN | seeds | accuracy | minus ours, points | NLL | minus ours | "
        "predicted one by one, points"
    )
    return table(head, rows)


def tests(rows: list[dict], against: str) -> list[str]:
    """Paired differences in PLL of every row from one without correlation."""
    lines = []
    for _, kind, part in Runs(pick(rows, task="pairs")).cells():
        for method in (name for name in part.methods if name != against):
            for ratio in RATIOS:
                known = part.part(ratio=ratio)
                ours = known.get("conditional", method) or known.get("own product", method)
                found = gap(ours, known.get("own product", against))
                if found.seeds > 2:
                    where = f"{part.rows[0]['dataset']:9} {kind:6} {ratio} {method:28}"
                    numbers = f"{found.mean:+.4f}  p {found.p:.4f}  n {found.seeds}"
                    lines.append(f"{where} - {against}: {numbers}")
    return lines
