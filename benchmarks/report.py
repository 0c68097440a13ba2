# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
Tables and figures from the results that are committed:

    python benchmarks/report.py                               # prints them
    python benchmarks/report.py --documents --figures docs    # and writes them into the documents

Tables replace what stands between their markers. Every table has its place in one document, and
--documents takes other files than the project's too.
"""

from __future__ import annotations

import json
import re
from argparse import ArgumentParser
from pathlib import Path

import matplotlib

from benchmarks import claims, figures, verdicts
from benchmarks.images import claims as images_claims
from benchmarks.images import joint_tables as images_joint_tables
from benchmarks.images import tables as images_tables
from benchmarks.latent import annotators_tables, hidden_tables
from benchmarks.links import deviations_tables
from benchmarks.links import rivals_tables as links_rivals_tables
from benchmarks.links import tables as links_tables
from benchmarks.nodes import predictions_tables as nodes_predictions_tables
from benchmarks.nodes import repelling_tables
from benchmarks.nodes import rivals_tables as nodes_rivals_tables
from benchmarks.nodes import tables as nodes_tables
from benchmarks.nodes import why as nodes_why
from benchmarks.on_top import tables as calibration_tables
from benchmarks.on_top import uses as calibration_uses
from benchmarks.random_fields import compared_tables as fields_compared_tables
from benchmarks.random_fields import tables as fields_tables
from benchmarks.scale import (
    batches_tables,
    epochs,
    gradient_variance,
    large_tables,
    samples_tables,
    speed_tables,
)
from benchmarks.shared.common import RESULTS, arguments, read

ROOT = Path(__file__).parent.parent
#: Files that hold tables between markers.
PAGES = "README.md", "docs/results.md", "docs/design.md", "docs/choosing.md"
DOCUMENTS = [ROOT / name for name in PAGES]


def insert(text: str, name: str, content: str) -> str:
    """``content`` between the markers of ``name``, if the text has them."""
    pattern = rf"(<!-- {name} -->\n).*?(<!-- end of {name} -->)"
    return re.sub(pattern, lambda m: m[1] + content + "\n" + m[2], text, flags=re.DOTALL)


def markers(text: str) -> list[str]:
    return re.findall(r"<!-- end of (.*?) -->", text)


def written(texts: dict[Path, str], tables: dict[str, str]) -> dict[Path, str]:
    """The documents with all tables; an error if markers and tables are not the same."""
    found = [name for text in texts.values() for name in markers(text)]
    for name in tables:
        if found.count(name) != 1:
            raise ValueError(
                f"{found.count(name)} of the documents have markers <!-- {name} --> and "
                f"<!-- end of {name} -->: exactly one must"
            )
    if unknown := set(found) - tables.keys():
        raise ValueError(f"no table is called {', '.join(sorted(unknown))}")
    for name, content in tables.items():
        texts = {path: insert(text, name, content) for path, text in texts.items()}
    return texts


def stored(folder: Path) -> dict[str, list[dict]]:
    """All rows, by the file that they are stored in."""
    whole = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}
    return whole | {path.stem: read(path) for path in folder.glob("*.jsonl")}


def all_tables(files: dict[str, list[dict]]) -> dict[str, str]:
    parts = (
        nodes_tables.tables(files["nodes"]),
        nodes_predictions_tables.tables(files["nodes"]),
        nodes_rivals_tables.tables(files),
        nodes_why.tables(files),
        epochs.tables(files["epochs"]),
        fields_tables.tables(files["fields"]),
        fields_compared_tables.tables(files),
        hidden_tables.tables(files["hidden"]),
        annotators_tables.tables(files["annotators"]),
        links_tables.tables(files["links"]),
        links_rivals_tables.tables(files["links"]),
        images_tables.tables(files["images"]),
        images_joint_tables.tables(files["images"]),
        images_claims.tables(files["images"]),
        gradient_variance.tables(files["gradient_variance"]),
        speed_tables.tables(files["speed"]),
        samples_tables.tables(files["samples"]),
        large_tables.tables(files["large"]),
        batches_tables.tables(files["batches"]),
        repelling_tables.tables(files["repelling"]),
        calibration_tables.tables(files["calibration"]),
        calibration_uses.tables(files["calibration"]),
        deviations_tables.tables(files),
        claims.tables(files),
        verdicts.tables(files),
    )
    tables: dict[str, str] = {}
    for part in parts:
        if same := tables.keys() & part.keys():
            raise ValueError(f"two tables are called {', '.join(sorted(same))}")
        tables |= part
    return tables


def main(args) -> dict[str, str]:
    files = stored(args.results)
    tables = all_tables(files)
    for name, content in tables.items():
        print(f"\n{name}\n{content}")
    for against in ("backbone", "backbone, temperature", "backbone + consistency, temperature"):
        print("", *nodes_tables.tests(files["nodes"], against), sep="\n")
    if args.documents is not None:
        texts = {path: path.read_text() for path in args.documents or DOCUMENTS}
        for path, text in written(texts, tables).items():
            path.write_text(text)
    if args.figures:
        matplotlib.use("Agg")
        args.figures.mkdir(parents=True, exist_ok=True)
        figures.figures(files, args.figures)
    return tables


def parser() -> ArgumentParser:
    parser = arguments(
        __doc__,
        results=(RESULTS, "folder with the results"),
        figures=(Path, "folder for pictures"),
    )
    text = "files with markers <!-- accuracy --> and so on, default README.md and those in docs"
    parser.add_argument("--documents", nargs="*", type=Path, help=text)
    return parser


if __name__ == "__main__":
    main(parser().parse_args())
