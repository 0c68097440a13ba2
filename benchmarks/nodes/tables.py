# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Tables and figures of docs/results/classifiers.md."""

from itertools import product

import pandas as pd
from pandas import DataFrame

from benchmarks.nodes.run import METHODS
from benchmarks.shared import tables as shared
from benchmarks.shared.records import Files
from benchmarks.shared.tables import Cell, Paired, against, average, count, frame, ordered, spread

NAMES = {"(.*), temperature": r"\1 + temperature", "(.*), stacked": r"StackedNMM on \1"}
NAMES |= {"(.*), bound": r"\1 by the bound", "(.*), chains": r"\1 by chains"}
FORMS = "{}", "{} + temperature", "StackedNMM on {}"
MODELS = [form.format(name) for name, form in product(METHODS, FORMS)]
TEMPERED, SPN, JOINT = "backbone + temperature", {"model": "SPN"}, "log p(test \\| train)"
RIVALS = ["SPN", "temperature", "GMNN", "Potts on C&S", "StackedNMM, scores alone", "StackedNMM"]
RIVALS += [TEMPERED, "NMM", "StackedNMM on NMM", "StackedNMM on backbone"]
LINES = ["graph", "backbone", "model"]
CELL, BACKBONE = LINES[:2], {"model": "backbone"}


def named(rows: DataFrame) -> DataFrame:
    """Rows with the names of tables, and with PLL: the log-likelihood of a pair of nodes."""
    fields = "method", "attention", "ratio", "pairs", "conditional", "own product"
    rows = rows.reindex(columns=list(dict.fromkeys([*rows, *fields])))
    rows["graph"] = ordered(rows["dataset"], shared.GRAPHS)
    rows["backbone"] = ordered(rows["backbone"].str.upper(), ("GCN", "GAT", "APPNP", "MLP"))
    rows["model"] = ordered(rows["method"].replace(NAMES, regex=True), MODELS)
    rows["splits"] = ["published" if r != r else f"random, {r}" for r in rows["ratio"]]
    rows["ratio"] = ordered(rows["ratio"], None)
    rows["PLL"] = rows["pairs"].fillna(rows["conditional"]).fillna(rows["own product"])
    return rows


def runs(files: Files, task: str) -> DataFrame:
    return named(frame(files["nodes"], task=task))


def joined(*cells: Cell, by: str = " / ") -> Cell:
    """Cell: the texts of several cells."""
    return lambda part, peers: by.join(cell(part, peers) for cell in cells)


def marked(base: str, field: str, digits: int, unit: float = 1, better: int = 1) -> Cell:
    """Cell: mean ± sd, and a mark if the paired difference from a model is clear."""
    mark = against({"model": base}, field, digits, form=lambda *_: "", better=better)
    return joined(spread(field, digits, unit), mark, by="")


def within(ours: str, theirs: str, digits: int, unit: float = 1) -> Cell:
    """Cell: the paired difference of two columns."""
    return lambda part, peers: Paired.of(
        shared.scores(part, ours), shared.scores(part, theirs)
    ).text(digits, unit)


def compared(base: dict[str, str], name: str, digits: int, own=spread, **options) -> dict:
    """Cells of three scores, each with the paired difference from a base."""
    cells: dict[str | tuple, Cell] = {}
    for field, head, better in (("nll", "NLL", -1), ("joint", JOINT, 1), ("PLL", "PLL", 1)):
        cells[head] = own(field, 3)
        cells[head, name] = against(base, field, digits, better=better, **options)
    return cells


def accuracy(files: Files) -> str:
    quality = marked(TEMPERED, "nll", 3, better=-1), average("ece", ".3f"), average("joint", ".3f")
    cells = {"{}: accuracy, %": marked("backbone", "accuracy", 1, 100)}
    cells |= {f"{{}}: NLL / ECE / {JOINT}": joined(*quality)}
    return shared.table(runs(files, "accuracy"), LINES[1:], cells, across="graph")


def against_backbone_in_short(files: Files) -> str:
    rows, cells = runs(files, "accuracy"), {"cells": shared.number_of(*CELL)}
    cells["accuracy minus backbone, points"] = shared.over(CELL, BACKBONE, "accuracy", "+.1f", 100)
    cells["higher, lower"] = shared.clear(CELL, BACKBONE, "accuracy")
    cells |= {"NLL minus temperature": shared.over(CELL, {"model": TEMPERED}, "nll", "+.3f")}
    cells["better, worse"] = shared.clear(CELL, {"model": TEMPERED}, "nll", better=-1)
    return shared.table(rows, ["model"], cells)


def deviations(files: Files) -> str:
    rows, ours = runs(files, "deviations"), {"change": "ours"}
    rows["change"] = ordered(rows["change"], {"none": "ours"})
    cells = {"seeds": count, "accuracy, %": spread("accuracy", 1, 100)}
    cells |= {"minus ours, points": against(ours, "accuracy", 1, 100), "NLL": spread("nll", 3)}
    cells |= {"minus ours": against(ours, "nll", 3)}
    cells |= {"predicted in turn, points": within("sequential", "accuracy", 1, 100)}
    return shared.table(rows, ["graph", "backbone", "change"], cells)


def pairs(files: Files) -> str:
    number = "number of splits"

    def cell(part: DataFrame, peers: DataFrame) -> str:
        """Of the splits that all models with three or more share; or of all splits, and a remark"""
        splits = [set(rows["seed"]) for _, rows in peers.groupby("model", observed=True)]
        every = set.intersection(*[known for known in splits if len(known) > 2] or [set()])
        remark = f" ({len(part)} split{'s' * (len(part) > 1)})"
        if every and every <= set(part["seed"]):
            part, remark = part[part["seed"].isin(every)], ""
        if (part["model"] == number).all():
            return f"{part['seed'].nunique()}"
        own, prior = average("own product", ".3f"), average("prior", ".3f")(part, peers)
        tables = f" ({own(part, peers)}, {prior})" if prior else ""
        return spread("PLL", 3)(part, peers) + tables + remark

    rows = runs(files, "pairs").sort_values(["graph", "ratio"], kind="stable")
    rows["split"] = ordered(rows["graph"].astype(str) + " " + rows["ratio"].astype(str))
    every = pd.concat([rows.assign(model=number), rows])
    every["model"] = ordered(every["model"], [number, *MODELS])
    return shared.table(every, LINES[1:], {"{}": cell}, across="split")


def gains(files: Files) -> str:
    rows = runs(files, "pairs")
    rows["share"] = rows["conditional"] - rows["own product"]
    cells = {"{}": against({"model": TEMPERED}, "PLL", 3, form=Paired.spread, better=1)}
    cells |= {"{}: correlation": average("share", "+.3f"), "{}: splits": count}
    return shared.table(rows, LINES, cells, across="ratio")


def gains_in_short(files: Files) -> str:
    def correlation(part: DataFrame, peers: DataFrame) -> str:
        shares = part.groupby(names, observed=True)["share"].mean().dropna()
        return shared.range_of(shares, "+.3f")

    rows, names = runs(files, "pairs"), ["graph", "ratio"]
    rows["share"] = rows["conditional"] - rows["own product"]
    cells = {"cells": shared.number_of(*names), "splits": count}
    cells |= {"PLL minus temperature": shared.over(names, {"model": TEMPERED}, "PLL", "+.3f")}
    cells |= {"better, worse": shared.clear(names, {"model": TEMPERED}, "PLL")}
    return shared.table(rows, LINES[1:], cells | {"correlation": correlation})


def end_to_end_in_short(files: Files) -> str:
    rows, cells = runs(files, "end_to_end"), {"cells": shared.number_of("graph", "splits")}
    rows["attention"] = rows["attention"].str.upper()
    for base in ("backbone", "NMM by the bound"):
        where = ["graph", "splits"], {"model": base}
        cells[f"points minus {base}"] = shared.over(*where, "accuracy", "+.1f", 100)
        cells[f"NLL minus {base}"] = shared.over(*where, "nll", "+.3f")
    return shared.table(rows, ["backbone", "attention", "gamma", "model"], cells)


def sizes_in_short(files: Files) -> str:
    change = shared.over(CELL, BACKBONE, "accuracy", "+.1f", 100)
    return shared.table(runs(files, "sizes"), ["model"], {"{}": change}, across="ratio")


def of_spn(files: Files) -> DataFrame:
    """Rows of SPN, and rows of other methods on its splits."""
    protocol, ours = frame(files["calibration"], task="splits"), frame(files["nodes"], task="pairs")
    rows = named(pd.concat([frame(files["nodes_rivals"]), protocol, ours]))
    rows["model"] = ordered(rows["model"].astype(str), RIVALS)
    places = rows[["dataset", "backbone", "splits", "seed", "split", "fold"]].astype(object)
    rows["run"] = places.fillna("").astype(str).agg(" ".join, axis=1)
    known = rows["run"].isin(rows["run"][rows["model"] == "SPN"])
    return rows[known & rows["model"].isin(RIVALS)]


def spn(files: Files) -> str:
    cells = {"runs": count, "accuracy, %": average("accuracy", ".1f", 100)}
    cells |= {"max-product, %": average("max-product", ".1f", 100)}
    cells |= compared(SPN, "minus SPN", 3, own=shared.centre, by=("run",))
    cells |= {"ECE": average("ece", ".3f"), "edges taught": average("taught edges", ".0f")}
    cells |= {"epochs of refinement": average("settings.refined", ".0f")}
    return shared.table(of_spn(files), ["splits", *LINES], cells)


def spn_in_short(files: Files) -> str:
    rows, where = of_spn(files), (["splits", *CELL], SPN)
    cells = {"cells": shared.number_of(*where[0]), "runs": count}
    for field, name, better in (("nll", "NLL", -1), ("joint", JOINT, 1), ("PLL", "PLL", 1)):
        cells[f"{name} minus SPN's"] = shared.over(*where, field, "+.3f", by=("run",))
        cells[name, "better, worse"] = shared.clear(*where, field, better, by=("run",))
    return shared.table(rows, ["model"], cells)


def of_graphs(files: Files) -> DataFrame:
    """Rows of heterophilous graphs, with the kind of edges."""
    rows = named(frame(files["repelling"], task="graphs"))
    kind, edges = (rows["method"].str.split(", ").str[part] for part in (0, 1))
    rows["model"] = ordered(kind, {"backbone": "temperature scaling", "stacked": "StackedNMM"})
    return rows.assign(edges=edges.fillna("plain").where(kind != "backbone", ""))


def relabelled_in_short(files: Files) -> str:
    rows, where = of_graphs(files), (CELL, {"edges": "plain"})
    rows = rows[rows["edges"] != ""].astype({"model": str})
    cells = {"cells": shared.number_of(*CELL)}
    for field, name, better in (("joint", JOINT, 1), ("nll", "NLL", -1), ("PLL", "PLL", 1)):
        cells[f"{name} minus plain"] = shared.over(*where, field, "+.3f", by=("split",))
        cells[name, "better, worse"] = shared.clear(*where, field, better, by=("split",))
    return shared.table(rows, ["model", "edges"], cells)


def heterophilous(files: Files) -> str:
    rows = of_graphs(files)
    cells = {"splits": count, "accuracy, %": spread("accuracy", 1, 100)}
    options = {"by": ("split",), "form": Paired.spread}
    cells |= compared({"edges": "plain"}, "minus plain", 3, **options)
    return shared.table(rows, [*LINES, "edges"], cells)


TABLES = accuracy, deviations, pairs, gains, against_backbone_in_short, gains_in_short
TABLES += end_to_end_in_short, sizes_in_short, spn_in_short, spn, relabelled_in_short, heterophilous
