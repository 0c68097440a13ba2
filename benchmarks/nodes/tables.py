# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
Tables of nodes.py's results, for report.py. Which methods a table shows follows from
the rows: none is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import mean, median, stdev

from benchmarks.nodes import claims as nodes_claims
from benchmarks.nodes import communities as nodes_communities
from benchmarks.nodes.run import chosen
from benchmarks.nodes.runs import FORM, Rows, gap, label, on_shared, parts, runs, shared, whole
from benchmarks.shared.common import grouped, pick
from benchmarks.shared.writing import Paired, made, scores, spread

#: Of a method, and of all rows that it is compared with.
Cell = Callable[[Rows, str], str]


def tables(rows: Rows) -> dict[str, str]:
    public = {nodes_claims.reproduced_nodes: 0, against_backbone: 2, accuracy: 1, searches: 1}
    public |= {quality: 1, deviations: 1}
    random = {pairs: 1, nodes_claims.hubs: 0, gains: 1, on_top: 2, sizes: 1}
    shared = {nodes_communities.with_communities: 0, nodes_communities.communities: 2}
    return made(public | random | shared | {nodes_claims.few_labels: 0}, rows)


def grid(rows: Rows, title: str, columns: list[str], cell: Cell, *more: str) -> Iterator[dict]:
    """A line for every method of every backbone (and graph), a cell for all values of columns."""
    for *graph, backbone, method in parts(rows, *more, "backbone", "method"):
        line = {title: ", ".join([*graph, label(method, backbone)])}
        part = pick(rows, backbone=backbone, **dict(zip(more, graph, strict=True)))
        for values in parts(rows, *columns):
            among = pick(part, **dict(zip(columns, values, strict=True)))
            line[" ".join(map(str, values))] = cell(among, method)
        yield line


def accuracy(rows: Rows) -> Iterator[dict]:
    """In percent, mean ± sd; † and ‡ mark differences from the backbone alone."""

    def cell(part: Rows, method: str) -> str:
        values, remark = whole(part, "accuracy", method)
        marked = gap(part, "accuracy", method, "backbone").mark()
        return spread(values.values(), *FORM["accuracy"]) + marked + remark

    known, shown = runs(rows, "accuracy"), []
    methods, lines = parts(known, "backbone", "method"), grid(known, "accuracy", ["dataset"], cell)
    for (backbone, _), part, line in zip(methods, methods.values(), lines, strict=True):
        hits = backbone, {(row["dataset"], row["seed"], row["accuracy"]) for row in part}
        if hits not in shown:  # A temperature changes no prediction; the next table has it.
            yield line
        shown.append(hits)


def quality(rows: Rows) -> Iterator[dict]:
    """NLL, ECE and the joint likelihood of the test set on the public split."""

    def cell(part: Rows, method: str) -> str:
        values, remark = whole(part, "nll", method)
        if not values:
            return ""
        marked = gap(part, "nll", method, "backbone, temperature").mark(-1)
        ece, joint = (mean(scores(part, f, method=method).values()) for f in ("ece", "joint"))
        return f"{spread(values.values(), 3)}{marked} / {ece:.3f} / {joint:.3f}{remark}"

    return grid(runs(rows, "accuracy"), "NLL / ECE / log p(test \\| train)", ["dataset"], cell)


def searches(rows: Rows) -> Iterator[dict]:
    """How many settings were drawn, and those that the validation nodes chose."""

    def cell(part: Rows, method: str) -> str:
        found = pick(part, method=method)
        if not found:
            return ""
        try:
            best = chosen(found, method=method)
            drawn = [f"{k.replace('weight_', '')} {best[k]:g}" for k in found[0]["settings"]]
        except ValueError:
            drawn = ["not ended"]
        return f"{len(grouped(found, 'trial'))}: {', '.join(drawn)}"

    return grid(runs(rows, "search"), "trials, and the settings chosen", ["dataset"], cell)


def against_backbone(rows: Rows) -> Iterator[dict]:
    """The paper's claim: what the plain NMM changes, seed by seed."""
    columns = {
        "accuracy, points": ("accuracy", "", ""),
        "NLL": ("nll", "", ""),
        "NLL, backbone + temperature": ("nll", "", ", temperature"),
        "NLL, StackedNMM on either": ("nll", ", stacked", ", stacked"),
    }
    for (graph, backbone), part in parts(runs(rows, "accuracy"), "dataset", "backbone").items():
        for given in ("", ", settings of NMM"):
            line = {"plain NMM minus": graph, "backbone": label("backbone" + given, backbone)}
            for heading, (field, ours, theirs) in columns.items():
                found = gap(part, field, f"NMM{ours}{given}", f"backbone{theirs}{given}")
                line[heading] = found.brief(*FORM[field])
            yield line


def pairs(rows: Rows) -> Iterator[dict]:
    """PLL given the training labels, ± sd over splits; in brackets own product and prior."""

    def cell(part: Rows, method: str) -> str:
        product, remark = on_shared(part, "own product", method)
        joint, prior = (on_shared(part, f, method)[0] for f in ("conditional", "prior"))
        text = spread((joint or product).values(), 3)
        if prior:
            text += f" ({mean(product.values()):.3f}, {mean(prior.values()):.3f})"
        return text + remark

    for (backbone,), part in parts(runs(rows, "pairs"), "backbone").items():
        lines = list(grid(part, "PLL", ["dataset", "ratio"], cell))
        counts = next(grid(part, "PLL", ["dataset", "ratio"], lambda p, _: str(len(shared(p)))))
        yield from [counts | {"PLL": f"*{backbone}, number of splits*"}, *lines]


def gains(rows: Rows) -> Iterator[dict]:
    """What pairs gain on the backbone with temperature scaling: means, medians, hubs."""

    def middle(found: list[dict]) -> str:
        """The median pair and the share of pairs that gain, means over fits."""
        both = [mean(gain[name] for gain in found) for name in ("median", "share") if found]
        return f"{both[0]:+.4f}, {100 * both[1]:.0f} %" if both else ""

    known = [row | {"pairs": row.get("conditional", row["own product"])}
             for row in runs(rows, "pairs")]  # fmt: skip
    tempered = grouped(pick(known, method="backbone, temperature"), "dataset", "backbone")
    for (graph, backbone, method), fits in parts(known, "dataset", "backbone", "method").items():
        base = tempered.get((graph, backbone), [])
        if not base or method == "backbone, temperature":
            continue
        line = {"mean gain per pair": f"{graph}, {label(method, backbone)}"}
        for (ratio,) in parts(known, "ratio"):
            gain = Paired.of_rows(pick(fits, ratio=ratio), pick(base, ratio=ratio), "pairs")
            line[f"{ratio}"] = gain.spread(3) + f" ({len(gain)})" * bool(gain)
        found = [row["on temperature"] for row in fits if "on temperature" in row]
        above, below = [g for g in found if g["low"] > 0], [g for g in found if g["high"] < 0]
        own = [row["on own product"] for row in fits if "on own product" in row]
        yield line | {
            "interval above, below 0": f"{len(above)}, {len(below)} of {len(found)}" * bool(found),
            "two nodes": f"{mean(each['two nodes'] for each in found):.3f}" if found else "",
            "median pair, pairs that gain": middle(found),
            "the same on own product": middle(own),
        }


def on_top(rows: Rows) -> Iterator[dict]:
    """PLL of StackedNMM minus that of temperature scaling, on the same trained classifier."""
    known = runs(rows, "pairs")
    for (graph, backbone), every in parts(known, "dataset", "backbone").items():
        line = {"PLL gained on temperature scaling": graph, "classifier": backbone}
        fits = pick(every, method="backbone, stacked")
        for (ratio,) in parts(known, "ratio"):
            joint, own = (scores(fits, f, ratio=ratio) for f in ("conditional", "own product"))
            alone = scores(every, "own product", ratio=ratio, method="backbone, temperature")
            found, share = Paired.of(joint, alone), Paired.of(joint, own).mean
            wide = f" ± {stdev(found.gaps):.3f}" if len(found) > 2 else ""
            cell = f"{found.mean:+.3f}{wide}{' *' * found.clear()} ({share:+.3f}; {len(found)})"
            line[f"{ratio}"] = cell if found else ""
        seconds = scores(fits, "fit seconds", ("ratio", "seed")).values()
        yield line | {"seconds a fit": f"{median(seconds):.1f}" if seconds else ""}


def sizes(rows: Rows) -> Iterator[dict]:
    """Accuracy and NLL for each share of training nodes."""

    def cell(part: Rows, method: str) -> str:
        values, remark = on_shared(part, "accuracy", method)
        if not values:
            return ""
        found = Paired.of(values, scores(part, "accuracy", method="backbone"))
        shown = len(found) > 2 and method != "backbone"
        change = f" ({found.spread(1, 100)})" if shown else ""
        nll = mean(on_shared(part, "nll", method)[0].values())
        return f"{100 * mean(values.values()):.1f}{change} / {nll:.3f}{remark}"

    title = "accuracy (against the backbone) / NLL"
    return grid(runs(rows, "sizes"), title, ["ratio"], cell, "dataset")


def deviations(rows: Rows) -> Iterator[dict]:
    """One change of the recipe at a time, against ours, seed by seed."""
    known = pick(runs(rows, "deviations"), dataset="Cora", backbone="GCN", method="NMM")
    ours = pick(known, change="none")
    for (change,), part in grouped(known, "change").items():
        hits, nll, one_by_one = (scores(part, f) for f in ("accuracy", "nll", "sequential"))
        base = [] if change == "none" else ours
        yield {
            "Cora, NMM-GCN": "ours" if change == "none" else change,
            "seeds": f"{len(part)}",
            "accuracy": spread(hits.values(), 1, 100),
            "minus ours, points": Paired.of_rows(part, base, "accuracy").brief(1, 100),
            "NLL": spread(nll.values(), 3),
            "minus ours": Paired.of_rows(part, base, "nll").brief(3),
            "predicted one by one, points": Paired.of(one_by_one, hits).brief(1, 100),
        }


def tests(rows: Rows, against: str) -> Iterator[str]:
    """Paired differences in PLL of every row from one without correlation."""
    for _, part in parts(runs(rows, "pairs"), "dataset", "backbone").items():
        for (method, ratio), fits in parts(part, "method", "ratio").items():
            ours = scores(fits, "conditional") or scores(fits, "own product")
            found = Paired.of(ours, scores(part, "own product", method=against, ratio=ratio))
            if len(found) > 2 and method != against:
                dataset, backbone = (fits[0][name].lower() for name in ("dataset", "backbone"))
                numbers = f"{found.mean:+.4f}  p {found.p:.4f}  n {len(found)}"
                yield f"{dataset:9} {backbone:6} {ratio} {method:28} - {against}: {numbers}"
