# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
Tables and figures from the results that are committed:

    python benchmarks/report.py                 # prints them
    python benchmarks/report.py --readme README.md --figures docs

With --readme, tables replace what stands between their markers in that file.
"""

from __future__ import annotations

import json
import re
from argparse import ArgumentParser
from pathlib import Path

import deviations_tables
import epochs
import fields_tables
import images_tables
import links_tables
import matplotlib
import matplotlib.pyplot as plt
import nodes_figures
import nodes_tables
import scale
from common import RESULTS, arguments, read

FILES = ("nodes", "links", "images", "fields", "deviations", "speed")


def insert(text: str, name: str, content: str) -> str:
    """``content`` between the markers of ``name``; an error if they are missing."""
    pattern = rf"(<!-- {name} -->\n).*?(<!-- end of {name} -->)"
    if not re.search(pattern, text, re.DOTALL):
        raise ValueError(f"the file has no markers <!-- {name} --> and <!-- end of {name} -->")
    return re.sub(pattern, lambda m: m[1] + content + "\n" + m[2], text, flags=re.DOTALL)


def main(args) -> dict[str, str]:
    rows = {name: read(args.results / f"{name}.jsonl") for name in FILES}
    tables = {
        **nodes_tables.tables(rows["nodes"]),
        **epochs.tables(json.loads((args.results / "epochs.json").read_text())),
        **fields_tables.tables(rows["fields"]),
        **links_tables.tables(rows["links"]),
        **images_tables.tables(rows["images"]),
        **scale.tables(rows["speed"]),
        **deviations_tables.tables(rows),
    }
    for name, content in tables.items():
        print(f"\n{name}\n{content}")
    for against in ("backbone", "backbone, temperature", "backbone + consistency, temperature"):
        print("", *nodes_tables.tests(rows["nodes"], against), sep="\n")
    if args.readme:
        text = args.readme.read_text()
        for name, content in tables.items():
            text = insert(text, name, content)
        args.readme.write_text(text)
    if args.figures:
        matplotlib.use("Agg")
        plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
        args.figures.mkdir(parents=True, exist_ok=True)
        nodes_figures.figures(rows["nodes"], args.figures)
        links_tables.bound_figure(rows["links"], args.figures)
        images_tables.curves_figure(rows["images"], args.figures)
    return tables


def parser() -> ArgumentParser:
    return arguments(
        __doc__,
        results=(RESULTS, "folder with the results"),
        readme=(Path, "file with markers <!-- accuracy --> and so on"),
        figures=(Path, "folder for pictures"),
    )


if __name__ == "__main__":
    main(parser().parse_args())
