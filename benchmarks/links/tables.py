# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Tables and figures of docs/results/fields.md."""

from pathlib import Path

import pandas as pd

from benchmarks.shared import tables as shown
from benchmarks.shared.records import Files, pick
from benchmarks.shared.tables import GRAPHS, Paired, average, first, ordered, spread, table

OURS, THEIRS = "NMM-DGLFRM", "DGLFRM"
METHODS = {"katz": "Katz", "vgae": "VGAE", "sage": "GraphSAGE", "original": THEIRS, "nmm": OURS}
MEASURES = ("AP", "AUC")
GUIDE = {"katz": "katz", "anchor": "vgae", "reproduce": "original"}  #: of tasks that name none


def named(rows: list[dict]) -> pd.DataFrame:
    """Rows as a frame with their graphs, methods and bounds, and scores with a minus sign."""
    fields = ("dataset", "guide", "seed", "task", "split", *MEASURES, "loss", "loss in training")
    found = shown.frame(rows)
    found = found.reindex(columns=list(dict.fromkeys([*found, *fields])))
    found["graph"] = ordered(found["dataset"], GRAPHS)
    found["method"] = ordered(found["guide"], METHODS)
    minus = {"bound": "loss", "bound in training": "loss in training", "-AP": "AP", "-AUC": "AUC"}
    return found.assign(**{name: -found[field] for name, field in minus.items()})


def tested(files: Files, *tasks: str) -> pd.DataFrame:
    """Scores of tasks on test links, and whether settings were searched on the split."""
    rows = files["links"]
    searched = {(row["dataset"], row["seed"]) for row in pick(rows, task="search")}
    found = named([{"guide": GUIDE.get(r["task"])} | r for r in rows if r["task"] in tasks])
    splits = zip(found["dataset"], found["seed"], strict=True)
    names = ["of the search" if split in searched else "new" for split in splits]
    found["splits"] = ordered(pd.Series(names, dtype=object), ("new", "of the search"))
    return found


def compared(files: Files) -> pd.DataFrame:
    """Both guides on splits that no setting was searched on."""
    found = tested(files, "compare")
    return found[found["method"].isin([THEIRS, OURS]) & (found["splits"] == "new")]


def beside_published(files: Files) -> pd.DataFrame:
    """Our scores, each with published ones as text and number: ``AP published``, ``AP number``."""
    rows = tested(files, "compare", "reproduce", "anchor")
    rows = rows[(rows["task"] != "compare") | (rows["splits"] == "new")]
    known = pd.read_csv(Path(__file__).with_name("published.csv"), comment="#")
    for measure in MEASURES:
        known[f"{measure} number"] = known[measure].str.split().str[0].astype(float)
    keys = ["task", "dataset", "guide", "split"]
    return rows.astype({"split": float}).merge(known, on=keys, suffixes=("", " published"))


def gains(rows: pd.DataFrame, field: str) -> list[Paired]:
    """NMM-DGLFRM minus DGLFRM, by graph."""
    graphs = (part for _, part in shown.groups(rows, ["graph"]))
    guides = ([part[part["method"] == name] for name in (OURS, THEIRS)] for part in graphs)
    return [gap for both in guides if (gap := Paired.rows(*both, field))]


def pooled_links(files: Files) -> str:
    paper, lines = beside_published(files).query("source == 'paper'"), []
    for measure in MEASURES:
        here, there = gains(compared(files), measure), gains(paper, f"{measure} number")
        every = Paired([gap for graph in here for gap in graph.gaps])
        gaining = f"{sum(gap > 0 for gap in every.gaps)}"
        line = {"NMM-DGLFRM minus DGLFRM": measure, "splits": f"{len(every)}"}
        line |= {"all splits": every.text(2), "splits that gain": gaining}
        for name, graphs in {"": here, " in the paper": there}.items():
            line[f"means of the graphs{name}"] = Paired([graph.mean for graph in graphs]).text(2)
        lines.append(line)
    return shown.markdown(lines)


def link_rivals(files: Files) -> str:
    cells = {"number": shown.count, "best step": average("step", ".0f")}
    cells |= {measure: spread(measure, 2) for measure in MEASURES}
    cells |= {f"{m}, NMM-DGLFRM minus it": shown.against(OURS, f"-{m}", 2) for m in MEASURES}
    return table(tested(files, "compare", "katz"), ["splits", "graph", "method"], cells)


def published_links(files: Files) -> str:
    katz = pick(files["links"], task="katz")
    sizes = {row["dataset"]: " / ".join(map(str, row["sizes"])) for row in katz}
    rows, down = beside_published(files), ["graph", "method", "source"]
    rows["sizes"] = rows["dataset"].map(sizes).where(rows["source"] == "paper")
    cells = {"number": shown.count, "links": first("sizes"), "links, published": first("links")}
    for measure in MEASURES:
        ours = rows.groupby(down, observed=True)[measure].transform
        rows[f"{measure} above"] = (rows[f"{measure} number"] - ours("mean")) / ours("std")
        cells |= {measure: spread(measure, 2)}
        cells |= {f"{measure}, published": first(f"{measure} published")}
        cells[measure, "above ours, sd"] = first(f"{measure} above", "+.1f")
    return table(rows, down, cells)


def bounds(files: Files) -> str:
    cells = {"splits": shown.count}
    for name, field in {"": "bound in training", ", no dropout": "bound"}.items():
        cells[f"bound{name}"] = average(field, ".4f")
        cells[f"minus DGLFRM{name}"] = shown.against(THEIRS, field, 4)
    return table(compared(files), ["graph", "method"], cells)


TABLES = pooled_links, link_rivals, published_links, bounds
