# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Sentences of the README whose numbers follow from node_classification.py's results."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from statistics import mean
from typing import NamedTuple

from runs import GRAPHS, NAMES, Runs, difference, p_value


class Gap(NamedTuple):
    """One method minus another in one cell of a table."""

    name: str
    mean: float
    p: float
    seeds: int


def cells(runs: Runs) -> Iterator[tuple[str, dict]]:
    """Every graph with every backbone of it that is stored."""
    for dataset in runs.values("dataset", GRAPHS):
        for kind in runs.values("backbone", NAMES, dataset=dataset):
            name = f"{GRAPHS.get(dataset, dataset)} {NAMES.get(kind, kind)}"
            yield name, {"dataset": dataset, "backbone": kind}


def gaps(runs: Runs, field: str, ours: str, theirs: str) -> list[Gap]:
    found = []
    for name, key in cells(runs):
        a, b = (runs.get(field, method, **key) for method in (ours, theirs))
        gap, _, p, number = difference(a, b)
        if number > 2:
            found.append(Gap(name, gap, p, number))
    return found


def count(found: list[Gap], sign: int) -> tuple[int, int]:
    """Cells in which the mean has the sign, and those where p < .05 besides."""
    right = [gap.p for gap in found if sign * gap.mean > 0]
    return len(right), sum(p < 0.05 for p in right)


def span(found: list[Gap], unit: float = 1, digits: int = 3) -> str:
    low, high = min(gap.mean for gap in found), max(gap.mean for gap in found)
    return f"{unit * low:+.{digits}f} to {unit * high:+.{digits}f}"


def first_screen(accuracy: Runs, pairs: Runs, deviations: Runs) -> str:
    """What of the paper's claim for node classification reproduces, and what helps instead."""
    lines = [*plain(accuracy), *correlation(pairs), *recipe(deviations), *helps(accuracy)]
    return "\n".join(wrapped(f"- {line}", "  ") for line in lines)


def wrapped(text: str, indent: str = "") -> str:
    return textwrap.fill(text, 99, subsequent_indent=indent, break_on_hyphens=False,
                         break_long_words=False)  # fmt: skip


def plain(runs: Runs) -> list[str]:
    hits = gaps(runs, "test.accuracy", "NMM", "backbone")
    nll = gaps(runs, "test.nll", "NMM", "backbone")
    tempered = gaps(runs, "test.nll", "NMM", "backbone, temperature")
    both = gaps(runs, "test.nll", "NMM, stacked", "backbone, stacked")
    if not all((hits, nll, tempered, both)):
        return []
    clear = [f"{g.name} {g.mean:+.3f}, {p_value(g.p)}" for g in nll if g.p < 0.05]
    lost = [f"{g.name} {100 * g.mean:+.1f}, {p_value(g.p)}" for g in hits
            if g.p < 0.05 and g.mean < 0]  # fmt: skip
    seeds = " to ".join(str(n) for n in sorted({min(g.seeds for g in hits),
                                                max(g.seeds for g in hits)}))  # fmt: skip
    number = len(nll)
    return [
        f"*Accuracy*: significantly higher than the backbone's in {count(hits, 1)[1]} of "
        f"{len(hits)} cells (graph and backbone, public split, {seeds} seeds), lower in "
        f"{count(hits, -1)[1]}{' (' + '; '.join(lost) + ')' if lost else ''}; mean "
        f"differences {span(hits, 100, 1)} points.",
        f"*Calibration*: its negative log-likelihood is worse than the backbone's in "
        f"{count(nll, 1)[0]} of {number} cells, significantly in {count(nll, 1)[1]}"
        f"{' (' + '; '.join(clear) + ')' if clear else ''}, and significantly better in "
        f"{count(nll, -1)[1]}; differences {span(nll)} nats a node. Against "
        f"the backbone with temperature scaling it is worse in {count(tempered, 1)[0]} of "
        f"{len(tempered)}, significantly in {count(tempered, 1)[1]}, by {span(tempered)} nats; "
        f"with StackedNMM on either, worse in {count(both, 1)[0]} (significantly "
        f"{count(both, 1)[1]}) and better in {count(both, -1)[0]} ({count(both, -1)[1]}).",
    ]  # fmt: skip


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
    key = {"dataset": "cora", "backbone": "gcn"}
    names = [n for n in dict.fromkeys(row["change"] for row in runs.rows) if n.startswith("paper")]
    found = [runs.get("test.accuracy", "NMM", change=name, **key) for name in names]
    seeds = min((len(values) for values in found), default=0)
    if seeds < 3:
        return []
    means = [100 * mean(values.values()) for values in found]
    one_by_one = [r["sequential"] - r["test"]["accuracy"] for r in runs.rows]
    return [
        f"*Tried besides*: the paper's own recipe ({len(names)} settings of its pool, {seeds} "
        f"seeds each, NMM-GCN on Cora) has an accuracy of {min(means):.1f} to {max(means):.1f}, "
        f"where it states 84.3; predicting nodes one by one, as it does, changes "
        f"{round(100 * mean(one_by_one), 2) + 0.0:+.2f} points."
    ]


def helps(runs: Runs) -> list[str]:
    on_top = gaps(runs, "test.nll", "backbone, stacked", "backbone, temperature")
    agreement = gaps(runs, "test.accuracy", "backbone + agreement", "backbone")
    stacked = gaps(runs, "test.nll", "backbone, stacked", "backbone")
    if not all((on_top, agreement, stacked)):
        return []
    return [
        f"*What helps*: calibration and known labels of neighbours on top of a trained classifier, "
        f"StackedNMM (negative log-likelihood {span(stacked)} against the classifier, "
        f"{span(on_top)} against temperature scaling, significant in {count(on_top, -1)[1]} of "
        f"{len(on_top)} cells); and for accuracy agreement among unlabelled nodes, NMM or not "
        f"({span(agreement, 100, 1)} points, significant in {count(agreement, 1)[1]} of "
        f"{len(agreement)}).",
    ]  # fmt: skip


def hubs(runs: Runs, method: str = "backbone, stacked") -> str:
    """How far the mean gain of pairs rests on few nodes."""
    field, found = "on temperature", []
    for row in runs.rows:
        if row["method"] == method and field in row:
            found.append(row | {"gain": row[field]})
    if not found:
        return "No row has them yet."
    top = max(found, key=lambda row: row["gain"]["two nodes"])
    gain = top["gain"]
    share = [row["gain"]["share"] for row in found]
    low = sum(row["gain"]["median"] < 0 for row in found)
    return wrapped(
        f"Means rest on few nodes: in {low} of {len(found)} fits of StackedNMM on a classifier the "
        f"median pair loses, and {100 * min(share):.0f} to {100 * max(share):.0f} % of the pairs "
        f"gain. At the extreme ({GRAPHS[top['dataset']]}, {NAMES[top['backbone']]}, "
        f"{top['ratio']}, split {top['seed']}) two nodes give {gain['two nodes']:.3f} of "
        f"{gain['mean']:.3f} nats, with an interval of {gain['low']:.3f} to {gain['high']:.3f}."
    )


def few_labels(runs: Runs) -> str:
    """Accuracy over training sizes, against the backbone on the same splits."""
    lines, ratios, clear, number = [], runs.values("ratio", (0.1, 0.2, 0.3, 0.4, 0.5)), 0, 0
    for method in ("backbone + agreement", "NMM + agreement", "NMM"):
        parts = []
        for name, key in cells(runs):
            gains = []
            for ratio in ratios:
                gap, _, p, seeds = difference(
                    runs.get("test.accuracy", method, ratio=ratio, **key),
                    runs.get("test.accuracy", "backbone", ratio=ratio, **key),
                )
                gains.append(f"{100 * gap:+.1f}" if seeds > 2 else "–")
                number, clear = number + (seeds > 2), clear + (p < 0.05)
            parts.append(f"{' / '.join(gains)} ({name})")
        lines.append(f"{method.replace('backbone', 'the backbone')} {', '.join(parts)}")
    shares = " / ".join(f"{ratio:g}" for ratio in ratios)
    return wrapped(
        f"Points of accuracy against the backbone at shares of {shares}: {'; '.join(lines)}. Of "
        f"these {number} differences {clear} have p < .05 in a paired t-test over the splits."
    )
