# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The tables and the figure of link_prediction.py's results, for report.py."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import mean

import matplotlib.pyplot as plt
import torch
from comparison import Table, difference, names, spread

GRAPHS = {"nips12": "NIPS12", "yeast": "Yeast", "cora": "Cora", "citeseer": "CiteSeer",
          "pubmed": "PubMed"}  # fmt: skip
GUIDES = {"original": "DGLFRM", "nmm": "NMM-DGLFRM"}
MEASURES = ("AP", "AUC")
#: Rows by seed.
Part = dict[int, dict]
#: DGLFRM, NMM-DGLFRM: average precision in the paper's main text, AUC in its appendix.
PAPER = {
    ("nips12", "AP"): ("88.66 ± 0.56", "89.82 ± 0.64"),
    ("yeast", "AP"): ("84.03 ± 0.69", "84.92 ± 0.51"),
    ("cora", "AP"): ("93.44 ± 0.40", "94.16 ± 0.47"),
    ("citeseer", "AP"): ("94.31 ± 0.36", "94.75 ± 0.38"),
    ("pubmed", "AP"): ("96.47 ± 0.18", "96.45 ± 0.14"),
    ("nips12", "AUC"): ("86.47 ± 0.83", "86.88 ± 0.67"),
    ("yeast", "AUC"): ("77.97 ± 0.79", "79.06 ± 0.72"),
    ("cora", "AUC"): ("93.00 ± 0.34", "93.48 ± 0.41"),
    ("citeseer", "AUC"): ("93.79 ± 0.42", "93.81 ± 0.50"),
    ("pubmed", "AUC"): ("96.11 ± 0.19", "96.05 ± 1.16"),
}  # fmt: skip
#: Links for training, validation and testing in the paper's table 1.
SIZES = {"nips12": "2665 / 156 / 313", "yeast": "5650 / 332 / 664", "cora": "4616 / 271 / –",
         "citeseer": "4023 / 236 / 473", "pubmed": "37689 / 2216 / 4433"}  # fmt: skip
#: AUC and AP in the README of nikhil-dce/SBM-meet-GNN.
AUTHORS = {0: (92.79, 93.14), 1: (92.63, 93.48)}


def graphs(rows: list[dict]) -> dict[str, str]:
    return names(GRAPHS, (row["dataset"] for row in rows))


def blocks(rows: list[dict], task: str) -> dict[tuple[str, bool], dict[str, Part]]:
    """By graph, and whether settings were chosen on the split: of every guide, rows by seed."""
    searched = {(r["dataset"], r["seed"]) for r in rows if r["task"] == "search"}
    found: dict[tuple[str, bool], dict[str, Part]] = {}
    for dataset in graphs(rows):
        for row in rows:
            if row["task"] == task and row["dataset"] == dataset:
                block = dataset, (dataset, row["seed"]) in searched
                guide = row.get("guide", task)
                found.setdefault(block, {}).setdefault(guide, {})[row["seed"]] = row
    return found


def pairs(rows: list[dict], dataset: str) -> list[tuple[dict, dict]]:
    """Rows of both guides on the same split, unless settings were chosen on it."""
    found = blocks(rows, "compare").get((dataset, False), {})
    theirs, ours = (found.get(guide, {}) for guide in GUIDES)
    return [(theirs[seed], ours[seed]) for seed in sorted(theirs.keys() & ours.keys())]


def pooled(rows: list[dict], table: Table) -> str:
    """Over all splits of all graphs on which no settings were chosen, and the graphs' means."""
    lines = []
    for measure in MEASURES:
        both = {dataset: [(a["test"][measure], b["test"][measure]) for a, b in pairs(rows, dataset)]
                for dataset in graphs(rows)}  # fmt: skip
        every = [pair for part in both.values() for pair in part]
        means = [tuple(map(mean, zip(*part, strict=True))) for part in both.values() if part]
        gains = [measure, f"{len(every)}", difference(every, 2)]
        gains += [f"{sum(b > a for a, b in every)}", difference(means, 2)]
        published = [tuple(float(cell.split()[0]) for cell in PAPER[dataset, measure])
                     for dataset in both if (dataset, measure) in PAPER]  # fmt: skip
        lines.append([*gains, difference(published, 2)])
    head = ["NMM-DGLFRM minus DGLFRM", "splits", "all splits", "splits that gain",
            "means of the graphs", "means of the graphs in the paper"]  # fmt: skip
    return table(head, lines)


def links(rows: list[dict], table: Table) -> str:
    """Mean ± sd over splits, and paired differences; splits of the search in rows of their own."""
    lines, reference = [], blocks(rows, "katz")
    for (dataset, searched), guides in blocks(rows, "compare").items():
        name = GRAPHS.get(dataset, dataset) + (", splits of the search" if searched else "")
        katz = reference.get((dataset, searched), {}).get("katz", {})
        for guide in [g for g in guides if g != "original"] or ["nmm"]:
            label = name if guide == "nmm" else f"{name}, {guide}"
            columns = katz, guides.get("original", {}), guides.get(guide, {})
            lines.append([label, *compared(*columns)])
    head = ["graph", "splits: Katz / DGLFRM / NMM-DGLFRM"]
    for measure in MEASURES:
        columns = ["Katz", *GUIDES.values()]
        head += [f"{measure}, {name}" for name in columns] + ["difference"]
    return table(head, lines)


def compared(katz: Part, theirs: Part, ours: Part) -> list[str]:
    columns = katz, theirs, ours
    cells = [" / ".join(str(len(part)) for part in columns)]
    for measure in MEASURES:
        values = [{s: row["test"][measure] for s, row in part.items()} for part in columns]
        cells += [spread(list(part.values()), 2) for part in values]
        shared = sorted(theirs.keys() & ours.keys())
        cells.append(difference([(values[1][s], values[2][s]) for s in shared], 2))
    return cells


def against_paper(rows: list[dict], table: Table) -> str:
    """Splits, and what was measured, here and there."""
    lines = []
    for (dataset, searched), guides in blocks(rows, "compare").items():
        if searched:
            continue
        sizes = [r["sizes"] for r in rows if r["task"] == "katz" and r["dataset"] == dataset]
        cells = [" / ".join(map(str, sizes[0])) if sizes else "", SIZES.get(dataset, "")]
        for measure in MEASURES:
            for guide in GUIDES:
                part = [row["test"][measure] for row in guides.get(guide, {}).values()]
                cells.append(spread(part, 2))
            cells += PAPER.get((dataset, measure), ("", ""))
        lines.append([GRAPHS.get(dataset, dataset), *cells])
    head = ["graph", "links here", "in the paper"]
    for measure in MEASURES:
        head += [f"{measure}, {name}" for name in GUIDES.values()]
        head += [f"paper's {name}" for name in GUIDES.values()]
    return table(head, lines)


def bounds(rows: list[dict], table: Table) -> str:
    """Nats a pair of nodes: as trained, and without the network's dropout."""
    lines = []
    for dataset, name in graphs(rows).items():
        both = pairs(rows, dataset)
        if not both:
            continue
        cells = [f"{len(both)}"]
        for field in ("loss in training", "loss"):
            values = [(-a[field], -b[field]) for a, b in both]
            cells += [f"{mean(column):.4f}" for column in zip(*values, strict=True)]
            cells.append(difference(values, 4))
        lines.append([name, *cells])
    head = ["graph", "splits"]
    for kind in ("bound", "bound, no dropout"):
        head += [f"{kind}, DGLFRM", f"{kind}, NMM-DGLFRM", "difference"]
    return table(head, lines)


def searched(rows: list[dict], table: Table) -> str:
    """All that was tried: on validation links, means over the splits of the search."""
    trials: dict[tuple, list[dict]] = {}
    for row in rows:
        if row["task"] == "search":
            key = row["dataset"], row["guide"], row["trial"]
            trials.setdefault(key, []).append(row)
    lines = []
    for (dataset, guide, _), part in sorted(trials.items(), key=lambda item: place(item[0])):
        settings = ", ".join(f"{k} {v}" for k, v in part[0]["settings"].items())
        cells = [f"{mean(r['val'][m] for r in part):.2f}" for m in MEASURES]
        cells.append(f"{-mean(r['loss'] for r in part):.4f}")
        lines.append([GRAPHS.get(dataset, dataset), GUIDES.get(guide, guide), settings,
                      f"{len(part)}", *cells])  # fmt: skip
    head = ["graph", "guide", "settings", "splits", "AP", "AUC", "bound, no dropout"]
    return table(head, lines, left=3)


def place(key: Sequence) -> tuple:
    dataset, guide, trial = key
    orders = (list(GRAPHS), dataset), (list(GUIDES), guide)
    return (*(o.index(k) if k in o else len(o) for o, k in orders), dataset, guide, trial)


def reproduced(rows: list[dict], table: Table) -> str:
    lines = []
    found = [r for r in rows if r["task"] == "reproduce"]
    for dataset, number in sorted({(r["dataset"], r["split"]) for r in found}):
        part = [r for r in found if (r["dataset"], r["split"]) == (dataset, number)]
        cells = [f"{len(part)}"]
        cells += [f"{value:.2f}" for value in AUTHORS.get(number, ())] or ["", ""]
        for measure in ("AUC", "AP"):
            cells.append(spread([r["test"][measure] for r in part], 2))
        lines.append([f"{GRAPHS.get(dataset, dataset)}, split_{number}", *cells])
    head = ["graph", "seeds", "AUC, authors", "AP, authors", "AUC, here", "AP, here"]
    return table(head, lines)


def memberships(rows: list[dict], table: Table) -> str:
    """Mean over splits of what is left with other nodes' memberships."""
    lines = []
    for dataset, name in graphs(rows).items():
        part = [r["AP"] for r in rows if r["task"] == "memberships" and r["dataset"] == dataset]
        if part:
            means = (f"{mean(r[whose] for r in part):.2f}" for whose in part[0])
            lines.append([name, f"{len(part)}", *means])
    head = ["AP, DGLFRM", "splits", "own memberships", "a neighbour's", "anyone's"]
    return table(head, lines)


def link_cost(rows: list[dict], table: Table) -> str:
    lines = []
    for dataset, name in graphs(rows).items():
        for row in rows:
            if row["task"] == "cost" and row["dataset"] == dataset:
                cells = [f"{1e3 * value:.0f}" for value in row["seconds"].values()]
                memory = [f"{value:.0f}" for value in row["MiB"].values()]
                lines.append([name, *cells, f"{row['ratio']:.2f}", *memory])
    head = ["graph", "DGLFRM, ms", "NMM-DGLFRM, ms", "ratio", "DGLFRM, MiB", "NMM-DGLFRM, MiB"]
    return table(head, lines)


def tables(rows: list[dict], table: Table) -> dict[str, str]:
    found = {"pooled links": pooled, "links": links, "against paper": against_paper,
             "bounds": bounds, "links searched": searched, "reproduced": reproduced,
             "memberships": memberships, "link cost": link_cost}  # fmt: skip
    return {name: make(rows, table) for name, make in found.items()}


def bound_figure(rows: list[dict], path: Path, dataset: str = "nips12") -> None:
    """The bound over the steps: every split, and their mean."""
    both = pairs(rows, dataset)
    if not both:
        return
    figure, axis = plt.subplots(figsize=(5, 3.6), layout="constrained")
    for curves, name, color in zip(
        zip(*both, strict=True), ("DGLFRM", "NMM-DGLFRM"), ("#D55E00", "#0072B2"), strict=True
    ):
        values = -torch.tensor([row["curve"] for row in curves])
        steps = 10 * torch.arange(1, values.shape[1] + 1)
        axis.plot(steps, values.T, color=color, lw=0.4, alpha=0.4)
        axis.plot(steps, values.mean(0), color=color, lw=1.8, label=name)
    last = -torch.tensor([row["curve"] for pair in both for row in pair])
    axis.set(xlabel="step", ylabel="evidence lower bound, nats a pair of nodes",
             title=f"{GRAPHS[dataset]}, {len(both)} splits and their mean",
             ylim=(last[:, last.shape[1] // 8].min().item(), last.max().item() + 0.005),
             )  # fmt: skip
    axis.legend(frameon=False, loc="lower right")
    figure.savefig(path / "link_bound.png", dpi=150)
    plt.close(figure)
