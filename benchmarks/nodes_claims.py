# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Sentences of the documents whose numbers follow from nodes.py's results."""

from __future__ import annotations

from statistics import mean

from common import GRAPHS, grouped, p_text, wrapped
from nodes_runs import FORM, NAMES, Runs
from references import PAPER_CORA


class Gaps:
    """One method minus another in the cells of a table, by name."""

    def __init__(self, runs: Runs, field: str, ours: str, theirs: str) -> None:
        names = [f"{graph} {NAMES.get(kind, kind)}" for graph, kind, _ in runs.cells()]
        gaps = [part.gap(field, ours, theirs) for _, _, part in runs.cells()]
        self.digits, self.unit = FORM[field]
        self.cells = [pair for pair in zip(names, gaps, strict=True) if pair[1].seeds > 2]

    def count(self, sign: int) -> int:
        """Cells in which the mean has the sign."""
        return sum(sign * found.mean > 0 for _, found in self.cells)

    def clear(self, sign: int) -> list[str]:
        """Those where p < .05 besides."""
        found = [(name, g) for name, g in self.cells if g.p < 0.05 and sign * g.mean > 0]
        return [f"{name} {self.number(gap.mean)}, {p_text(gap.p)}" for name, gap in found]

    def number(self, mean: float) -> str:
        return f"{self.unit * mean:+.{self.digits}f}"

    def means(self) -> list[float]:
        return [found.mean for _, found in self.cells]

    def span(self) -> str:
        return f"{self.number(min(self.means()))} to {self.number(max(self.means()))}"


def listed(cells: list[str]) -> str:
    return f" ({'; '.join(cells)})" if cells else ""


def first_screen(accuracy: Runs, pairs: Runs, deviations: Runs) -> str:
    """What of the paper's claim for node classification reproduces, and what helps instead."""
    lines = [*plain(accuracy), *correlation(pairs), *recipe(deviations), *helps(accuracy)]
    return "\n".join(wrapped(f"- {line}", "  ") for line in lines)


def plain(runs: Runs) -> list[str]:
    hits = Gaps(runs, "test.accuracy", "NMM", "backbone")
    nll = Gaps(runs, "test.nll", "NMM", "backbone")
    tempered = Gaps(runs, "test.nll", "NMM", "backbone, temperature")
    both = Gaps(runs, "test.nll", "NMM, stacked", "backbone, stacked")
    if not all(found.cells for found in (hits, nll, tempered, both)):
        return []
    seeds = sorted({found.seeds for _, found in hits.cells})
    seeds = " to ".join(str(number) for number in dict.fromkeys((seeds[0], seeds[-1])))
    return [
        f"*Accuracy*: significantly higher than the backbone's in {len(hits.clear(1))} of "
        f"{len(hits.cells)} cells (graph and backbone, public split, {seeds} seeds), lower in "
        f"{len(hits.clear(-1))}{listed(hits.clear(-1))}; mean differences {hits.span()} points.",
        f"*Calibration*: its negative log-likelihood is worse than the backbone's in "
        f"{nll.count(1)} of {len(nll.cells)} cells, significantly in {len(nll.clear(1))}"
        f"{listed(nll.clear(1) + nll.clear(-1))}, and significantly better in "
        f"{len(nll.clear(-1))}; differences {nll.span()} nats a node. Against the backbone with "
        f"temperature scaling it is worse in {tempered.count(1)} of {len(tempered.cells)}, "
        f"significantly in {len(tempered.clear(1))}, by {tempered.span()} nats; with StackedNMM on "
        f"either, worse in {both.count(1)} (significantly {len(both.clear(1))}) and better in "
        f"{both.count(-1)} ({len(both.clear(-1))}).",
    ]


def shares(runs: Runs, stacked: bool) -> list[float]:
    """Joint tables of pairs minus the products of the same model's marginals, nats per pair."""
    return [
        row["conditional"] - row["own product"]
        for row in runs.rows
        if "conditional" in row and row["method"].endswith("stacked") == stacked
    ]


def correlation(runs: Runs) -> list[str]:
    trained, stacked = shares(runs, False), shares(runs, True)
    if not trained or not stacked:
        return []
    return [
        f"*Correlation*: it learns almost none. The joint table of two adjacent test nodes is "
        f"worth {mean(trained):.4f} nats more than the product of the model's own marginals (mean "
        f"of {len(trained)} NMMs trained on random splits); in StackedNMM {mean(stacked):.4f} "
        f"({len(stacked)} fits)."
    ]


def recipe(runs: Runs) -> list[str]:
    """The paper's recipe as a whole, and its rule of prediction."""
    changes = grouped(runs.part(dataset="cora", backbone="gcn").rows, "change")
    paper = [rows for (name,), rows in changes.items() if name.startswith("paper")]
    found = [Runs(rows).get("test.accuracy", "NMM").values() for rows in paper]
    seeds = min(map(len, found), default=0)
    if seeds < 3:
        return []
    means = [100 * mean(values) for values in found]
    one_by_one = [r["sequential"] - r["test"]["accuracy"] for r in runs.rows]
    return [
        f"*Tried besides*: the paper's own recipe ({len(found)} settings of its pool, {seeds} "
        f"seeds each, NMM-GCN on Cora) has an accuracy of {min(means):.1f} to {max(means):.1f}, "
        f"where it states {PAPER_CORA}; predicting nodes one by one, as it does, changes "
        f"{round(100 * mean(one_by_one), 2) + 0.0:+.2f} points."
    ]


def helps(runs: Runs) -> list[str]:
    on_top = Gaps(runs, "test.nll", "backbone, stacked", "backbone, temperature")
    consistency = Gaps(runs, "test.accuracy", "backbone + consistency", "backbone")
    stacked = Gaps(runs, "test.nll", "backbone, stacked", "backbone")
    if not all(found.cells for found in (on_top, consistency, stacked)):
        return []
    return [
        f"*What helps*: calibration and known labels of neighbours on top of a trained classifier, "
        f"StackedNMM (negative log-likelihood {stacked.span()} against the classifier, "
        f"{on_top.span()} against temperature scaling, significant in {len(on_top.clear(-1))} of "
        f"{len(on_top.cells)} cells); and for accuracy consistency among unlabelled nodes, NMM or "
        f"not ({consistency.span()} points, significant in {len(consistency.clear(1))} of "
        f"{len(consistency.cells)}).",
    ]


def hubs(runs: Runs) -> str:
    """How far the mean gain of pairs rests on few nodes."""
    stacked = runs.by_method.get("backbone, stacked", [])
    found = [(row["on temperature"], row) for row in stacked if "on temperature" in row]
    if not found:
        return "No row has them yet."
    gain, top = max(found, key=lambda pair: pair[0]["two nodes"])
    share = [gain["share"] for gain, _ in found]
    low = sum(gain["median"] < 0 for gain, _ in found)
    return wrapped(
        f"Means rest on few nodes: in {low} of {len(found)} fits of StackedNMM on a classifier the "
        f"median pair loses, and {100 * min(share):.0f} to {100 * max(share):.0f} % of the pairs "
        f"gain. At the extreme ({GRAPHS[top['dataset']]}, {NAMES[top['backbone']]}, "
        f"{top['ratio']}, split {top['seed']}) two nodes give {gain['two nodes']:.3f} of "
        f"{gain['mean']:.3f} nats, with an interval of {gain['low']:.3f} to {gain['high']:.3f}."
    )


def few_labels(runs: Runs) -> str:
    """Accuracy over training sizes, against the backbone on the same splits."""
    lines, ratios, every = [], runs.values("ratio"), []
    for method in ("backbone + consistency", "NMM + consistency", "NMM"):
        parts = []
        for graph, kind, part in runs.cells():
            each = [part.part(ratio=ratio) for ratio in ratios]
            gaps = [known.gap("test.accuracy", method, "backbone") for known in each]
            gains = [f"{100 * found.mean:+.1f}" if found.seeds > 2 else "–" for found in gaps]
            parts.append(f"{' / '.join(gains)} ({graph} {NAMES.get(kind, kind)})")
            every += [found.p for found in gaps if found.seeds > 2]
        lines.append(f"{method.replace('backbone', 'the backbone')} {', '.join(parts)}")
    shares = " / ".join(f"{ratio:g}" for ratio in ratios)
    return wrapped(
        f"Points of accuracy against the backbone at shares of {shares}: {'; '.join(lines)}. Of "
        f"these {len(every)} differences {sum(p < 0.05 for p in every)} have p < .05 in a paired "
        f"t-test over the splits."
    )
