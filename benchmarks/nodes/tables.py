# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The tables of docs/results/nodes.md and docs/results/heterophilous.md."""

from __future__ import annotations

from statistics import mean, median

import pandas as pd
from pandas import DataFrame

from benchmarks.nodes.fits import chosen
from benchmarks.nodes.run import METHODS
from benchmarks.shared import tables as shared
from benchmarks.shared.tables import Cell, Paired, against, average, count, frame, ordered, spread

Files = dict[str, list[dict]]
FORMS = {"": "{}", ", temperature": "{} + temperature", ", stacked": "StackedNMM on {}"}
FORMS |= {", pooled": "StackedNMM with its pool on {}"}
#: Settings of another search make a method another model.
SETTINGS = {"": "", ", its first 6 trials": " (settings of its first 6 trials)"}
SETTINGS |= {", NMM": " (settings of the NMM's search)"}
MODELS = {
    method + form + settings: FORMS[form].format(method) + SETTINGS[settings]
    for method in METHODS
    for settings in SETTINGS
    for form in FORMS
}
TEMPERED = "backbone + temperature"
RIVALS = ["temperature", "GMNN", "Potts on C&S", "StackedNMM, scores alone", "StackedNMM"]
RIVALS += [TEMPERED, "NMM", "StackedNMM on NMM", "StackedNMM on backbone"]
JOINT = "log p(test \\| train)"


def named(rows: DataFrame) -> DataFrame:
    """Rows with the names of tables, and with PLL: the log-likelihood of a pair of nodes."""
    fields = "method", "settings of", "ratio", "pairs", "conditional", "own product"
    rows = rows.reindex(columns=list(dict.fromkeys([*rows, *fields])))
    rows["graph"] = ordered(rows["dataset"], shared.GRAPHS)
    rows["backbone"] = ordered(rows["backbone"].str.upper(), ("GCN", "GAT", "APPNP", "MLP"))
    communities = {r"(.*), (communities|weighted) (.*)\.0": r"StackedNMM on \1, \2 at \3"}
    settings = [f", {name}" if isinstance(name, str) else "" for name in rows["settings of"]]
    rows["model"] = ordered(rows["method"].replace(communities, regex=True) + settings, MODELS)
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

    def cell(part: DataFrame, peers: DataFrame) -> str:
        return Paired.of(shared.scores(part, ours), shared.scores(part, theirs)).text(digits, unit)

    return cell


def compared(base: dict[str, str], name: str, digits: int, own=spread, **options) -> dict:
    """Cells of three scores, each with the paired difference from a base."""
    cells: dict[str | tuple, Cell] = {}
    for field, head, better in (("nll", "NLL", -1), ("joint", JOINT, 1), ("PLL", "PLL", 1)):
        cells[head] = own(field, 3)
        cells[head, name] = against(base, field, digits, better=better, **options)
    return cells


def accuracy(files: Files) -> str:
    """How accurate and how calibrated are all models on the public split?"""
    quality = marked(TEMPERED, "nll", 3, better=-1), average("ece", ".3f"), average("joint", ".3f")
    cells = {"{}: accuracy, %": marked("backbone", "accuracy", 1, 100)}
    cells |= {f"{{}}: NLL / ECE / {JOINT}": joined(*quality)}
    return shared.table(runs(files, "accuracy"), ["backbone", "model"], cells, across="graph")


def against_backbone(files: Files) -> str:
    """Are NMMs and StackedNMM better than the backbone with the same settings?"""
    rows = runs(files, "accuracy")
    rows["search"] = rows["settings of"].astype(object).fillna("own")
    rows["model"] = ordered(rows["method"], MODELS)
    cells = {"accuracy, points": against("backbone", "accuracy", 1, 100, form=Paired.brief)}
    for base in ("backbone", "backbone, temperature", "backbone, stacked"):
        cells |= {f"NLL minus {MODELS[base]}": against(base, "nll", 3, form=Paired.brief)}
    return shared.table(rows, ["graph", "backbone", "search", "model"], cells)


def searches(files: Files) -> str:
    """How many settings were drawn, and which of them did the validation nodes choose?"""

    def cell(part: DataFrame, peers: DataFrame) -> str:
        key = {name: part[name].iloc[0] for name in ("dataset", "backbone", "method")}
        best = chosen(files["nodes"], **key | {"backbone": key["backbone"].lower()})
        drawn = [name.partition("settings.")[2] for name in part.dropna(axis=1)]
        texts = [f"{name.replace('weight_', '')} {best[name]:g}" for name in drawn if name]
        return f"{part['trial'].nunique()}: {', '.join(texts)}"

    return shared.table(runs(files, "search"), ["backbone", "model"], {"{}": cell}, across="graph")


def deviations(files: Files) -> str:
    """What does each choice of the paper change?"""
    rows = runs(files, "deviations")
    rows["change"] = ordered(rows["change"], {"none": "ours"})
    ours = {"change": "ours"}
    cells = {"seeds": count, "accuracy, %": spread("accuracy", 1, 100)}
    cells |= {("accuracy", "minus ours, points"): against(ours, "accuracy", 1, 100)}
    cells |= {"NLL": spread("nll", 3), "minus ours": against(ours, "nll", 3)}
    cells |= {"predicted in turn, points": within("sequential", "accuracy", 1, 100)}
    return shared.table(rows, ["graph", "backbone", "change"], cells)


def pairs(files: Files) -> str:
    """How probable are the two labels of adjacent test nodes?"""
    number = "number of splits"

    def cell(part: DataFrame, peers: DataFrame) -> str:
        part, remark = common(part, peers)
        if (part["model"] == number).all():
            return f"{part['seed'].nunique()}"
        text = spread("PLL", 3)(part, peers)
        if prior := shared.values(part, "prior"):
            text += f" ({mean(part['own product']):.3f}, {mean(prior):.3f})"
        return text + remark

    rows = runs(files, "pairs").sort_values(["graph", "ratio"], kind="stable")
    rows["split"] = ordered(rows["graph"].astype(str) + " " + rows["ratio"].astype(str))
    every = pd.concat([rows.assign(model=number), rows])
    every["model"] = ordered(every["model"], [number, *MODELS.values()])
    return shared.table(every, ["backbone", "model"], {"{}": cell}, across="split")


def common(part: DataFrame, peers: DataFrame) -> tuple[DataFrame, str]:
    """Rows of the splits that all models with three or more share; or all rows, and a remark."""
    splits = [set(rows["seed"]) for _, rows in peers.groupby("model", observed=True)]
    every = set.intersection(*[known for known in splits if len(known) > 2] or [set()])
    if every and every <= set(part["seed"]):
        return part[part["seed"].isin(every)], ""
    return part, f" ({len(part)} split{'s' * (len(part) > 1)})"


def gains(files: Files) -> str:
    """How much more probable are pairs of labels than under temperature scaling?"""
    cells = {"{}": against({"model": TEMPERED}, "PLL", 3, form=Paired.spread, better=1)}
    cells |= {"{}: correlation": average("share", "+.3f"), "{}: splits": count}
    rows = runs(files, "pairs")
    rows["share"] = rows["conditional"] - rows["own product"]
    return shared.table(rows, ["graph", "backbone", "model"], cells, across="ratio")


def influence(files: Files) -> str:
    """Do these gains rest on few nodes and pairs?"""

    def interval(part: DataFrame, peers: DataFrame) -> str:
        low, high = (part[f"on temperature.{end}"].dropna() for end in ("low", "high"))
        return f"{(low > 0).sum()}, {(high < 0).sum()} of {len(low)}" if len(low) else ""

    cells = {"interval above, below 0": interval}
    cells |= {"two nodes": average("on temperature.two nodes", ".3f")}
    for name in ("temperature", "own product"):
        cells |= {f"median pair on {name}": average(f"on {name}.median", "+.4f")}
        cells |= {f"% of pairs that gain on {name}": average(f"on {name}.share", ".0f", 100)}
    cells |= {"seconds a fit": average("fit seconds", ".1f", of=median)}
    rows = runs(files, "pairs")
    return shared.table(rows[rows["model"] != TEMPERED], ["graph", "backbone", "model"], cells)


def communities(files: Files) -> str:
    """Do communities as sources improve StackedNMM on the same classifier?"""
    base = {"model": "StackedNMM on backbone"}
    cells = {"runs": count} | compared(base, "minus StackedNMM's", 4, form=Paired.spread)
    cells |= {"log p(validation \\| train)": spread("val joint", 3)}
    return shared.table(runs(files, "communities"), ["splits", "graph", "backbone", "model"], cells)


def sizes(files: Files) -> str:
    """How accurate are all models with more and more training nodes?"""
    change = against({"model": "backbone"}, "accuracy", 1, 100, form=Paired.spread)
    hits, nll = average("accuracy", ".1f", 100), average("nll", ".3f")

    def cell(part: DataFrame, peers: DataFrame) -> str:
        gap = change(part, peers)
        return hits(part, peers) + f" ({gap})" * bool(gap) + f" / {nll(part, peers)}"

    return shared.table(
        runs(files, "sizes"), ["graph", "backbone", "model"], {"{}": cell}, across="ratio"
    )


def predicted(files: Files) -> str:
    """Does the rule matter by which a mixture predicts labels?"""
    first, rules = "rules.one by one.", {"in turn": "sequential", "jointly": "joint"}
    cells = {"seeds": count, "accuracy, one by one": spread(f"{first}accuracy", 1, 100)}
    for name, rule in rules.items():
        gap = within(f"rules.{rule}.accuracy", f"{first}accuracy", 2, 100)
        cells |= {f"{name} minus that, points": gap}
        cells |= {f"labels changed {name}": average(f"rules.{rule}.changed", ".1f")}
    cells |= {"log p of that labelling, nats per node": spread(f"{first}log prob", 4)}
    for name, rule in rules.items():
        gap = within(f"rules.{rule}.log prob", f"{first}log prob", 4)
        cells |= {f"{name} minus that": gap}
    cells |= {"log p of the true labels": spread(f"{first}of the true labels", 3)}
    return shared.table(runs(files, "predicted"), ["graph", "backbone", "model"], cells)


def spn(files: Files) -> str:
    """Does SPN, a conditional random field, predict better on the same splits?"""
    protocol, ours = frame(files["calibration"], task="splits"), frame(files["nodes"], task="pairs")
    rows = named(pd.concat([frame(files["nodes_rivals"]), protocol, ours]))
    rows["model"] = ordered(rows["model"].astype(str), ["SPN", *RIVALS])
    places = rows[["dataset", "backbone", "splits", "seed", "split", "fold"]].astype(object)
    rows["run"] = places.fillna("").astype(str).agg(" ".join, axis=1)
    known = rows["run"].isin(rows["run"][rows["model"] == "SPN"])
    rows = rows[known & rows["model"].isin(["SPN", *RIVALS])]
    cells = {"runs": count, "accuracy, %": average("accuracy", ".1f", 100)}
    cells |= {"max-product, %": average("max-product", ".1f", 100)}
    cells |= compared({"model": "SPN"}, "minus SPN", 3, own=shared.centre, by=("run",))
    cells |= {"ECE": average("ece", ".3f"), "edges taught": average("taught edges", ".0f")}
    cells |= {"epochs of refinement": average("settings.refined", ".0f")}
    return shared.table(rows, ["splits", "graph", "backbone", "model"], cells)


def heterophilous(files: Files) -> str:
    """Do relabelling edges help on heterophilous graphs?"""
    rows = named(frame(files["repelling"], task="graphs"))
    kinds = {"backbone": "temperature scaling", "stacked": "StackedNMM"}
    parts = rows["method"].str.split(", ")
    rows["model"] = ordered(parts.str[0], kinds)
    rows["edges"] = parts.str[1].fillna("plain").where(parts.str[0] != "backbone", "")
    cells = {"splits": count, "accuracy, %": spread("accuracy", 1, 100)}
    options = {"by": ("split",), "form": Paired.spread}
    cells |= compared({"edges": "plain"}, "minus plain", 3, **options)
    return shared.table(rows, ["graph", "backbone", "model", "edges"], cells)


def heterophilous_generated(files: Files) -> str:
    """Do relabelling edges find the distribution of labels that have negative correlation?"""
    names = {"truth": "truth", "relabelled": "fitted, relabelling", "plain": "fitted, plain"}
    names |= {"independent": "independent labels"}
    rows = frame(files["repelling"], task="generated").melt(["seed"], [*names], "model", JOINT)
    rows["model"] = ordered(rows["model"], names)
    cells = {"graphs": count, "log p(y) per node": spread(JOINT, 3)}
    gap = against({"model": "truth"}, JOINT, 3, form=Paired.spread)
    return shared.table(rows, ["model"], cells | {"minus the truth's": gap})


TABLES = accuracy, against_backbone, searches, deviations, pairs, gains, influence, communities
TABLES += sizes, predicted, spn, heterophilous, heterophilous_generated
