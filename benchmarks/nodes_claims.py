# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Sentences of the documents whose numbers follow from nodes.py's results."""

from __future__ import annotations

from statistics import mean

from common import grouped, pick, wrapped
from nodes_runs import FORM, Rows, gap, parts, runs
from references import PAPER_CORA
from writing import Paired, bullets, p_text, scores


class Cells:
    """One method minus another on every graph and backbone with three seeds of both, by name."""

    def __init__(self, rows: Rows, field: str, ours: str, theirs: str) -> None:
        every = parts(runs(rows, "accuracy"), "dataset", "backbone").items()
        found = {" ".join(name): gap(part, field, ours, theirs) for name, part in every}
        self.cells = {name: each for name, each in found.items() if len(each) > 2}
        self.digits, self.unit = FORM[field]

    def __len__(self) -> int:
        return len(self.cells)

    def number(self, mean: float) -> str:
        return f"{self.unit * mean:+.{self.digits}f}"

    def means(self) -> list[float]:
        return [found.mean for found in self.cells.values()]

    def count(self, sign: int) -> int:
        """Cells in which the mean has the sign."""
        return sum(sign * each > 0 for each in self.means())

    def clear(self, sign: int) -> dict[str, Paired]:
        """Those where p < .05 besides."""
        return {name: found for name, found in self.cells.items() if found.clear(sign)}

    def listed(self, *signs: int) -> str:
        """These in brackets."""
        found = [pair for sign in signs for pair in self.clear(sign).items()]
        each = (f"{name} {self.number(gap.mean)}, {p_text(gap.p)}" for name, gap in found)
        return f" ({'; '.join(each)})" if found else ""

    def span(self) -> str:
        return f"{self.number(min(self.means()))} to {self.number(max(self.means()))}"


def reproduced_nodes(rows: Rows) -> str:
    """What of the paper's claim for node classification reproduces, and what helps instead."""
    return bullets([*plain(rows), *correlation(rows), *recipe(rows), *helps(rows)])


def plain(rows: Rows) -> list[str]:
    hits = Cells(rows, "accuracy", "NMM", "backbone")
    nll = Cells(rows, "nll", "NMM", "backbone")
    tempered = Cells(rows, "nll", "NMM", "backbone, temperature")
    both = Cells(rows, "nll", "NMM, stacked", "backbone, stacked")
    if not (hits and nll and tempered and both):
        return []
    seeds = sorted({len(found) for found in hits.cells.values()})
    seeds = " to ".join(str(number) for number in dict.fromkeys((seeds[0], seeds[-1])))
    return [
        f"*Accuracy*: significantly higher than the backbone's in {len(hits.clear(1))} of "
        f"{len(hits)} cells (graph and backbone, public split, {seeds} seeds), lower in "
        f"{len(hits.clear(-1))}{hits.listed(-1)}; mean differences {hits.span()} points.",
        f"*Calibration*: its negative log-likelihood is worse than the backbone's in "
        f"{nll.count(1)} of {len(nll)} cells, significantly in {len(nll.clear(1))}"
        f"{nll.listed(1, -1)}, and significantly better in {len(nll.clear(-1))}; differences "
        f"{nll.span()} nats a node. Against the backbone with temperature scaling it is worse in "
        f"{tempered.count(1)} of {len(tempered)}, significantly in {len(tempered.clear(1))}, by "
        f"{tempered.span()} nats; with StackedNMM on either, worse in {both.count(1)} "
        f"(significantly {len(both.clear(1))}) and better in {both.count(-1)} "
        f"({len(both.clear(-1))}).",
    ]


def shares(rows: Rows, stacked: bool) -> list[float]:
    """Joint tables of pairs minus the products of the same model's marginals, nats per pair."""
    return [
        row["conditional"] - row["own product"]
        for row in pick(rows, task="pairs")
        if "conditional" in row and row["method"].endswith("stacked") == stacked
    ]


def correlation(rows: Rows) -> list[str]:
    trained, stacked = shares(rows, False), shares(rows, True)
    if not trained or not stacked:
        return []
    return [
        f"*Correlation*: it learns almost none. The joint table of two adjacent test nodes is "
        f"worth {mean(trained):.4f} nats more than the product of the model's own marginals (mean "
        f"of {len(trained)} NMMs trained on random splits); in StackedNMM {mean(stacked):.4f} "
        f"({len(stacked)} fits)."
    ]


def recipe(rows: Rows) -> list[str]:
    """The paper's recipe as a whole, and its rule of prediction."""
    every = runs(rows, "deviations")
    changes = grouped(pick(every, dataset="Cora", backbone="GCN", method="NMM"), "change")
    paper = [scores(part, "accuracy") for (name,), part in changes.items() if name[:5] == "paper"]
    seeds = min(map(len, paper), default=0)
    if seeds < 3:
        return []
    means = [100 * mean(values.values()) for values in paper]
    one_by_one = mean(row["sequential"] - row["accuracy"] for row in every)
    return [
        f"*Tried besides*: the paper's own recipe ({len(paper)} settings of its pool, {seeds} "
        f"seeds each, NMM-GCN on Cora) has an accuracy of {min(means):.1f} to {max(means):.1f}, "
        f"where it states {PAPER_CORA}; predicting nodes one by one, as it does, changes "
        f"{round(100 * one_by_one, 2) + 0.0:+.2f} points."
    ]


def helps(rows: Rows) -> list[str]:
    on_top = Cells(rows, "nll", "backbone, stacked", "backbone, temperature")
    consistency = Cells(rows, "accuracy", "backbone + consistency", "backbone")
    stacked = Cells(rows, "nll", "backbone, stacked", "backbone")
    if not (on_top and consistency and stacked):
        return []
    return [
        f"*What helps*: calibration and known labels of neighbours on top of a trained classifier, "
        f"StackedNMM (negative log-likelihood {stacked.span()} against the classifier, "
        f"{on_top.span()} against temperature scaling, significant in {len(on_top.clear(-1))} of "
        f"{len(on_top)} cells); and for accuracy consistency among unlabelled nodes, NMM or not "
        f"({consistency.span()} points, significant in {len(consistency.clear(1))} of "
        f"{len(consistency)}).",
    ]


def hubs(rows: Rows) -> str:
    """How far the mean gain of pairs rests on few nodes."""
    fits = [
        r for r in pick(runs(rows, "pairs"), method="backbone, stacked") if "on temperature" in r
    ]
    if not fits:
        return "No row has them yet."
    gains = [row["on temperature"] for row in fits]
    top = max(fits, key=lambda row: row["on temperature"]["two nodes"])
    share, gain = [each["share"] for each in gains], top["on temperature"]
    return wrapped(
        f"Means rest on few nodes: in {sum(each['median'] < 0 for each in gains)} of {len(fits)} "
        f"fits of StackedNMM on a classifier the median pair loses, and {100 * min(share):.0f} to "
        f"{100 * max(share):.0f} % of the pairs gain. At the extreme ({top['dataset']}, "
        f"{top['backbone']}, {top['ratio']}, split {top['seed']}) two nodes give "
        f"{gain['two nodes']:.3f} of {gain['mean']:.3f} nats, with an interval of "
        f"{gain['low']:.3f} to {gain['high']:.3f}."
    )


def few_labels(rows: Rows) -> str:
    """Accuracy over training sizes, against the backbone on the same splits."""
    known, lines, every = runs(rows, "sizes"), [], []
    ratios = [ratio for (ratio,) in parts(known, "ratio")]
    for method in ("backbone + consistency", "NMM + consistency", "NMM"):
        each = []
        for name, part in parts(known, "dataset", "backbone").items():
            gaps = [gap(pick(part, ratio=r), "accuracy", method, "backbone") for r in ratios]
            gains = [f"{100 * found.mean:+.1f}" if len(found) > 2 else "–" for found in gaps]
            each.append(f"{' / '.join(gains)} ({' '.join(name)})")
            every += [found for found in gaps if len(found) > 2]
        lines.append(f"{method.replace('backbone', 'the backbone')} {', '.join(each)}")
    return wrapped(
        f"Points of accuracy against the backbone at shares of {' / '.join(map(str, ratios))}: "
        f"{'; '.join(lines)}. Of these {len(every)} differences "
        f"{sum(found.clear() for found in every)} have p < .05 in a paired t-test over the splits."
    )
