# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The tables and the figure of links.py's results, for report.py."""

from __future__ import annotations

from pathlib import Path
from statistics import mean

import matplotlib.pyplot as plt
import torch
from common import GRAPHS, costs, difference, grouped, made, names, pick, spread, table
from references import AUTHORS_LINKS, PAPER_LINKS, PAPER_SPLITS

GUIDES = {"original": "DGLFRM", "nmm": "NMM-DGLFRM"}
MEASURES = ("AP", "AUC")
#: Rows by seed.
Part = dict[int, dict]


def graphs(rows: list[dict]) -> dict[str, str]:
    return names(GRAPHS, (row["dataset"] for row in rows))


def blocks(rows: list[dict], task: str) -> dict[tuple[str, bool], dict[str, Part]]:
    """By graph, and whether settings were chosen on the split: of every guide, rows by seed."""
    searched = grouped(pick(rows, task="search"), "dataset", "seed")
    found: dict[tuple[str, bool], dict[str, Part]] = {}
    for dataset in graphs(rows):
        for row in pick(rows, task=task, dataset=dataset):
            block = dataset, (dataset, row["seed"]) in searched
            guide = row.get("guide", task)
            found.setdefault(block, {}).setdefault(guide, {})[row["seed"]] = row
    return found


def pairs(rows: list[dict], dataset: str) -> list[tuple[dict, dict]]:
    """Rows of both guides on the same split, unless settings were chosen on it."""
    found = blocks(rows, "compare").get((dataset, False), {})
    theirs, ours = (found.get(guide, {}) for guide in GUIDES)
    return [(theirs[seed], ours[seed]) for seed in sorted(theirs.keys() & ours.keys())]


def values(part: Part, measure: str) -> list[float]:
    return [row["test"][measure] for row in part.values()]


def pooled_links(rows: list[dict]) -> str:
    """Over all splits of all graphs on which no settings were chosen, and the graphs' means."""
    lines, known = [], {dataset: pairs(rows, dataset) for dataset in graphs(rows)}
    for measure in MEASURES:
        both = [[(a["test"][measure], b["test"][measure]) for a, b in p] for p in known.values()]
        every = [pair for part in both for pair in part]
        means = [tuple(map(mean, zip(*part, strict=True))) for part in both if part]
        cells = [PAPER_LINKS.get((dataset, measure), ()) for dataset in known]
        published = [(float(a.split()[0]), float(b.split()[0])) for a, b in filter(None, cells)]
        gain = f"{sum(b > a for a, b in every)}"
        gaps = [difference(part, 2) for part in (every, means, published)]
        lines.append([measure, f"{len(every)}", gaps[0], gain, *gaps[1:]])
    head = (
        "NMM-DGLFRM minus DGLFRM | splits | all splits | splits that gain | "
        "means of the graphs | means of the graphs in the paper"
    )
    return table(head, lines)


def links(rows: list[dict]) -> str:
    """Mean ± sd over splits, and paired differences; splits of the search in rows of their own."""
    lines, reference = [], blocks(rows, "katz")
    for (dataset, searched), guides in blocks(rows, "compare").items():
        name = GRAPHS.get(dataset, dataset) + (", splits of the search" if searched else "")
        katz = reference.get((dataset, searched), {}).get("katz", {})
        for guide in [g for g in guides if g != "original"] or ["nmm"]:
            theirs, ours = guides.get("original", {}), guides.get(guide, {})
            columns, shared = (katz, theirs, ours), sorted(theirs.keys() & ours.keys())
            cells = [" / ".join(str(len(part)) for part in columns)]
            for measure in MEASURES:
                cells += [spread(values(part, measure), 2) for part in columns]
                both = [[part[seed]["test"][measure] for seed in shared] for part in columns[1:]]
                cells.append(difference(list(zip(*both, strict=True)), 2))
            lines.append([name if guide == "nmm" else f"{name}, {guide}", *cells])
    head = "graph | splits: Katz / DGLFRM / NMM-DGLFRM"
    for measure in MEASURES:
        head += "".join(f" | {measure}, {name}" for name in ("Katz", *GUIDES.values()))
        head += " | difference"
    return table(head, lines)


def against_paper(rows: list[dict]) -> str:
    """Splits, and what was measured, here and there."""
    lines, head = [], "graph | links here | in the paper"
    for (dataset, searched), guides in blocks(rows, "compare").items():
        if not searched:
            katz = pick(rows, task="katz", dataset=dataset)
            cells = [" / ".join(map(str, katz[0]["sizes"])) if katz else ""]
            cells.append(PAPER_SPLITS.get(dataset, ""))
            for measure in MEASURES:
                cells += [spread(values(guides.get(guide, {}), measure), 2) for guide in GUIDES]
                cells += PAPER_LINKS.get((dataset, measure), ("", ""))
            lines.append([GRAPHS.get(dataset, dataset), *cells])
    for measure in MEASURES:
        head += "".join(f" | {measure}, {name}" for name in GUIDES.values())
        head += "".join(f" | paper's {name}" for name in GUIDES.values())
    return table(head, lines)


def bounds(rows: list[dict]) -> str:
    """Nats a pair of nodes: as trained, and without the network's dropout."""
    lines, head = [], "graph | splits"
    for dataset, name in graphs(rows).items():
        if both := pairs(rows, dataset):
            cells = [f"{len(both)}"]
            for field in ("loss in training", "loss"):
                found = [(-a[field], -b[field]) for a, b in both]
                cells += [f"{mean(column):.4f}" for column in zip(*found, strict=True)]
                cells.append(difference(found, 4))
            lines.append([name, *cells])
    for kind in ("bound", "bound, no dropout"):
        head += f" | {kind}, DGLFRM | {kind}, NMM-DGLFRM | difference"
    return table(head, lines)


def links_searched(rows: list[dict]) -> str:
    """All that was tried: on validation links, means over the splits of the search."""
    lines, tried = [], pick(rows, task="search")
    guides = names(GUIDES, sorted({row["guide"] for row in tried}))
    for dataset, name in names(GRAPHS, sorted({row["dataset"] for row in tried})).items():
        for guide, label in guides.items():
            part = grouped(pick(tried, dataset=dataset, guide=guide), "trial")
            for _, trial in sorted(part.items()):
                settings = ", ".join(f"{k} {v}" for k, v in trial[0]["settings"].items())
                cells = [f"{mean(r['val'][m] for r in trial):.2f}" for m in MEASURES]
                cells.append(f"{-mean(r['loss'] for r in trial):.4f}")
                lines.append([name, label, settings, f"{len(trial)}", *cells])
    head = "graph | guide | settings | splits | AP | AUC | bound, no dropout"
    return table(head, lines, left=3)


def reproduced(rows: list[dict]) -> str:
    lines = []
    found = grouped(pick(rows, task="reproduce"), "dataset", "split")
    for (dataset, number), part in sorted(found.items(), key=lambda item: item[0]):
        theirs = [f"{value:.2f}" for value in AUTHORS_LINKS.get(number, ())] or ["", ""]
        here = [spread([r["test"][measure] for r in part], 2) for measure in ("AUC", "AP")]
        name = f"{GRAPHS.get(dataset, dataset)}, split_{number}"
        lines.append([name, f"{len(part)}", *theirs, *here])
    head = "graph | seeds | AUC, authors | AP, authors | AUC, here | AP, here"
    return table(head, lines)


def memberships(rows: list[dict]) -> str:
    """Mean over splits of what is left with other nodes' memberships."""
    lines = []
    for dataset, name in graphs(rows).items():
        part = [row["AP"] for row in pick(rows, task="memberships", dataset=dataset)]
        if part:
            means = (f"{mean(found[whose] for found in part):.2f}" for whose in part[0])
            lines.append([name, f"{len(part)}", *means])
    head = "AP, DGLFRM | splits | own memberships | a neighbour's | anyone's"
    return table(head, lines)


def link_cost(rows: list[dict]) -> str:
    lines = []
    for dataset, name in graphs(rows).items():
        lines += [[name, *costs(row)] for row in pick(rows, task="cost", dataset=dataset)]
    head = "graph | DGLFRM, ms | NMM-DGLFRM, ms | ratio | DGLFRM, MiB | NMM-DGLFRM, MiB"
    return table(head, lines)


TABLES = (pooled_links, links, against_paper, bounds, links_searched, reproduced, memberships)


def tables(rows: list[dict]) -> dict[str, str]:
    return made((*TABLES, link_cost), rows)


def bound_figure(rows: list[dict], path: Path, dataset: str = "nips12") -> None:
    """The bound over the steps: every split, and their mean."""
    both = pairs(rows, dataset)
    if not both:
        return
    figure, axis = plt.subplots(figsize=(5, 3.6), layout="constrained")
    for curves, name, color in zip(
        zip(*both, strict=True), GUIDES.values(), ("#D55E00", "#0072B2"), strict=True
    ):
        values = -torch.tensor([row["curve"] for row in curves])
        steps = 10 * torch.arange(1, values.shape[1] + 1)
        axis.plot(steps, values.T, color=color, lw=0.4, alpha=0.4)
        axis.plot(steps, values.mean(0), color=color, lw=1.8, label=name)
    last = -torch.tensor([row["curve"] for pair in both for row in pair])
    axis.set(xlabel="step", ylabel="evidence lower bound, nats a pair of nodes")
    axis.set(title=f"{GRAPHS[dataset]}, {len(both)} splits and their mean")
    axis.set_ylim(last[:, last.shape[1] // 8].min().item(), last.max().item() + 0.005)
    axis.legend(frameon=False, loc="lower right")
    figure.savefig(path / "link_bound.png", dpi=150)
    plt.close(figure)
