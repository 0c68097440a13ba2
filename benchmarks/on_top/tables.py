# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Tables of docs/results/classifiers.md, from the rows of calibration.jsonl."""

from functools import partial
from statistics import median

from pandas import DataFrame

from benchmarks.on_top import stages
from benchmarks.on_top.data import HETEROPHILOUS
from benchmarks.on_top.run import (
    ELSEWHERE,
    FITTED,
    METHODS,
    OURS,
    POOL,
    SCORES,
    SHOWN,
    UPDATED,
)
from benchmarks.shared import tables as shown
from benchmarks.shared.records import Files, pick
from benchmarks.shared.tables import Cell, Paired, against, average, bracketed, count, only, table

CELL, RUN = ["graph", "backbone"], ["split", "fold"]
SCORED = {"NLL": "nll", "Brier": "brier", "ECE": "ece"}
STAGED = "StackedNMM by stages"
JOINT = "log p(test \\| train)"
OWN = {OURS, FITTED, POOL, SCORES, ELSEWHERE}
#: Columns that exist without rows, too.
FIELDS = ("dataset", "backbone", "method", "pairs", "own product", "joint", "nll", "brier", "share")
FIELDS += ("size", "communities")
FIELDS += ("joint.CRPS", "fitted.CRPS", "own product.CRPS", "temperature.CRPS")


def rows_of(files: Files, task: str) -> DataFrame:
    """Rows of a task, with graphs, backbones and methods in the order of lines."""
    rows = shown.frame(files["calibration"], task=task)
    rows = rows.reindex(columns=list(dict.fromkeys([*rows, *FIELDS])))
    rows["graph"] = shown.ordered(rows["dataset"], shown.GRAPHS)
    rows["backbone"] = shown.ordered(rows["backbone"], {"gcn": "GCN", "gat": "GAT", "mlp": "MLP"})
    return rows.assign(method=shown.ordered(rows["method"], METHODS.keys()))


def percent(field: str) -> Cell:
    return lambda part, peers: average(field, ".1f", 100)(part, peers) + " %"


def gap(rows: DataFrame, ours: str, theirs: str | None, field: str) -> Paired:
    """One method minus another, run by run; without ``theirs`` minus the best rival."""
    theirs = theirs or from_rivals(rows, field, ours)[0][0]
    return shown.gap(rows, ours, theirs, field, RUN)


def minus(ours: str, theirs: str | None, field: str) -> Cell:
    """Cell: one method minus another or the best rival, with a paired t-test."""
    return lambda part, peers: gap(part, ours, theirs, field).brief(4)


def mark(change: Paired, number: int) -> str:
    """† better and ‡ worse, with Bonferroni's correction for the number of rivals."""
    return "" if change.p * number >= 0.05 else " †" if change.mean < 0 else " ‡"


def ours_minus(part: DataFrame, peers: DataFrame, field: str) -> str:
    """Cell: StackedNMM minus the method of the line."""
    method, number = part["method"].iloc[0], len({*peers["method"]} - OWN)
    change = gap(peers, OURS, method, field)
    return "" if method == OURS else change.spread(3) + mark(change, number)


def from_rivals(rows: DataFrame, field: str, ours: str = OURS) -> list[tuple[str, Paired]]:
    """One of our methods minus every rival, the rival with the best mean first."""
    found = {name: gap(rows, ours, name, field) for name in {*rows["method"]} - OWN}
    return sorted(found.items(), key=lambda item: -item[1].mean)


def of_splits(files: Files, heterophilous: bool = False) -> DataFrame:
    rows = rows_of(files, "splits").assign(PLL=lambda r: r["pairs"].fillna(r["own product"]))
    return rows[rows["dataset"].isin(HETEROPHILOUS) == heterophilous]


def calibration(files: Files) -> str:
    return all_methods(of_splits(files))


def heterophilous_methods(files: Files) -> str:
    return all_methods(of_splits(files, heterophilous=True))


def all_methods(rows: DataFrame) -> str:
    cells: dict = {"runs": count, "accuracy": average("accuracy", ".1f", 100)}
    for name in ("NLL", "Brier"):
        cells[name] = shown.centre(SCORED[name], 3)
        cells[name, "ours minus"] = partial(ours_minus, field=SCORED[name])
    cells |= {"ECE": average("ece", ".3f"), "PLL": average("PLL", ".3f")}
    cells |= {JOINT: average("joint", ".3f"), "s": average("fit seconds", ".1f", of=median)}
    return table(rows, [*CELL, "method"], cells)


def calibration_in_short(files: Files) -> str:
    return in_short(of_splits(files))


def heterophilous_methods_in_short(files: Files) -> str:
    return in_short(of_splits(files, heterophilous=True))


def in_short(rows: DataFrame) -> str:
    """Means of cells, and StackedNMM's paired differences from a method on the method's cells."""

    def mean_of(field: str, form: str, unit: float = 1) -> Cell:
        return lambda part, peers: format(
            unit * part.groupby(CELL, observed=True)[field].mean().mean(), form
        )

    def gaps(part: DataFrame, peers: DataFrame, field: str) -> list[Paired]:
        ours, base = peers[peers["method"] == OURS], {"method": part["method"].iloc[0]}
        return shown.differences(ours, peers, CELL, base, field, RUN)

    def difference(field: str) -> Cell:
        def cell(part: DataFrame, peers: DataFrame) -> str:
            return shown.range_of([gap.mean for gap in gaps(part, peers, field)], "+.3f")

        return cell

    def lower(field: str) -> Cell:
        def cell(part: DataFrame, peers: DataFrame) -> str:
            found = gaps(part, peers, field)
            return f"{sum(gap.mean < 0 for gap in found)} of {len(found)}" if found else ""

        return cell

    cells: dict = {"cells": shown.number_of(*CELL), "accuracy": mean_of("accuracy", ".1f", 100)}
    for name, field in SCORED.items():
        cells[name] = mean_of(field, ".3f")
        if name == "NLL":
            cells["StackedNMM's NLL minus it"] = difference(field)
        cells[name, "lower in"] = lower(field)
    return table(rows, ["method"], cells | {"PLL": mean_of("PLL", ".3f")})


def missed_cells(files: Files) -> str:
    rows, lines = rows_of(files, "splits"), []
    for (graph, backbone), part in shown.groups(rows, CELL):
        line, missed = {"graph": graph, "backbone": backbone}, []
        line["runs"] = f"{(part['method'] == OURS).sum()}"
        for name, digits in (("NLL", 4), ("Brier", 4), ("ECE", 3)):
            found = from_rivals(part, SCORED[name])
            rival, change = found[0]
            sure = " †" * all(mark(each, len(found)) == " †" for _, each in found)
            line[f"{name} minus the best rival's"] = f"{change.mean:+.{digits}f} ({rival}){sure}"
            missed += [name] * (change.mean >= 0)
        names = (OWN | {"temperature"}) & {*part["method"]} - {OURS}
        own = sorted((-gap(part, OURS, name, "nll").mean, name) for name in names)
        line["NLL minus the best own variant's"] = f"{-own[0][0]:+.4f} ({own[0][1]})" if own else ""
        lines.append(line | {"missed": ", ".join(missed) or "none"})
    return shown.markdown(lines, 2)


def without_a_graph_network(files: Files) -> str:
    rows = of_splits(files)
    kinds = ["MLP, temperature", "MLP, C&S", f"MLP, {OURS}", "GCN, temperature", f"GCN, {OURS}"]
    rows["kind"] = rows["backbone"].astype(str) + ", " + rows["method"].astype(str)
    rows = rows[rows["kind"].isin(kinds)].assign(kind=lambda r: shown.ordered(r["kind"], kinds))
    both = bracketed(average("accuracy", ".1f", 100), average("nll", ".3f"))
    return table(rows, ["graph"], {"{}": both}, across="kind")


def edge_scores(files: Files) -> str:
    cells = {"runs": count, "accuracy": average("all.accuracy", ".1f", 100)}
    cells |= {name: average(f"all.{field}", ".3f") for name, field in SCORED.items()}
    for which in ("agreeing", "disagreeing"):
        cells[f"ECE, {which}"] = average(f"{which}.ece", ".3f")
    return table(rows_of(files, "edges"), [*CELL, "method"], cells)


def contributions(files: Files) -> str:
    rows = rows_of(files, "splits").assign(beyond=lambda r: r["joint"] + r["nll"])
    cells = {
        "NLL minus the pool's": minus(OURS, POOL, "nll"),
        "joint plus NLL": only(OURS, average("beyond", ".3f")),
        "scores alone: NLL minus temperature's": minus(SCORES, "temperature", "nll"),
        "scores alone: joint plus NLL": only(SCORES, average("beyond", ".3f")),
        "the other graph's priors: NLL minus the best rival's": minus(ELSEWHERE, None, "nll"),
        "ECE minus temperature's": minus(OURS, "temperature", "ece"),
    }
    return table(rows, CELL, cells)


def new_labels(files: Files) -> str:
    rows = rows_of(files, "labels")
    rows["known"] = [f"{100 * share:.0f} %" for share in rows["share"]]
    scores = bracketed(average("nll", ".3f"), average("ece", ".3f"))
    cells = {name: only(name, scores) for name in rows["method"].unique()}
    for rival in ("C&S", "vector scaling, shrunk"):
        cells[f"NLL, updated minus {rival}"] = minus(UPDATED, rival, "nll")
        cells[f"Brier, updated minus {rival}"] = minus(UPDATED, rival, "brier")
    conditioned = "StackedNMM, conditioned"
    cells["NLL, updated minus conditioned"] = minus(UPDATED, conditioned, "nll")
    cells["Brier, updated minus conditioned"] = minus(UPDATED, conditioned, "brier")
    cells["update, s"] = only(UPDATED, average("seconds", ".1f", of=median))
    return table(rows, [*CELL, "known"], cells | {"splits": only(UPDATED, count)})


def counts_in_sets(files: Files) -> str:
    cells: dict = {"splits": count}
    for model in ("joint", "fitted", "own product", "temperature"):
        cells[model, f"{model}: coverage"] = percent(f"{model}.coverage")
        cells[model, "width"] = average(f"{model}.width", ".2f")
        cells[model, "CRPS"] = average(f"{model}.CRPS", ".4f")
    rows = rows_of(files, "counts")
    rows["nodes"] = shown.ordered(
        rows["size"].map("{:.0f}".format), {"10": "10", "30": "30", "100": "100", "nan": "all"}
    )
    for model in ("fitted", "own product", "temperature"):
        rows[model] = rows["joint.CRPS"] / rows[f"{model}.CRPS"] - 1
        cells[f"CRPS, joint against {model}, %"] = shown.spread(model, 1, 100)
    return table(rows, [*CELL, "nodes"], cells)


def twenty_questions(files: Files) -> str:
    rows, cells = rows_of(files, "questions"), {}
    rows["asked by"] = rows["method"]
    for number in SHOWN:
        nll, accuracy = f"curve.{number}.nll", percent(f"curve.{number}.accuracy")
        cells[f"{number} answers"] = bracketed(average(nll, ".3f"), accuracy)
    for base in ("entropy", "at random"):
        cells[f"{number} answers, NLL minus {base}"] = against(base, nll, 4, by=["split"])
    cells |= {"correlation with entropy": average("alike", ".4f"), "draws": count}
    return table(rows, ["asked by"], cells)


def of_all_labels(files: Files) -> DataFrame:
    """Also SPN's rows of the held-out folds that other methods have."""
    spn = pick(files.get("nodes_rivals", []), task="published", method="SPN", fold=0)
    more = [row | {"task": "revealed", "method": "SPN as a chain"} for row in spn]
    rows = rows_of({"calibration": files["calibration"] + more}, "revealed")
    names = ["SPN as a chain", *stages.METHODS]
    return rows.assign(nll=-rows["joint"], method=shown.ordered(rows["method"], names))


def all_test_labels(files: Files) -> str:
    """The best rival is the one with the lowest mean."""
    rows = of_all_labels(files)
    cells = {"runs": only(STAGED, count)}
    for name in rows["method"].sort_values().unique():
        cells[name] = only(name, average("nll", ".3f"))

    def best(part: DataFrame, peers: DataFrame) -> str:
        names = {name for name in part["method"] if not name.startswith(OURS)}
        gaps = {name: shown.gap(part, STAGED, name, "nll", RUN) for name in names}
        name = max(gaps, key=lambda rival: gaps[rival].mean)
        return f"{gaps[name].brief(3)} {name}"

    cells |= {"by stages minus the best rival": best}
    cells |= {"by stages minus StackedNMM": minus(STAGED, OURS, "nll")}
    return table(rows, CELL, cells)


TABLES = (calibration, missed_cells, contributions, new_labels, counts_in_sets)
TABLES += (without_a_graph_network, heterophilous_methods, edge_scores)
TABLES += (calibration_in_short, heterophilous_methods_in_short)
TABLES += (twenty_questions, all_test_labels)
