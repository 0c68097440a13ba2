# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Sentences of the documents whose numbers follow from nodes.py's results."""

from __future__ import annotations

from statistics import mean
from types import SimpleNamespace

from benchmarks.nodes.runs import FORM, Rows, gap, parts, runs
from benchmarks.shared.common import grouped, pick, wrapped
from benchmarks.shared.references import PAPER_CORA
from benchmarks.shared.writing import Paired, bullets, p_text, scores

#: What consistency adds, and to what.
CONSISTENT = "backbone + consistency", "backbone"


def over_cells(rows: Rows, field: str, ours: str, theirs: str) -> SimpleNamespace:
    """
    What sentences say of one method minus another in all cells, which are graphs and backbones
    with three seeds of both. ``higher`` and ``lower`` are those where p < .05.
    """
    digits, unit = FORM[field]
    every = parts(runs(rows, "accuracy"), "dataset", "backbone").items()
    found = {" ".join(name): gap(part, field, ours, theirs) for name, part in every}
    found = {name: each for name, each in found.items() if len(each) > 2}
    texts = {name: f"{unit * each.mean:+.{digits}f}" for name, each in found.items()}
    order = sorted(found, key=lambda name: found[name].mean)
    higher, lower = (
        [f"{n} {texts[n]}, {p_text(each.p)}" for n, each in found.items() if each.clear(sign)]
        for sign in (1, -1)
    )
    return SimpleNamespace(
        number=len(found),
        seeds=sorted({len(each) for each in found.values()}),
        means=[found[name].mean for name in order],
        span=" to ".join(texts[name] for name in (*order[:1], *order[-1:])),
        higher=higher,
        lower=lower,
    )


def listed(cells: list[str]) -> str:
    return f" ({'; '.join(cells)})" if cells else ""


def reproduced_nodes(rows: Rows) -> str:
    """What of the paper's claim for node classification reproduces, and what helps instead."""
    return bullets([*plain(rows), *correlation(rows), *recipe(rows), *helps(rows)])


def plain(rows: Rows) -> list[str]:
    hits = over_cells(rows, "accuracy", "NMM", "backbone")
    nll = over_cells(rows, "nll", "NMM", "backbone")
    tempered = over_cells(rows, "nll", "NMM", "backbone, temperature")
    both = over_cells(rows, "nll", "NMM, stacked", "backbone, stacked")
    if not (hits.number and nll.number and tempered.number and both.number):
        return []
    seeds = " to ".join(str(number) for number in dict.fromkeys((hits.seeds[0], hits.seeds[-1])))
    worse, tempered_worse, both_worse = (
        sum(mean > 0 for mean in found.means) for found in (nll, tempered, both)
    )
    return [
        f"*Accuracy*: significantly higher than the backbone's in {len(hits.higher)} of "
        f"{hits.number} cells (graph and backbone, public split, {seeds} seeds), lower in "
        f"{len(hits.lower)}{listed(hits.lower)}; mean differences {hits.span} points.",
        f"*Calibration*: its negative log-likelihood is worse than the backbone's in {worse} of "
        f"{nll.number} cells, significantly in {len(nll.higher)}{listed(nll.higher + nll.lower)}, "
        f"and significantly better in {len(nll.lower)}; differences {nll.span} nats a node. "
        f"Against the backbone with temperature scaling it is worse in {tempered_worse} of "
        f"{tempered.number}, significantly in {len(tempered.higher)}, by {tempered.span} nats; "
        f"with StackedNMM on either, worse in {both_worse} (significantly {len(both.higher)}) and "
        f"better in {sum(mean < 0 for mean in both.means)} ({len(both.lower)}).",
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
    on_top = over_cells(rows, "nll", "backbone, stacked", "backbone, temperature")
    consistency = over_cells(rows, "accuracy", "backbone + consistency", "backbone")
    stacked = over_cells(rows, "nll", "backbone, stacked", "backbone")
    if not (on_top.number and consistency.number and stacked.number):
        return []
    return [
        f"*What helps*: StackedNMM on top of a trained classifier (negative log-likelihood "
        f"{stacked.span} against the classifier, {on_top.span} against temperature scaling, "
        f"significant in {len(on_top.lower)} of {on_top.number} cells); and on the public split, "
        f"for accuracy, consistency among unlabelled nodes, NMM or not ({consistency.span} "
        f"points, significant in {len(consistency.higher)} of {consistency.number}"
        f"{with_more_labels(rows)}).",
    ]


def with_more_labels(rows: Rows) -> str:
    """What consistency is worth on random splits, by the share of nodes that have labels."""
    known = [row | {"accuracy": row["test"]["accuracy"]} for row in pick(rows, task="sizes")]
    gains = [
        100 * Paired.of_rows(*(pick(part, method=name) for name in CONSISTENT), "accuracy").mean
        for part in grouped(known, "dataset", "backbone", "ratio").values()
        if all(pick(part, method=name) for name in CONSISTENT)
    ]
    return f"; on random splits {min(gains):+.1f} to {max(gains):+.1f}" if gains else ""


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
    known, lines, cells = runs(rows, "sizes"), [], {}
    ratios = [ratio for (ratio,) in parts(known, "ratio")]
    for method in ("backbone + consistency", "NMM + consistency", "NMM"):
        each, cells[method] = [], []
        for name, part in parts(known, "dataset", "backbone").items():
            gaps = [gap(pick(part, ratio=r), "accuracy", method, "backbone") for r in ratios]
            gains = [f"{100 * found.mean:+.1f}" if len(found) > 2 else "–" for found in gaps]
            each.append(f"{' / '.join(gains)} ({' '.join(name)})")
            cells[method] += [found for found in gaps if len(found) > 2]
        lines.append(f"{method.replace('backbone', 'the backbone')} {', '.join(each)}")
    plain_cells, every = cells["NMM"], [found for part in cells.values() for found in part]
    return wrapped(
        f"The paper's figure 1 has every NMM above its backbone at every size; here the plain "
        f"NMM's mean is above in {sum(found.mean > 0 for found in plain_cells)} of "
        f"{len(plain_cells)} cells (graph, backbone and share), significantly in "
        f"{sum(found.clear(1) for found in plain_cells)}, and significantly below in "
        f"{sum(found.clear(-1) for found in plain_cells)}. "
        f"Points of accuracy against the backbone at shares of {' / '.join(map(str, ratios))}: "
        f"{'; '.join(lines)}. Of these {len(every)} differences "
        f"{sum(found.clear() for found in every)} have p < .05 in a paired t-test over the splits."
    )
