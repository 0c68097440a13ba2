# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
The table at the head of docs/results.md: every experiment, its best rival, and the NMM.

In each cell of an experiment (a graph and backbone, a coupling, a set of images) the best rival has
the best mean on the units, seeds or splits or fields, that it shares with the NMM. It is known only
afterwards, so the comparison favours the rivals.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from statistics import mean, median
from typing import NamedTuple

import pandas as pd
from pandas import DataFrame

from benchmarks.images import tables as of_images
from benchmarks.latent import tables as latent
from benchmarks.links import tables as of_links
from benchmarks.shared.tables import Paired, frame, groups, markdown

OURS = "NMM"
Files = dict[str, list[dict]]


def long(rows: DataFrame, cell: Sequence[str], unit: Sequence[str], value: str, ours: str):
    """Rows by cell, unit, method and value; the method ``ours`` is called NMM."""
    known = rows[rows[value].notna()]
    return DataFrame({
        "cell": list(zip(*(known[name] for name in cell), strict=True)),
        "unit": list(zip(*(known[name] for name in unit), strict=True)),
        "method": known["method"].where(known["method"] != ours, OURS).to_numpy(),
        "value": known[value].to_numpy(),
    })  # fmt: skip


def trained(files: Files) -> DataFrame:
    rows = frame(files["nodes"], task="accuracy")
    rival = ~rows.method.str.startswith("NMM") & ~rows.method.str.endswith("stacked")
    rows = rows[rows["settings of"].isna() & (rival | (rows.method == "NMM"))]
    return long(rows, ["dataset", "backbone"], ["seed"], "nll", "NMM")


def on_top(files: Files, pool: bool = False) -> DataFrame:
    rows = frame(files["calibration"], task="splits")
    rows = rows[rows.backbone != "mlp"]
    own = rows.method.str.startswith(("StackedNMM", "the pool alone"))
    rival = rows.method == "the pool alone" if pool else ~own
    rows = rows[rival | (rows.method == "StackedNMM")]
    return long(rows, ["dataset", "backbone"], ["split", "fold"], "nll", "StackedNMM")


def random_fields(files: Files, kind: str) -> DataFrame:
    rows = frame(files["fields_compared"])
    rows = rows[rows.KL.notna() & ~rows.task.isin(["plain", "letter"])]
    longest = {2: "2000 steps"}
    ours = [f"{kind}, {longest.get(labels, '500 steps')}" for labels in rows.labels]
    own = rows.method == ours
    rows = rows.assign(method=rows.method.mask(own, "ours"))
    rows = rows[own | ~rows.method.str.startswith("NMM")]
    return long(rows, ["labels", "coupling"], ["coupling", "seed"], "KL", "ours")


def hidden(files: Files) -> DataFrame:
    """Of the NMM's two fits, that of the higher estimate of log p(w), which sees no label."""
    rows, parts = frame(files["hidden"], task="compare"), []
    for _, part in groups(rows, ["field", "noise"]):
        own = part[part.method.str.startswith("NMM")]
        best = own.groupby("method")["log evidence"].mean().idxmax()
        parts.append(part[~part.method.str.startswith("NMM") | (part.method == best)].replace(
            {"method": {best: "ours"}}))  # fmt: skip
    return long(pd.concat(parts), ["field", "noise"], ["seed"], "Brier", "ours")


def cortex(files: Files) -> DataFrame:
    chosen = latent.chosen_labels(files["annotators"])
    rows = frame(files["annotators"], task="cortex")
    rows = rows[rows.labels == rows.section.map(chosen)]
    rows = rows[~rows.method.str.startswith("NMM") | (rows.method == "NMM, types")]
    rows = rows.groupby(["method", "section"], as_index=False, sort=False).ARI.mean()
    return long(rows.assign(cell="cortex"), ["cell"], ["section"], "ARI", "NMM, types")


def simulated(files: Files) -> DataFrame:
    rows = latent.simulations(files)
    rows = rows[(rows.fit == "chosen") | (rows.method == "majority vote")]
    return long(rows.astype({"method": str}), latent.SIMULATED, ["seed"], "log score", "NMM")


def heterophilous(files: Files, ours: str) -> DataFrame:
    rows = frame(files["repelling"], task="graphs")
    rows = rows[rows.method.isin(["backbone", ours])]
    rows = rows.replace({"method": {"backbone": "temperature scaling"}})
    return long(rows, ["dataset", "backbone"], ["split"], "joint", ours)


def links(files: Files) -> DataFrame:
    rows = of_links.tested(files, "compare", "katz")
    rows = rows[rows.splits == "new"].astype({"method": str})
    return long(rows, ["dataset"], ["seed"], "AP", of_links.OURS)


def images(files: Files, value: str) -> DataFrame:
    """Means over seeds, image by image, of the networks that were trained first."""
    rows, cell = of_images.tested(files).astype({"method": str}), ["network", "images"]
    first = ~rows.network.astype(str).str.contains("run") & rows.network.str.contains("rate 0.001")
    rows = rows[first & (rows.noise == "25")]
    rows = rows[~rows.method.str.startswith("NMM") | (rows.method == "NMM")]
    if value == "best":  # only where widths without an NMM were trained too
        rows = rows.merge(rows[rows.method == "U-Net-widths"][cell].drop_duplicates())
    rows = rows.groupby([*cell, "method", "image"], observed=True)[value].mean().reset_index()
    return long(rows, cell, ["image"], value, "NMM")


class Experiment(NamedTuple):
    page: str
    title: str
    ours: str  #: what of ours is compared
    measure: str
    better: int  #: 1 if more is better, -1 if less is
    digits: int
    rows: Callable[[Files], DataFrame]


CHANCE = "log p(test \\| train)"
FIELDS, DIFFER = "Markov random fields", "Heterophilous graphs"
EXPERIMENTS = (
    Experiment("nodes", "Node classification", "NMM", "NLL", -1, 3, trained),
    Experiment("on-top", "On top of trained classifiers", "StackedNMM", "NLL", -1, 3, on_top),
    Experiment("on-top", "On top of trained classifiers", "NMM on the pool", "NLL", -1, 3,
               lambda files: on_top(files, pool=True)),
    Experiment("random-fields", FIELDS, "NMM of all pixels", "KL divergence, nats", -1, 1,
               lambda files: random_fields(files, "NMM")),
    Experiment("random-fields", FIELDS, "NMM of half of the pixels", "KL divergence, nats", -1, 1,
               lambda files: random_fields(files, "NMM of half")),
    Experiment("hidden-fields", "Hidden fields", "NMM", "squared error", -1, 3, hidden),
    Experiment("annotators", "Noisy annotators", "NMM with types, cortex", "ARI", 1, 3, cortex),
    Experiment("annotators", "Noisy annotators", "NMM, simulated", "log score, nats", 1, 3,
               simulated),
    Experiment("heterophilous", DIFFER, "NMM, relabelling", CHANCE, 1, 3,
               lambda files: heterophilous(files, "NMM, relabelled")),
    Experiment("heterophilous", DIFFER, "StackedNMM, relabelling", CHANCE, 1, 3,
               lambda files: heterophilous(files, "stacked, relabelled")),
    Experiment("links", "Link prediction", "NMM-DGLFRM", "average precision, points", 1, 2, links),
    Experiment("denoising", "Image denoising", "NMM", "PSNR, dB", 1, 2,
               lambda files: images(files, "PSNR")),
    Experiment("denoising", "Image denoising", "NMM", "log p, nats a value", 1, 3,
               lambda files: images(files, "best")),
)  # fmt: skip


def against_best(part: DataFrame, better: int) -> tuple[str, Paired] | None:
    """The rival of the best mean among those that share two units or more with the NMM."""
    wide = part.pivot_table("value", "unit", "method", sort=False)
    if OURS not in wide:
        return None
    rivals = wide.drop(columns=OURS)
    gaps = {name: Paired((wide[OURS] - rivals[name]).dropna().tolist()) for name in rivals}
    known = {name: gap for name, gap in gaps.items() if len(gap) > 1}
    if not known:
        return None
    best = min(known, key=lambda name: better * known[name].mean)
    return best, known[best]


def clear(gaps: list[Paired], better: int) -> tuple[int, int]:
    """Cells in which ours is better and worse, p < .05."""
    return sum(gap.clear(better) for gap in gaps), sum(gap.clear(-better) for gap in gaps)


def verdict(gaps: list[Paired], better: int, num_rivals: int) -> str:
    """The side of most clear cells, if the mean over cells and their median are on it too."""
    if not any(gap.tested for gap in gaps):
        good = sum(better * gap.mean > 0 for gap in gaps)
        return f"not tested; better in {good} of {len(gaps)}"
    (ahead, behind), means = clear(gaps, better), [better * gap.mean for gap in gaps]
    word = "level"
    if ahead > behind and min(mean(means), median(means)) > 0:
        word = "**ahead**"
    elif behind > ahead and max(mean(means), median(means)) < 0:
        word = "**behind**"
    return word + " (one rival)" * (num_rivals == 1 and len(gaps) > 1)


def line(each: Experiment, rows: DataFrame) -> dict[str, str] | None:
    every = [against_best(part, each.better) for _, part in rows.groupby("cell", sort=False)]
    found = [pair for pair in every if pair]
    if not found:
        return None
    gaps, names = [gap for _, gap in found], Counter(name for name, _ in found).most_common()
    over = "cells" if len(found) > 1 else "pairs"
    spread = Paired([gap.mean for gap in gaps]) if len(found) > 1 else gaps[0]
    return {
        "experiment": f"[{each.title}](results/{each.page}.md)",
        "the NMM": each.ours,
        "measure": each.measure + (", less is better" if each.better < 0 else ""),
        "best rival (cells)": ", ".join(f"{name} ({count})" for name, count in names),
        "cells": f"{len(found)}",
        "NMM minus it": f"{spread.spread(each.digits)} over {len(spread)} {over}",
        "clearly ahead, behind": ", ".join(map(str, clear(gaps, each.better))),
        "verdict": verdict(gaps, each.better, rows.method.nunique() - 1),
    }


def verdicts(files: Files) -> str:
    """Where is an NMM ahead of its best rival?"""
    return markdown(filter(None, (line(each, each.rows(files)) for each in EXPERIMENTS)), 4)
