# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The tables and the figure of link_prediction.py's results, for report.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import mean, stdev

import matplotlib.pyplot as plt
import torch
from scipy.stats import ttest_rel

GRAPHS = {"nips12": "NIPS12", "yeast": "Yeast", "cora": "Cora", "citeseer": "CiteSeer",
          "pubmed": "PubMed"}  # fmt: skip
#: Average precision in the paper's table 5: DGLFRM, NMM-DGLFRM.
PAPER = {
    "nips12": ("88.66 ± 0.56", "89.82 ± 0.64"), "yeast": ("84.03 ± 0.69", "84.92 ± 0.51"),
    "cora": ("93.44 ± 0.40", "94.16 ± 0.47"), "citeseer": ("94.31 ± 0.36", "94.75 ± 0.38"),
    "pubmed": ("96.47 ± 0.18", "96.45 ± 0.14"),
}  # fmt: skip
#: Links for training, validation and testing in the paper's table 1.
SIZES = {"nips12": "2665 / 156 / 313", "yeast": "5650 / 332 / 664", "cora": "4616 / 271 / –",
         "citeseer": "4023 / 236 / 473", "pubmed": "37689 / 2216 / 4433"}  # fmt: skip
#: AUC and AP in the README of nikhil-dce/SBM-meet-GNN.
AUTHORS = {0: (92.79, 93.14), 1: (92.63, 93.48)}


def pairs(rows: list[dict], dataset: str) -> list[tuple[dict, dict]]:
    """Rows of both guides on the same split, unless settings were chosen on it."""
    rows = [r for r in rows if r["dataset"] == dataset]
    searched = {r["seed"] for r in rows if r["task"] == "search"}
    part = [r for r in rows if r["task"] == "compare" and r["seed"] not in searched]
    found = {(r["guide"], r["seed"]): r for r in part}
    seeds = sorted(s for g, s in found if g == "original" and ("nmm", s) in found)
    return [(found["original", s], found["nmm", s]) for s in seeds]


def difference(values: list[tuple[float, float]], digits: int) -> str:
    """Mean of NMM minus original, and the p-value of a paired t-test."""
    theirs, ours = zip(*values, strict=True)
    p = ttest_rel(ours, theirs).pvalue
    mark = "p < .001" if p < 0.001 else f"p = {p:.3f}"
    return f"{mean(ours) - mean(theirs):+.{digits}f} ({mark})"


def links(rows: list[dict], table: Callable[..., str]) -> str:
    """Mean ± sd over splits, and paired differences."""
    lines = []
    for dataset, name in GRAPHS.items():
        both = pairs(rows, dataset)
        if len(both) < 3:
            continue
        cells = [str(len(both))]
        for measure in ("AP", "AUC"):
            values = [(a["test"][measure], b["test"][measure]) for a, b in both]
            for column in zip(*values, strict=True):
                cells.append(f"{mean(column):.2f} ± {stdev(column):.2f}")
            cells.append(difference(values, 2))
        lines.append([name, *cells])
    head = ["graph", "splits"]
    for measure in ("AP", "AUC"):
        head += [f"{measure}, DGLFRM", f"{measure}, NMM-DGLFRM", "difference"]
    return table(head, lines)


def against_paper(rows: list[dict], table: Callable[..., str]) -> str:
    """Splits and average precision, here and there, and a reference on the splits here."""
    lines = []
    for dataset, name in GRAPHS.items():
        both = pairs(rows, dataset)
        seeds = {pair[0]["seed"] for pair in both}
        reference = [r for r in rows if r["task"] == "katz"
                     and r["dataset"] == dataset and r["seed"] in seeds]  # fmt: skip
        if len(both) < 3 or not reference:
            continue
        cells = [" / ".join(map(str, reference[0]["sizes"])), SIZES[dataset]]
        columns = [[r["test"]["AP"] for r in column] for column in zip(*both, strict=True)]
        for column in ([r["test"]["AP"] for r in reference], *columns):
            cells.append(f"{mean(column):.2f} ± {stdev(column):.2f}")
        lines.append([name, *cells, *PAPER[dataset]])
    head = ["graph", "links here", "in the paper", "AP, Katz", "DGLFRM", "NMM-DGLFRM",
            "paper's DGLFRM", "paper's NMM-DGLFRM"]  # fmt: skip
    return table(head, lines)


def bounds(rows: list[dict], table: Callable[..., str]) -> str:
    """Nats a pair of nodes: as trained, and without the network's dropout."""
    lines = []
    for dataset, name in GRAPHS.items():
        both = pairs(rows, dataset)
        if len(both) < 3:
            continue
        cells = []
        for field in ("loss in training", "loss"):
            values = [(-a[field], -b[field]) for a, b in both]
            cells += [f"{mean(column):.4f}" for column in zip(*values, strict=True)]
            cells.append(difference(values, 4))
        lines.append([name, *cells])
    head = ["graph"]
    for kind in ("bound", "bound, no dropout"):
        head += [f"{kind}, DGLFRM", f"{kind}, NMM-DGLFRM", "difference"]
    return table(head, lines)


def reproduced(rows: list[dict], table: Callable[..., str]) -> str:
    lines = []
    for number, published in AUTHORS.items():
        part = [r for r in rows if r["task"] == "reproduce" and r["split"] == number]
        if len(part) > 1:
            cells = [f"{value:.2f}" for value in published]
            for measure in ("AUC", "AP"):
                values = [r["test"][measure] for r in part]
                cells.append(f"{mean(values):.2f} ± {stdev(values):.2f}")
            lines.append([f"split_{number}", *cells])
    head = ["Cora", "AUC, authors", "AP, authors", "AUC, here", "AP, here"]
    return table(head, lines)


def memberships(rows: list[dict], table: Callable[..., str]) -> str:
    """Mean over splits of what is left with other nodes' memberships."""
    lines = []
    for dataset, name in GRAPHS.items():
        part = [r["AP"] for r in rows if r["task"] == "memberships" and r["dataset"] == dataset]
        if part:
            lines.append([name, *(f"{mean(r[whose] for r in part):.2f}" for whose in part[0])])
    head = ["AP, DGLFRM", "own memberships", "a neighbour's", "anyone's"]
    return table(head, lines)


def link_cost(rows: list[dict], table: Callable[..., str]) -> str:
    lines = []
    for dataset, name in GRAPHS.items():
        for row in rows:
            if row["task"] == "cost" and row["dataset"] == dataset:
                cells = [f"{1e3 * value:.0f}" for value in row["seconds"].values()]
                memory = [f"{value:.0f}" for value in row["MiB"].values()]
                lines.append([name, *cells, f"{row['ratio']:.2f}", *memory])
    head = ["graph", "DGLFRM, ms", "NMM-DGLFRM, ms", "ratio", "DGLFRM, MiB", "NMM-DGLFRM, MiB"]
    return table(head, lines)


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
