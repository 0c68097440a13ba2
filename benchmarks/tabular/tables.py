# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Tables of docs/results/tabular.md, from the rows of tabular.jsonl."""

from pandas import DataFrame

from benchmarks.shared import tables as shown
from benchmarks.shared.records import Files
from benchmarks.shared.tables import Cell, Paired, average, count, ordered, table
from benchmarks.tabular.data import KINDS
from benchmarks.tabular.run import METHODS, OURS, SCIKIT, TEMPERATURE

CELL = ["table", "seed", "classifier"]


def rows_of(files: Files, task: str) -> DataFrame:
    rows = shown.frame(files["tabular"], task=task)
    return rows.assign(method=ordered(rows["method"], METHODS.keys()))


def gap(rows: DataFrame, theirs: str, by: list[str]) -> Paired:
    """NLL of the NMM minus another method's, cell by cell."""
    pair = (rows[rows["method"] == name] for name in (OURS, theirs))
    return Paired.rows(*pair, "nll", by)


def minus(theirs: str) -> Cell:
    """Cell: NLL of the NMM minus another method's, over all classifiers and seeds."""
    return lambda part, peers: gap(part, theirs, CELL).spread(3)


def below(part: DataFrame, peers: DataFrame) -> str:
    """Cell: share of the cells in which the NMM's NLL is below the line's method."""
    gaps = gap(peers, str(part["method"].iloc[0]), CELL).gaps
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
    rows = rows.assign(classifier=ordered(rows["classifier"], list(KINDS)))
    return table(rows, ["classifier", "method"], {"cells": count} | SCORES)


def each_table(files: Files) -> str:
    rows = rows_of(files, "tables")

    def score(method: str) -> Cell:
        return lambda part, peers: average("nll", ".3f")(part[part["method"] == method], peers)

    cells = {"agreement": average("agreement", ".2f"), "classifier": score("classifier")}
    cells |= {name: score(name) for name in (SCIKIT, TEMPERATURE, OURS)}
    cells |= {f"NMM minus {name}": minus(name) for name in (SCIKIT, TEMPERATURE)}
    return table(rows, ["table"], cells)


def methods_on_images(files: Files) -> str:
    rows = rows_of(files, "images")
    return table(rows, ["number", "method"], {"seeds": count} | SCORES)


TABLES = methods_on_tables, classifiers_on_tables, each_table, methods_on_images
