# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
Tables and figures of the stored results. A table replaces the lines between its markers,
``<!-- name -->`` and ``<!-- end of name -->``, on the one page that has them.

    python -m benchmarks.report --documents --figures docs
"""

import re
from argparse import ArgumentParser
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt

from benchmarks.crowds import tables as crowds
from benchmarks.images import tables as images
from benchmarks.latent import tables as latent
from benchmarks.links import tables as links
from benchmarks.nodes import tables as nodes
from benchmarks.on_top import tables as on_top
from benchmarks.random_fields import tables as fields
from benchmarks.scale import tables as scale
from benchmarks.shared.records import RESULTS, Files, read
from benchmarks.tabular import tables as tabular

DOCS = Path(__file__).parent.parent / "docs"
PAGES = [DOCS / "results.md", DOCS / "node-classification.md"]
PAGES += sorted((DOCS / "results").glob("*.md"))
ROOMS = nodes, on_top, tabular, fields, latent, crowds, links, images, scale


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
    """``content`` between the markers of ``name``, if the text has them."""
    pattern = rf"(<!-- {re.escape(name)} -->\n).*?(<!-- end of {re.escape(name)} -->)"
    return re.sub(pattern, lambda m: f"{m[1]}{content}\n{m[2]}", text, flags=re.DOTALL)


def written(texts: dict[Path, str], made: dict[str, str]) -> dict[Path, str]:
    """The pages with all tables; an error if markers and tables are not the same."""
    marked = [name for text in texts.values() for name in markers(text)]
    for name in made:
        if (number := marked.count(name)) != 1:
            raise ValueError(f"{number} pages have the markers <!-- {name} -->: exactly one must")
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
    for room in (nodes, tabular, fields, links, images, scale):
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
        for path, text in written({path: path.read_text() for path in PAGES}, made).items():
            path.write_text(text)
    if args.figures:
        draw(files, args.figures)
    return made


if __name__ == "__main__":
    main()
