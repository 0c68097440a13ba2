# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
The table at the head of docs/results.md: every experiment, its best rival, and the NMM.

In each cell of an experiment (a graph and backbone, a coupling, a set of images) the best rival is
the one of the best mean on the units, seeds or splits or fields, that it shares with ours. It is
known only afterwards, so that the comparison leans against us.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from statistics import mean, median
from typing import NamedTuple

from benchmarks.images import tables as images_tables
from benchmarks.latent import annotators_tables, hidden_tables
from benchmarks.links import rivals_tables as links_rivals_tables
from benchmarks.nodes import repelling_tables
from benchmarks.nodes import runs as nodes_runs
from benchmarks.on_top import tables as calibration_tables
from benchmarks.random_fields import compared_tables as fields_compared_tables
from benchmarks.shared.common import grouped
from benchmarks.shared.writing import Paired, Rows, made, scores

#: Of a cell, by method and unit.
Cell = dict[str, dict]


class Experiment(NamedTuple):
    section: str
    ours: str  #: what of ours is compared, as tables call it
    measure: str
    better: int  #: 1 if more is better, -1 if less is
    digits: int
    cells: Callable[[dict[str, Rows]], Iterable[tuple[Cell, dict]]]  #: rivals, and ours


def tables(files: dict[str, Rows]) -> dict[str, str]:
    return made({verdicts: 4}, files)


def by_method(part: Rows, field: str, by: tuple[str, ...] = ("seed",)) -> Cell:
    return {name: scores(found, field, by) for (name,), found in grouped(part, "method").items()}


def without(cell: Cell, *ours: str) -> Cell:
    """The rivals: nothing of ours, whose names begin with these."""
    return {name: values for name, values in cell.items() if not name.startswith(ours)}


def trained(files):
    every = nodes_runs.runs(files["nodes"], "accuracy")
    for part in nodes_runs.parts(every, "dataset", "backbone").values():
        cell = by_method([row for row in part if "settings of" not in row], "nll")
        known = {name: values for name, values in cell.items() if not name.endswith("stacked")}
        yield without(known, "NMM"), cell.get("NMM", {})


def on_top(files):
    for part in calibration_tables.finished(files["calibration"]).values():
        cell = by_method(part, "nll", calibration_tables.RUN)
        ours = (calibration_tables.OURS, *calibration_tables.ABLATED)
        yield without(cell, *ours), cell[calibration_tables.OURS]


def on_the_pool(files):
    """The NMM alone: what it stands on, which is ours too, is its rival."""
    pool = calibration_tables.ABLATED[0]
    for part in calibration_tables.finished(files["calibration"]).values():
        cell = by_method(part, "nll", calibration_tables.RUN)
        yield {pool: cell[pool]}, cell[calibration_tables.OURS]


def random_fields(method: dict[int, str]):
    def cells(files):
        known = [row for row in files["fields_compared"] if "KL" in row]
        rows = [row for row in known if row["task"] not in fields_compared_tables.LARGE]
        for (labels, _), part in grouped(rows, "labels", "coupling").items():
            cell = by_method(part, "KL", fields_compared_tables.FIELD)
            yield without(cell, "NMM"), cell.get(method.get(labels, ""), {})

    return cells


def hidden(files):
    """Of the NMM's two fits, that of the higher estimate of log p(w), which sees no label."""
    for part in hidden_tables.cells(files["hidden"]).values():
        cell, evidence = by_method(part, "Brier"), by_method(part, "log evidence")
        known = [name for name in hidden_tables.OURS if cell.get(name)]
        if known:
            ours = max(known, key=lambda name: mean(evidence[name].values()))
            yield without(cell, "NMM"), cell[ours]


def cortex(files):
    chosen = annotators_tables.chosen_labels(files["annotators"])
    every = annotators_tables.fits(files["annotators"])
    part = [row for row in every if row["labels"] == chosen.get(row["section"])]
    starts = grouped(part, "method", "section")
    cell: Cell = {}
    for (method, section), found in starts.items():
        cell.setdefault(method, {})[section] = mean(row["ARI"] for row in found)
    yield without(cell, "NMM"), cell.get("NMM, types", {})


def simulated(files):
    for part in annotators_tables.simulations(files["annotators"]).values():
        cell = by_method(annotators_tables.with_chosen(part), "log score")
        rivals = {name: cell[name] for name in annotators_tables.RIVALS if name in cell}
        yield rivals, cell["NMM" + annotators_tables.CHOSEN]


def repelling(method: str):
    def cells(files):
        for part in repelling_tables.cells(files["repelling"]).values():
            cell = by_method(part, "log p(test \\| train)", ("split",))
            rivals = without(cell, "NMM", "stacked").items()
            yield (
                {repelling_tables.METHODS[name]: found for name, found in rivals},
                cell.get(method, {}),
            )

    return cells


def links(files):
    for part in links_rivals_tables.by_graph(files["links"]).values():
        cell = {guide: scores(part, "AP", guide=guide) for (guide,) in grouped(part, "guide")}
        ours = cell.pop(links_rivals_tables.OURS)
        yield {links_rivals_tables.METHODS[name]: found for name, found in cell.items()}, ours


def images(field: str, needed: str = ""):
    """
    Means over seeds, image by image, of the networks trained first. Cells without the rival that
    is ``needed`` are left out.
    """

    def cells(files):
        for _, part in images_tables.tested(files["images"]):
            if images_tables.usual(part[0]["settings"]):
                cell = {
                    method: {
                        image: mean(row[field] for row in rows)
                        for (image,), rows in grouped(found, "image").items()
                    }
                    for (method,), found in grouped(part, "method").items()
                }
                if not needed or needed in cell:
                    yield without(cell, "NMM"), cell.get("NMM", {})

    return cells


NODES, CHANCE = "Node classification", "log p(test \\| train)"
EXPERIMENTS = (
    Experiment(NODES, "NMM", "NLL", -1, 3, trained),
    Experiment("On top of trained classifiers: a published protocol", "StackedNMM", "NLL", -1, 3,
               on_top),
    Experiment("On top of trained classifiers: a published protocol", "NMM on the pool", "NLL", -1,
               3, on_the_pool),
    Experiment("Markov random fields", "NMM of all pixels", "KL divergence, nats", -1, 1,
               random_fields({2: "NMM, 2000 steps", 4: "NMM, 500 steps", 8: "NMM, 500 steps"})),
    Experiment("Markov random fields", "NMM of half of the pixels", "KL divergence, nats", -1, 1,
               random_fields({2: "NMM of half, 2000 steps", 4: "NMM of half, 500 steps",
                              8: "NMM of half, 500 steps"})),
    Experiment("Hidden fields", "NMM", "squared error", -1, 3, hidden),
    Experiment("Noisy labels", "NMM with types, cortex", "ARI", 1, 3, cortex),
    Experiment("Noisy labels", "NMM, simulated", "log score, nats", 1, 3, simulated),
    Experiment("Neighbours that differ", "NMM, relabelling", CHANCE, 1, 3,
               repelling("NMM, relabelled")),
    Experiment("Neighbours that differ", "StackedNMM, relabelling", CHANCE, 1, 3,
               repelling("stacked, relabelled")),
    Experiment("Link prediction", "NMM-DGLFRM", "average precision, points", 1, 2, links),
    Experiment("Image denoising", "NMM", "PSNR, dB", 1, 2, images("PSNR")),
    Experiment("Image denoising", "NMM", "log p, nats a value", 1, 3,
               images("best", "U-Net-widths")),
)  # fmt: skip


def against_best(rivals: Cell, ours: dict, better: int) -> tuple[str, Paired] | None:
    """The rival of the best mean among those that share two units with ours or more."""
    shared = {
        name: Paired.of(ours, values) for name, values in rivals.items() if ours.keys() & values
    }
    known = {name: found for name, found in shared.items() if len(found) > 1}
    if not known:
        return None
    best = min(known, key=lambda name: better * known[name].mean)
    return best, known[best]


def clear(gaps: list[Paired], better: int) -> tuple[int, int]:
    """Cells in which ours is better and worse, p < .05."""
    return sum(gap.clear(better) for gap in gaps), sum(gap.clear(-better) for gap in gaps)


def verdict(gaps: list[Paired], better: int, num_rivals: int) -> str:
    """
    That of the majority of clear cells, if the mean over cells and their median are on its side.
    """
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


def verdicts(files: dict[str, Rows]) -> Iterator[dict]:
    for each in EXPERIMENTS:
        cells = list(each.cells(files))
        every = (against_best(rivals, ours, each.better) for rivals, ours in cells)
        found = [pair for pair in every if pair]
        if not found:
            continue
        gaps = [gap for _, gap in found]
        anchor = each.section.lower().replace(" ", "-").replace(":", "")
        names = Counter(name for name, _ in found).most_common()
        over = "cells" if len(found) > 1 else "pairs"
        spread = Paired([gap.mean for gap in gaps]) if len(found) > 1 else gaps[0]
        yield {
            "experiment": f"[{each.section.split(':')[0]}](#{anchor})",
            "the NMM's": each.ours,
            "measure": each.measure + (", less is better" if each.better < 0 else ""),
            "best rival (cells)": ", ".join(f"{name} ({count})" for name, count in names),
            "cells": f"{len(found)}",
            "NMM minus it": f"{spread.spread(each.digits)} over {len(spread)} {over}",
            "clearly ahead, behind": ", ".join(map(str, clear(gaps, each.better))),
            "verdict": verdict(gaps, each.better, len(set().union(*(r for r, _ in cells)))),
        }
