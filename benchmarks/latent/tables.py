# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The tables of docs/results/fields.md and docs/results/annotators.md."""

from collections.abc import Iterable
from functools import partial
from math import hypot

import pandas as pd
from pandas import DataFrame

from benchmarks.latent.annotators import chosen_labels
from benchmarks.shared import tables as shared
from benchmarks.shared.records import Files, pick
from benchmarks.shared.tables import Paired, average, count, frame, ordered, spread

FIELDS = {"smooth": "smooth regions", "potts": "Potts", "nmm": "NMM"}
METHODS = {"independent": "no graph", "majority": "majority vote", "GCN": "GCN by itself"}
METHODS |= {"true numbers": "posterior at the true numbers", "Dawid-Skene": "Dawid-Skene"}
METHODS |= {"label spreading": "label spreading", "Potts, mean field": "Potts, mean field"}
METHODS |= {"Potts, Gibbs": "Potts, Gibbs sampling", "NMM, bound": "NMM, fitted by its bound"}
METHODS |= {"NMM, sweeps": "NMM, fitted by sweeps", "NMM": "NMM"}
SCORES = "accuracy", "log score"


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


TABLES = hidden, cortex, cortex_halves
