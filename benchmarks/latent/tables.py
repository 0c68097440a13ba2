# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The tables of docs/results/hidden-fields.md and docs/results/annotators.md."""

from __future__ import annotations

from collections.abc import Iterable

import pandas as pd
from pandas import DataFrame

from benchmarks.latent.annotators import CELLS, chosen_labels
from benchmarks.shared import tables as shared
from benchmarks.shared.tables import Cell, Paired, average, count, first, frame, ordered, spread

Files = dict[str, list[dict]]
FIELDS = {"smooth": "smooth regions", "potts": "Potts", "nmm": "NMM"}
MODELS = {"independent": "no graph", "Potts, mean field": "Potts, mean field"}
MODELS |= {"Potts, Gibbs": "Potts, Gibbs sampling", "NMM, bound": "NMM, fitted by its bound"}
MODELS |= {"NMM, sweeps": "NMM, fitted by sweeps"}
METHODS = {"majority": "majority vote", "GCN": "GCN by itself"}
METHODS |= {"true numbers": "posterior at the true numbers", "Dawid-Skene": "Dawid-Skene"}
METHODS |= {"label spreading": "label spreading", "Potts, mean field": "Potts, mean field"}
METHODS |= {"Potts, Gibbs": "Potts, Gibbs sampling", "NMM": "NMM"}
GRAPHS = shared.GRAPHS | {"digits": "digits", "grid": "grid, drawn from the NMM"}
#: Columns that name a cell of simulated annotators.
SIMULATED = ["graph", "annotators", "mean accuracy"]


def fields(files: Files, task: str) -> DataFrame:
    """Rows of hidden fields; settings are in a list, so that they stay together."""
    rows = frame([r | {"settings": [r.get("settings")]} for r in files["hidden"]], task=task)
    rows["true field"] = ordered(rows["field"], FIELDS)
    rows["sd of the noise"] = ordered(rows["noise"], None)
    return rows


def settings(found: Iterable[dict]) -> str:
    """What was chosen and fitted, seed by seed where it differs."""
    texts: dict[str, dict[str, None]] = {}
    for row in found:
        for name, value in row.items():
            texts.setdefault(name, {})[f"{value:.2g}"] = None
    return ", ".join(f"{name} {' / '.join(values)}" for name, values in texts.items())


def hidden(files: Files) -> str:
    """Which prior finds hidden labels best?"""
    rows, totals = fields(files, "compare"), ["bound", "log evidence"]
    rows["model"] = ordered(rows["method"], MODELS)
    rows[totals] = rows[totals].div(rows["size"] ** 2, axis=0)
    gap = shared.against("Potts, mean field", "Brier", 3, form=Paired.brief)
    cells = {"seeds": count, "squared error": spread("Brier", 3), "minus Potts, mean field": gap}
    cells |= {"accuracy": spread("accuracy", 1, 100), "NLL": spread("NLL", 3)}
    cells |= {"bound, nats a pixel": spread("bound", 3)}
    cells |= {"log p(w), nats a pixel": spread("log evidence", 3)}
    cells["its error, nats"] = lambda part, _: (
        f"{(part['error'] ** 2).sum() ** 0.5 / len(part):.2f}"
    )
    cells["settings"] = lambda part, _: settings(each for [each] in part["settings"])
    return shared.table(rows, ["true field", "sd of the noise", "model"], cells)


def plus_minus(field: str, form: str, error_form: str) -> Cell:
    """Cell: a number with its own standard error."""
    value, error = first(field, form), first("error", error_form)
    return lambda part, peers: f"{value(part, peers)} ± {error(part, peers)}"


def hidden_searches(files: Files) -> str:
    """Which stride and radius of the sources has the highest log p(w) on another seed?"""
    rows, down = fields(files, "search"), ["true field", "sd of the noise", "seed"]
    rows["settings"] = rows["settings"].map(settings)
    cells = {"{}": plus_minus("log evidence", ".0f", ".1f")}
    return shared.table(rows, down, cells, across="settings")


def hidden_normalizers(files: Files) -> str:
    """What is log Z of Potts fields without evidence?"""
    rows = frame(files["hidden"], task="normalizers")
    cells = {"size": lambda part, _: "{0} x {0}".format(part["size"].iloc[0])}
    return shared.table(rows, ["coupling"], cells | {"log Z": plus_minus("log Z", ".1f", ".2f")})


def cortex(files: Files) -> str:
    """Which consensus of clusterings is closest to the layers by hand?"""
    rows = frame(files["annotators"], task="cortex").rename(columns={"section": "part"})
    single = rows["method"].str.fullmatch(r"\d+")
    rows["method"] = ordered(rows["method"].mask(single, "single clustering"), METHODS)
    best = rows["part"].map(chosen_labels(files["annotators"]))
    chosen = rows["labels"].isna() | (rows["labels"] == best)
    each = rows.assign(section=rows["part"], labels=rows["labels"].map("{:.0f}".format))
    every = each[chosen].assign(section="all", labels="chosen")
    rows = pd.concat([every, each])
    rows["labels"] = rows["labels"].where(rows["seed"].notna(), "")
    cells = {
        "sections x starts": starts,
        "ARI": within("ARI", 3),
        "accuracy": within("accuracy", 3),
    }
    cells |= {"log score": within("log score", 2), "ECE": within("ECE", 3)}
    cells |= {"confidence": within("confidence", 3), "log p(left out)": within("left out", 2)}
    cells |= {"seconds": average("seconds", ".1f"), "score": within("score", 3)}
    cells |= {"kappa": within("kappa", 4), "highest ARI": average("ARI", ".3f", of=max)}
    return shared.table(rows, ["section", "labels", "method"], cells)


def starts(part: DataFrame, peers: DataFrame) -> str:
    """Cell: the number of sections, and of starts or clusterings in each."""
    number = part["part"].value_counts()
    ends = dict.fromkeys([f"{number.min()}", f"{number.max()}"])
    return f"{len(number)} x {' to '.join(ends)}"


def within(field: str, digits: int) -> Cell:
    """Cell: mean over sections of means over starts ± standard deviation within a section."""

    def cell(part: DataFrame, peers: DataFrame) -> str:
        found = part.dropna(subset=field).groupby("part")[field]
        texts = [f"{v:.{digits}f}" for v in (found.mean().mean(), found.var().mean() ** 0.5)]
        return " ± ".join(text for text in texts if text != "nan")

    return cell


def cortex_halves(files: Files) -> str:
    """For how many labels do two halves of the clusterings agree most?"""
    rows = frame(files["annotators"], task="halves")
    rows["chosen"] = rows["section"].map(chosen_labels(files["annotators"]))
    rows["labels"], cells = ordered(rows["labels"], None), {"{} labels": spread("agreement", 3)}
    return shared.table(rows, ["section", "chosen"], cells, across="labels")


def simulated_graphs(files: Files) -> str:
    """How large are the graphs, and how often do their edges join equal labels?"""
    rows = frame(files["annotators"], task="graphs")
    rows["graph"] = ordered(rows["graph"], GRAPHS)
    cells = {"nodes": first("nodes", ","), "edges": first("edges", ","), "labels": first("labels")}
    cells |= {"edges within a label": first("within", ".3f")}
    return shared.table(rows, ["graph"], cells | {"median degree": first("degree", ".0f")})


def simulations(files: Files) -> DataFrame:
    """
    Rows of simulated annotators. For every method and seed, the fit of the highest log p(left out)
    is there again as the fit "chosen", with the seconds of all fits.
    """
    known = [row for row in files["annotators"] if row["task"] in ("simulated", "model")]
    rows = frame(known).rename(columns={"cell": "annotators", "level": "mean accuracy"})
    names = rows["method"].str.extract(f"^({'|'.join(METHODS)}|.*?)(?:, (.*))?$").fillna("")
    rows["method"], rows["fit"] = ordered(names[0], METHODS), names[1]
    for name, order in zip(SIMULATED, (GRAPHS, CELLS, (0.9, 0.7, 0.5)), strict=True):
        rows[name] = ordered(rows[name], order)
    fits = rows.dropna(subset="left out").groupby([*SIMULATED, "method", "seed"], observed=True)
    best = rows.loc[fits["left out"].idxmax()]
    seconds = fits["seconds"].transform("sum")
    return pd.concat([best.assign(fit="chosen", seconds=seconds), rows])


def simulated_annotators(files: Files) -> str:
    """How good is each consensus of simulated annotators, and each fit that could be chosen?"""
    cells = {"seeds": count, "accuracy": spread("accuracy", 3), "log score": spread("log score", 3)}
    cells |= {"ECE": spread("ECE", 3), "Brier": spread("Brier", 3)}
    cells |= {"seconds": average("seconds", ".1f"), "log p(left out)": spread("left out", 3)}
    cells |= {"kappa": spread("kappa", 4)}
    return shared.table(simulations(files), [*SIMULATED, "method", "fit"], cells)


def gaps(files: Files) -> DataFrame:
    """
    Paired differences of the chosen NMM from the chosen fit of every rival, a line each; also
    where a GCN is one more annotator for the rivals only.
    """
    rows = simulations(files)
    rows = rows[(rows["fit"] == "chosen") | (rows["method"] == "majority vote")]
    ours, lines = rows["method"] == "NMM", []
    alone = ours & (rows["annotators"] == "copies") & (rows["task"] == "simulated")
    mixed = rows[alone | ~ours & (rows["annotators"] == "copies and a GCN")]
    mixed = mixed.assign(annotators="copies; for the rivals also a GCN")
    for names, part in shared.groups(pd.concat([rows, mixed]), SIMULATED):
        ours = part[part["method"] == "NMM"]
        for rival, theirs in part[part["method"] != "NMM"].groupby("method", observed=True):
            pairs = {f: Paired.rows(ours, theirs, f) for f in ("accuracy", "log score")}
            lines.append(dict(zip(SIMULATED, names, strict=True)) | {"rival": rival} | pairs)
    return DataFrame(lines)


def simulated_differences(files: Files) -> str:
    """By how much is the NMM ahead of every rival on simulated annotators?"""

    def gap(field: str, digits: int, unit: float) -> Cell:
        return lambda part, _: part[field].iloc[0].spread(digits, unit) + part[field].iloc[0].mark()

    cells = {"{}: accuracy": gap("accuracy", 1, 100), "{}: log score": gap("log score", 3, 1)}
    return shared.table(gaps(files), SIMULATED, cells, across="rival")


def simulated_counts(files: Files) -> str:
    """In how many cells is the NMM ahead of every rival on simulated annotators?"""

    def ahead(field: str) -> Cell:
        return lambda part, _: f"{sum(gap.mean > 0 for gap in part[field])} of {len(part)}"

    rows = gaps(files)
    drawn = rows["graph"] == GRAPHS["grid"]
    rows["labels"] = drawn.map({True: "drawn from the NMM", False: "of a graph's nodes"})
    cells = {f"{{}}: {field}": ahead(field) for field in ("accuracy", "log score")}
    return shared.table(rows, ["labels", "annotators"], cells, across="rival")


def annotators_coverage(files: Files) -> str:
    """How often does a 90 % interval contain an annotator's true accuracy?"""
    rows = frame(files["annotators"], task="coverage")
    each = rows.explode(["truth", "mean", "low", "high", "covered"])
    line = {"simulations": f"{len(rows)}", "annotators": f"{len(each) // len(rows)}"}
    line["true accuracies inside"] = f"{100 * each['covered'].mean():.1f} %"
    line["mean width"] = f"{(each['high'] - each['low']).mean():.3f}"
    line["mean error"] = f"{(each['mean'] - each['truth']).mean():+.4f}"
    return shared.markdown([line])


TABLES = (hidden, hidden_searches, hidden_normalizers, cortex, cortex_halves, simulated_graphs)
TABLES += (simulated_counts, simulated_differences, simulated_annotators, annotators_coverage)
