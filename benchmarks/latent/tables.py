# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The tables of docs/results/hidden-fields.md and docs/results/annotators.md."""

from collections.abc import Iterable
from functools import partial
from math import hypot

import pandas as pd
from pandas import DataFrame

from benchmarks.latent.annotators import CELLS, chosen_labels
from benchmarks.shared import tables as shared
from benchmarks.shared.records import Files, pick
from benchmarks.shared.tables import Cell, Paired, average, count, first, frame, ordered, spread

FIELDS = {"smooth": "smooth regions", "potts": "Potts", "nmm": "NMM"}
METHODS = {"independent": "no graph", "majority": "majority vote", "GCN": "GCN by itself"}
METHODS |= {"true numbers": "posterior at the true numbers", "Dawid-Skene": "Dawid-Skene"}
METHODS |= {"label spreading": "label spreading", "Potts, mean field": "Potts, mean field"}
METHODS |= {"Potts, Gibbs": "Potts, Gibbs sampling", "NMM, bound": "NMM, fitted by its bound"}
METHODS |= {"NMM, sweeps": "NMM, fitted by sweeps", "NMM": "NMM"}
GRAPHS = shared.GRAPHS | {"digits": "digits", "grid": "grid, drawn from the NMM"}
#: Columns that name a cell of simulated annotators, and the order of their values.
SIMULATED = {"graph": GRAPHS, "annotators": CELLS, "mean accuracy": (0.9, 0.7, 0.5)}
SCORES = "accuracy", "log score"
#: Labels of simulated annotators, by task.
LABELS = {"simulated": "of a graph's nodes", "model": "drawn from the NMM"}


def fields(files: Files, task: str) -> DataFrame:
    """Rows of hidden fields, with their settings as dictionaries."""
    rows = DataFrame(pick(files["hidden"], task=task)).rename(columns={"noise": "sd of the noise"})
    return rows.assign(**{"true field": ordered(rows["field"], FIELDS)})


def settings(found: Iterable[dict]) -> str:
    """What was chosen and fitted, seed by seed where it differs."""
    texts = DataFrame(list(found)).map("{:.2g}".format)
    return ", ".join(f"{name} {' / '.join(texts[name].unique())}" for name in texts)


def hidden(files: Files) -> str:
    rows, totals = fields(files, "compare"), ["bound", "log evidence"]
    rows["model"] = ordered(rows["method"], METHODS)
    rows[totals] = rows[totals].div(rows["size"] ** 2, axis=0)
    gap = shared.against("Potts, mean field", "Brier", 3, form=Paired.brief)
    cells = {"seeds": count, "squared error": spread("Brier", 3), "minus Potts, mean field": gap}
    cells |= {"accuracy": spread("accuracy", 1, 100), "NLL": spread("NLL", 3)}
    cells["bound, nats a pixel"] = spread("bound", 3)
    cells["log p(w), nats a pixel"] = spread("log evidence", 3)
    cells["its error, nats"] = average("error", ".2f", of=lambda each: hypot(*each) / len(each))
    cells["settings"] = lambda part, peers: settings(part["settings"])
    return shared.table(rows, ["true field", "sd of the noise", "model"], cells)


def hidden_searches(files: Files) -> str:
    rows, down = fields(files, "search"), ["true field", "sd of the noise", "seed"]
    rows["settings"] = [settings([each]) for each in rows["settings"]]
    totals = rows[["log evidence", "error"]].to_numpy()
    rows["total"] = [f"{total:.0f} ± {error:.1f}" for total, error in totals]
    return shared.table(rows, down, {"{}": first("total")}, across="settings")


def hidden_normalizers(files: Files) -> str:
    rows, forms = pick(files["hidden"], task="normalizers"), {"coupling": "{coupling}"}
    forms |= {"size": "{size} x {size}", "log Z": "{log Z:.1f} ± {error:.2f}"}
    return shared.markdown([{k: v.format(**row) for k, v in forms.items()} for row in rows])


def cortex(files: Files) -> str:
    rows = frame(files["annotators"], task="cortex")
    rows = rows.rename(columns={"section": "part", "left out": "log p(left out)"})
    methods = rows["method"].replace(r"^\d+$", "single clustering", regex=True)
    rows["method"] = ordered(methods, METHODS)
    best = rows["part"].map(chosen_labels(files["annotators"]))
    chosen = rows["labels"].isna() | (rows["labels"] == best)
    each = rows.assign(section=rows["part"], labels=rows["labels"].map("{:.0f}".format))
    rows = pd.concat([each[chosen].assign(section="all", labels="chosen"), each])
    rows["labels"] = rows["labels"].where(rows["seed"].notna(), "")
    digits = {"ARI": 3, "accuracy": 3, "log score": 2, "ECE": 3, "confidence": 3}
    digits |= {"log p(left out)": 2, "seconds": 1, "score": 3, "kappa": 4}
    cells = {"sections x starts": starts}
    cells |= {name: partial(within, field=name, digits=n) for name, n in digits.items()}
    cells |= {"seconds": average("seconds", ".1f"), "highest ARI": average("ARI", ".3f", of=max)}
    return shared.table(rows, ["section", "labels", "method"], cells)


def starts(part: DataFrame, peers: DataFrame) -> str:
    """Cell: the number of sections, and of starts or clusterings in each."""
    number = part["part"].value_counts()
    return f"{len(number)} x {' to '.join(dict.fromkeys([f'{number.min()}', f'{number.max()}']))}"


def within(part: DataFrame, peers: DataFrame, field: str, digits: int) -> str:
    """Cell: mean over sections of means over starts ± standard deviation within a section."""
    found = part.dropna(subset=field).groupby("part")[field]
    texts = [f"{v:.{digits}f}" for v in (found.mean().mean(), found.var().mean() ** 0.5)]
    return " ± ".join(text for text in texts if text != "nan")


def cortex_halves(files: Files) -> str:
    rows = frame(files["annotators"], task="halves")
    rows["chosen"] = rows["section"].map(chosen_labels(files["annotators"]))
    cells = {"{} labels": spread("agreement", 3)}
    return shared.table(rows, ["section", "chosen"], cells, across="labels")


def simulated_graphs(files: Files) -> str:
    rows = frame(files["annotators"], task="graphs")
    rows["graph"] = ordered(rows["graph"], GRAPHS)
    cells = {"nodes": first("nodes", ","), "edges": first("edges", ","), "labels": first("labels")}
    cells |= {"edges within a label": first("within", ".3f")}
    return shared.table(rows, ["graph"], cells | {"median degree": first("degree", ".0f")})


def simulations(files: Files) -> DataFrame:
    """Fits to simulated annotators, and as "chosen" the fits with the highest log p(left out)."""
    known = [row for row in files["annotators"] if row["task"] in ("simulated", "model")]
    rows = frame({"annotators": row["cell"], "mean accuracy": row["level"]} | row for row in known)
    names = rows["method"].str.extract(f"^({'|'.join(METHODS)}|.*?)(?:, (.*))?$").fillna("")
    rows["method"], rows["fit"] = ordered(names[0], METHODS), names[1]
    for name, order in SIMULATED.items():
        rows[name] = ordered(rows[name], order)
    fits = rows.dropna(subset="left out").groupby([*SIMULATED, "method", "seed"], observed=True)
    best, seconds = rows.loc[fits["left out"].idxmax()], fits["seconds"].transform("sum")
    return pd.concat([best.assign(fit="chosen", seconds=seconds), rows])


def simulated_annotators(files: Files) -> str:
    cells = {"seeds": count} | {name: spread(name, 3) for name in (*SCORES, "ECE", "Brier")}
    cells |= {"seconds": average("seconds", ".1f"), "log p(left out)": spread("left out", 3)}
    cells |= {"kappa": spread("kappa", 4)}
    return shared.table(simulations(files), [*SIMULATED, "method", "fit"], cells)


def simulated_means(files: Files) -> str:
    """Chosen fits, and methods without a choice: means over graphs and mean accuracies."""
    rows = simulations(files).assign(labels=lambda rows: ordered(rows["task"], LABELS))
    rows = rows[(rows["fit"] == "chosen") | rows["left out"].isna()]
    down = ["labels", "annotators", "method"]
    settings = rows.groupby([*down, "graph", "mean accuracy"], observed=True)
    each = settings[[*SCORES, "ECE", "Brier", "seconds"]].mean().reset_index()
    cells = {"settings": count} | {name: average(name, ".3f") for name in (*SCORES, "ECE")}
    cells |= {"highest ECE": average("ECE", ".3f", of=max), "Brier": average("Brier", ".3f")}
    return shared.table(each, down, cells | {"seconds": average("seconds", ".1f")})


def gaps(files: Files) -> DataFrame:
    """The chosen NMM minus every rival's chosen fit; also where only the rivals have a GCN."""
    rows, keys = simulations(files), ["graph", "cell", "mean accuracy", "seed"]
    rows = rows[(rows["fit"] == "chosen") | (rows["method"] == "majority vote")]
    own = rows["method"] == "NMM"
    mixed = rows[~own & (rows["cell"] == "copies and a GCN")].assign(cell="copies")
    rivals = pd.concat([rows[~own], mixed.assign(annotators="copies; for the rivals also a GCN")])
    both = rivals.merge(rows[own], on=keys, suffixes=("", " of the NMM"))
    for name in SCORES:
        both[name] = both[f"{name} of the NMM"] - both[name]
    cells = both.groupby(["task", *SIMULATED, "method"], observed=True, sort=False)[[*SCORES]]
    return cells.agg(lambda part: Paired(part.tolist())).reset_index()


def simulated_differences(files: Files) -> str:
    rows, cells = gaps(files), {f"{{}}: {name}": first(name) for name in SCORES}
    for name, form in {"accuracy": (1, 100), "log score": (3, 1)}.items():
        rows[name] = [gap.spread(*form) + gap.mark() for gap in rows[name]]
    return shared.table(rows, SIMULATED, cells, across="method")


def simulated_counts(files: Files) -> str:
    def ahead(field: str) -> Cell:
        return lambda part, _: f"{sum(gap.mean > 0 for gap in part[field])} of {len(part)}"

    rows = gaps(files).assign(labels=lambda rows: rows["task"].map(LABELS))
    cells = {f"{{}}: {name}": ahead(name) for name in SCORES}
    return shared.table(rows, ["labels", "annotators"], cells, across="method")


TABLES = (hidden, hidden_searches, hidden_normalizers, cortex, cortex_halves, simulated_graphs)
TABLES += (simulated_means, simulated_counts, simulated_differences, simulated_annotators)
