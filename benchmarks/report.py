# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
Tables and figures of the stored results. A table replaces the lines between its markers,
``<!-- name -->`` and ``<!-- end of name -->``, on the one page that has them. A page may show an
excerpt, ``<!-- name | lines: <regular expression> | columns: first, second -->``, or nothing, with
``lines: none`` or without markers. The whole table is then a file of comma-separated values, which
the page links.

    python -m benchmarks.report --documents --figures docs
"""

import csv
import io
import re
from argparse import ArgumentParser
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt

from benchmarks.crowds import tables as crowds
from benchmarks.images import tables as images
from benchmarks.latent import tables as latent
from benchmarks.links import tables as links
from benchmarks.maps import tables as maps
from benchmarks.nodes import tables as nodes
from benchmarks.on_top import tables as on_top
from benchmarks.random_fields import tables as fields
from benchmarks.scale import tables as scale
from benchmarks.shared.records import RESULTS, Files, read
from benchmarks.tabular import tables as tabular

DOCS = Path(__file__).parent.parent / "docs"
PAGES = [DOCS / "results.md", *sorted((DOCS / "results").glob("*.md"))]
ROOMS = nodes, on_top, tabular, fields, latent, crowds, maps, links, images, scale


def tables(files: Files) -> dict[str, str]:
    """Every table by its name on the pages."""
    makers = [make for room in ROOMS for make in room.TABLES]
    names = [make.__name__.replace("_", " ") for make in makers]
    if len(set(names)) < len(names):
        raise ValueError(f"two tables are called {max(names, key=names.count)}")
    return {name: make(files) for name, make in zip(names, makers, strict=True)}


def markers(text: str) -> list[str]:
    return re.findall(r"<!-- end of (.*?) -->", text)


def insert(text: str, name: str, content: str) -> str:
    """``content``, or the excerpt that is asked for, between the markers of ``name``."""

    def shown(match: re.Match) -> str:
        options = dict(part.split(": ", 1) for part in (match["options"] or "").split(" | ")[1:])
        part = excerpt(content, **options) if options else content
        return "".join([match[1], part and f"{part}\n", match["end"]])

    start = rf"<!-- {re.escape(name)}(?P<options>(?: \| [^\n]+?)?) -->\n"
    pattern = rf"({start}).*?(?P<end><!-- end of {re.escape(name)} -->)"
    return re.sub(pattern, shown, text, flags=re.DOTALL)


def cells(row: str) -> list[str]:
    r"""Cells of a line of a table. ``\|`` is a part of a cell."""
    return re.split(r"(?<!\\)\|", row)[1:-1]


def excerpt(content: str, lines: str = "", columns: str = "") -> str:
    """Lines of a table in which the expression is found, and columns in the order asked for."""
    if lines == "none":
        return ""
    head, align, *body = map(cells, content.split("\n"))
    names = [name.strip() for name in head]
    kept = columns_of(names, columns) if columns else range(len(names))
    body = [row for row in body if re.search(lines, "|".join(row).strip())]
    if not body:
        raise ValueError(f"no line of the table {' '.join(names)} has {lines}")
    table = [head, align, *body]
    return "\n".join(f"|{'|'.join(row[k] for k in kept)}|" for row in table)


def columns_of(names: list[str], asked: str) -> list[int]:
    """Places of names that are listed with commas between them, and may have commas inside."""
    kept, rest = [], asked
    while rest:
        found = [name for name in names if f"{rest}, ".startswith(f"{name}, ")]
        if not found:
            raise ValueError(f"the table {' | '.join(names)} has no column {rest}")
        longest = max(found, key=len)
        start = kept[-1] + 1 if kept and longest in names[kept[-1] + 1 :] else 0
        kept.append(names.index(longest, start))  # of equal names the next one
        rest = rest[len(longest) + 2 :]
    return kept


def file_of(name: str) -> str:
    """The file of a table, as pages of ``docs/results`` link it."""
    return f"rows/{name.replace(' ', '-')}.csv"


def whole(texts: dict[Path, str], made: dict[str, str]) -> dict[Path, str]:
    """Files of comma-separated values: tables of which a page shows an excerpt or nothing."""
    found = {}
    for path, text in texts.items():
        for name in re.findall(r"<!-- ([^|\n]*?) \| \w+: ", text):
            if f"({file_of(name)})" not in text:
                raise ValueError(f"{path.name} shows an excerpt of {name}: link {file_of(name)}")
        for name in [name for name in made if f"({file_of(name)})" in text]:
            rows = [[cell.strip().replace("\\|", "|") for cell in cells(row)]
                    for k, row in enumerate(made[name].split("\n")) if k != 1]  # fmt: skip
            file = io.StringIO()
            csv.writer(file, lineterminator="\n").writerows(rows)
            found[path.parent / file_of(name)] = file.getvalue()
    return found


def written(texts: dict[Path, str], made: dict[str, str]) -> dict[Path, str]:
    """The pages with all tables; an error if markers and tables are not the same."""
    marked = [name for text in texts.values() for name in markers(text)]
    linked = [name for name in made if any(f"({file_of(name)})" in t for t in texts.values())]
    for name in made:
        if (number := marked.count(name)) != 1 and (number or name not in linked):
            error = f"{number} pages have the markers <!-- {name} -->: exactly one must"
            raise ValueError(f"{error}, or a page links {file_of(name)}")
    if unknown := set(marked) - made.keys():
        raise ValueError(f"no table is called {', '.join(sorted(unknown))}")
    for name, content in made.items():
        texts = {path: insert(text, name, content) for path, text in texts.items()}
    return texts


def draw(files: Files, folder: Path) -> None:
    """All figures, into a folder."""
    matplotlib.use("Agg")
    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    folder.mkdir(parents=True, exist_ok=True)
    for room in (tabular, fields, scale):
        for name, make in room.FIGURES.items():
            figure = make(files)
            figure.savefig(folder / name, dpi=150)
            plt.close(figure)


def main(argv: list[str] | None = None) -> dict[str, str]:
    parser = ArgumentParser(description="Tables and figures of the stored results")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the stored rows")
    parser.add_argument("--documents", action="store_true", help="write the tables into the pages")
    parser.add_argument("--figures", type=Path, help="folder for the figures")
    args = parser.parse_args(argv)
    files = {path.stem: read(path) for path in args.results.glob("*.jsonl")}
    made = tables(files)
    for name, content in made.items():
        print(f"\n{name}\n{content}")
    if args.documents:
        pages = written({path: path.read_text() for path in PAGES}, made)
        for path, text in (pages | whole(pages, made)).items():
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
    if args.figures:
        draw(files, args.figures)
    return made


if __name__ == "__main__":
    main()
