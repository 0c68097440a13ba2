# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Tables of docs/results/classifiers.md, from the rows of tabular.jsonl."""

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from pandas import DataFrame

from benchmarks.shared import tables as shown
from benchmarks.shared.records import Files
from benchmarks.shared.tables import Cell, Paired, against, average, count, gap, only, table
from benchmarks.tabular.run import KINDS, METHODS, OURS, SCIKIT, TEMPERATURE

CELL = ["table", "seed", "classifier"]


def rows_of(files: Files, task: str) -> DataFrame:
    rows = shown.frame(files["tabular"], task=task)
    return rows.assign(method=shown.ordered(rows["method"], METHODS.keys()))


def minus(theirs: str) -> Cell:
    """Cell: NLL of the NMM minus another method's, over all classifiers and seeds."""
    return lambda part, peers: gap(part, OURS, theirs, "nll", CELL).spread(3)


def below(part: DataFrame, peers: DataFrame) -> str:
    """Cell: share of the cells in which the NMM's NLL is below the line's method."""
    gaps = gap(peers, OURS, str(part["method"].iloc[0]), "nll", CELL).gaps
    return f"{sum(each < 0 for each in gaps) / len(gaps):.2f}" if any(gaps) else ""


SCORES = {"NLL": average("nll", ".3f"), "accuracy": average("accuracy", ".3f")}
SCORES |= {"ECE": average("ece", ".3f")}


def methods_on_tables(files: Files) -> str:
    rows = rows_of(files, "tables").assign(data="KEEL")
    cells = {"cells": count} | SCORES | {"NMM below it, share of cells": below}
    seconds = {"s": average("seconds", ".1f")}
    return table(rows, ["data", "method"], cells | seconds)


def classifiers_on_tables(files: Files) -> str:
    rows = rows_of(files, "tables")
    rows = rows[rows["method"].isin([SCIKIT, TEMPERATURE, OURS])]
    rows = rows.assign(classifier=shown.ordered(rows["classifier"], list(KINDS)))
    return table(rows, ["classifier", "method"], {"cells": count} | SCORES)


def each_table(files: Files) -> str:
    rows = rows_of(files, "tables")
    cells: dict[str, Cell] = {"agreement": only(OURS, average("agreement", ".2f"))}
    for name in ("classifier", SCIKIT, TEMPERATURE, OURS):
        cells[name] = only(name, average("nll", ".3f"))
    cells |= {f"NMM minus {name}": minus(name) for name in (SCIKIT, TEMPERATURE)}
    return table(rows, ["table"], cells)


def methods_on_images(files: Files) -> str:
    rows = rows_of(files, "images")
    return table(rows, ["number", "method"], {"seeds": count} | SCORES)


def rows_after_the_fit(files: Files) -> str:
    rows = shown.frame(files["tabular"], task="new_rows").assign(method=lambda r: r["rows"])
    rows = rows.assign(classifier=shown.ordered(rows["classifier"], list(KINDS)))
    change = against("fitted", "nll", 3, by=CELL, form=Paired.spread)
    return table(rows, ["classifier", "rows"], {"cells": count} | SCORES | {"NLL, lost": change})


def cost_by_rows(files: Files) -> str:
    rows = shown.frame(files["tabular"], task="size").rename(columns={"number": "rows"})
    names = "neighbours", "classifier", "fit", "1 new", "10000 new"
    cells = {f"{name}, s": average(f"seconds.{name}", ".2f") for name in names}
    cells = {"accuracy": average("accuracy", ".3f")} | cells | {"MiB": average("MiB", ".0f")}
    return table(rows, ["neighbors", "rows"], cells)


def agreement_figure(files: Files) -> Figure:
    rows, figure = rows_of(files, "tables"), plt.figure(figsize=(7, 4), layout="constrained")
    axis = figure.subplots()
    points = [(-gap(part, OURS, TEMPERATURE, "nll", CELL).mean, part["agreement"].mean(), str(name))
              for name, part in rows.groupby("table")]  # fmt: skip
    for place, (gain, agree, name) in enumerate(sorted(points)):
        axis.plot(agree, gain, "o", ms=5, color="#0072B2")
        if gain > 0.11:  # in turn above and below, because some points nearly coincide
            side = ("bottom", "top")[place % 2]
            axis.annotate(f"{name} ", (agree, gain), ha="right", va=side, fontsize=8)
    axis.axhline(0, color="0.7", lw=1, zorder=0)
    axis.set(xlabel="agreement of neighbours: 0 chance, 1 always",
             ylabel="gain in NLL over temperature scaling, nats")  # fmt: skip
    return figure


TABLES = (methods_on_tables, classifiers_on_tables, each_table, methods_on_images)
TABLES += (rows_after_the_fit, cost_by_rows)
FIGURES = {"agreement.png": agreement_figure}
