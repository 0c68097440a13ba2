# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""The tables of links.py's results, for report.py."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import mean

from benchmarks.shared.common import GRAPHS, grouped, pick
from benchmarks.shared.references import AUTHORS_LINKS, PAPER_LINKS, PAPER_SPLITS
from benchmarks.shared.writing import Paired, Rows, costs, made, scores, sections, spread

GUIDES = {"original": "DGLFRM", "nmm": "NMM-DGLFRM"}
#: Of links_rivals.py.
RIVALS = {"vgae": "VGAE", "sage": "GraphSAGE"}
MEASURES = ("AP", "AUC")


def tables(rows: Rows) -> dict[str, str]:
    compared = {pooled_links: 1, links: 1, against_paper: 1, bounds: 1}
    return made(compared | {links_searched: 3, reproduced: 1, memberships: 1, link_cost: 1}, rows)


def blocks(rows: Rows, rivals: bool = False) -> dict[tuple[str, bool], Rows]:
    """
    By graph, and whether settings were chosen on the split: what was measured on test links, with
    Katz's index as a guide; the rivals, which have a table of their own, only if asked for.
    """
    searched = grouped(pick(rows, task="search"), "dataset", "seed")
    found = [r | r["test"] for r in rows if r["task"] in ("compare", "katz")]
    found = [row for row in found if rivals or row.get("guide") not in RIVALS]
    for row in found:
        row.setdefault("guide", "katz")
        row["searched"] = (row["dataset"], row["seed"]) in searched
    return sections(found, dataset=GRAPHS, searched=(True, False))


def compared(rows: Rows) -> dict[str, Rows]:
    """By graph: splits on which no settings were chosen."""
    return {graph: part for (graph, searched), part in blocks(rows).items() if not searched}


def gap(part: Rows, field: str, guide: str = "nmm") -> Paired:
    """Of two guides on the same splits."""
    return Paired.of_rows(pick(part, guide=guide), pick(part, guide="original"), field)


def both(part: Rows, field: str) -> list[list[float]]:
    """Of each guide, on the splits that both have."""
    theirs, ours = (scores(part, field, guide=guide) for guide in GUIDES)
    return [[values[seed] for seed in theirs if seed in ours] for values in (theirs, ours)]


def pooled(rows: Rows, measure: str) -> Paired:
    """On every split of every graph."""
    return Paired([each for part in compared(rows).values() for each in gap(part, measure).gaps])


def published(measure: str) -> dict[str, tuple[float, float]]:
    """Means of both guides in the paper, by graph."""
    cells = {graph: both for (graph, name), both in PAPER_LINKS.items() if name == measure}
    return {graph: tuple(float(cell.split()[0]) for cell in both) for graph, both in cells.items()}


def pooled_links(rows: Rows) -> Iterator[dict]:
    """Over all splits of all graphs on which no settings were chosen, and the graphs' means."""
    for measure in MEASURES:
        every, parts, paper = pooled(rows, measure), compared(rows).values(), published(measure)
        graphs = [found.mean for part in parts if (found := gap(part, measure))]
        stated = [paper[name] for (name,) in grouped(rows, "dataset") if name in paper]
        yield {
            "NMM-DGLFRM minus DGLFRM": measure,
            "splits": f"{len(every)}",
            "all splits": every.text(2),
            "splits that gain": f"{sum(each > 0 for each in every.gaps)}",
            "means of the graphs": Paired(graphs).text(2),
            "means of the graphs in the paper": Paired([b - a for a, b in stated]).text(2),
        }


def links(rows: Rows) -> Iterator[dict]:
    """Mean ± sd over splits, and paired differences; splits of the search in rows of their own."""
    for (graph, searched), part in blocks(rows).items():
        name = graph + ", splits of the search" * searched
        known = [guide for (guide,) in grouped(part, "guide") if guide not in ("katz", "original")]
        for guide in known or ["nmm"]:
            columns = {"Katz": "katz", "DGLFRM": "original", "NMM-DGLFRM": guide}
            numbers = (str(len(scores(part, "seed", guide=each))) for each in columns.values())
            line = {"graph": name if guide == "nmm" else f"{name}, {guide}"}
            line[f"splits: {' / '.join(columns)}"] = " / ".join(numbers)
            for measure in MEASURES:
                for column, each in columns.items():
                    values = scores(part, measure, guide=each).values()
                    line[f"{measure}, {column}"] = spread(values, 2)
                line[measure, "difference"] = gap(part, measure, guide).text(2)
            yield line


def against_paper(rows: Rows) -> Iterator[dict]:
    """Splits, and what was measured, here and there."""
    for graph, part in compared(rows).items():
        dataset, sizes = part[0]["dataset"], next((r["sizes"] for r in part if "sizes" in r), [])
        line = {"graph": graph, "links here": " / ".join(map(str, sizes))}
        line["in the paper"] = PAPER_SPLITS.get(dataset, "")
        for measure in MEASURES:
            paper = PAPER_LINKS.get((dataset, measure), ("", ""))
            for guide, name in GUIDES.items():
                line[f"{measure}, {name}"] = spread(scores(part, measure, guide=guide).values(), 2)
            for name, value in zip(GUIDES.values(), paper, strict=True):
                line[measure, f"paper's {name}"] = value
        yield line


def bounds(rows: Rows) -> Iterator[dict]:
    """Nats a pair of nodes: as trained, and without the network's dropout."""
    for graph, part in compared(rows).items():
        if number := len(gap(part, "loss")):
            line = {"graph": graph, "splits": f"{number}"}
            for field, bound in (("loss in training", "bound"), ("loss", "bound, no dropout")):
                for name, values in zip(GUIDES.values(), both(part, field), strict=True):
                    line[f"{bound}, {name}"] = f"{-mean(values):.4f}"
                theirs, ours = (pick(part, guide=guide) for guide in GUIDES)
                line[bound, "difference"] = Paired.of_rows(theirs, ours, field).text(4)
            yield line


def links_searched(rows: Rows) -> Iterator[dict]:
    """All that was tried: on validation links, means over the splits of the search."""
    names = GUIDES | RIVALS
    found = sections(pick(rows, task="search"), dataset=GRAPHS, guide=names, trial=None)
    for (graph, guide, _), part in found.items():
        yield {
            "graph": graph,
            "guide": guide,
            "settings": ", ".join(f"{k} {v}" for k, v in part[0]["settings"].items()),
            "splits": f"{len(part)}",
            "AP": f"{mean(row['val']['AP'] for row in part):.2f}",
            "AUC": f"{mean(row['val']['AUC'] for row in part):.2f}",
            "bound, no dropout": bound_of(part),
        }


def bound_of(part: Rows) -> str:
    """Rivals have none."""
    return f"{-mean(row['loss'] for row in part):.4f}" if "loss" in part[0] else ""


def reproduced(rows: Rows) -> Iterator[dict]:
    """On splits of the authors, with their settings."""
    found = sections(pick(rows, task="reproduce"), dataset=GRAPHS, split=None)
    for (graph, split), part in found.items():
        auc, ap = AUTHORS_LINKS.get(split, ("", ""))
        yield {
            "graph": f"{graph}, split_{split}",
            "seeds": f"{len(part)}",
            "AUC, authors": f"{auc}",
            "AP, authors": f"{ap}",
            "AUC, here": spread([row["test"]["AUC"] for row in part], 2),
            "AP, here": spread([row["test"]["AP"] for row in part], 2),
        }


def memberships(rows: Rows) -> Iterator[dict]:
    """Mean over splits of what is left with other nodes' memberships."""
    for (graph,), part in sections(pick(rows, task="memberships"), dataset=GRAPHS).items():
        line = {"AP, DGLFRM": graph, "splits": f"{len(part)}"}
        for whose in part[0]["AP"]:
            heading = "own memberships" if whose == "own" else whose
            line[heading] = f"{mean(row['AP'][whose] for row in part):.2f}"
        yield line


def link_cost(rows: Rows) -> Iterator[dict]:
    """A step with either guide."""
    for (graph,), part in sections(pick(rows, task="cost"), dataset=GRAPHS).items():
        for row in part:
            yield {"graph": graph} | costs(row, GUIDES)
