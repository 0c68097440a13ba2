# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""
Tables and figures from the results that are committed:

    python benchmarks/report.py                 # prints them
    python benchmarks/report.py --readme README.md --figures docs

With --readme, tables replace what stands between their markers in that file.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import denoise_tables
import deviation_tables
import link_tables
import matplotlib
import matplotlib.pyplot as plt
import mrf_tables
import nodes_figures
import nodes_tables
import scale
from common import read
from summaries import table

RESULTS = Path(__file__).parent / "results"


def insert(text: str, name: str, content: str) -> str:
    """``content`` between the markers of ``name``; an error if they are missing."""
    pattern = rf"(<!-- {name} -->\n).*?(<!-- end of {name} -->)"
    if not re.search(pattern, text, re.DOTALL):
        raise ValueError(f"the file has no markers <!-- {name} --> and <!-- end of {name} -->")
    return re.sub(pattern, lambda m: m[1] + content + "\n" + m[2], text, flags=re.DOTALL)


def main(args) -> dict[str, str]:
    folder = args.results.parent
    rows, epochs = read(args.results), folder / "epochs.json"
    tables = nodes_tables.tables(rows, json.loads(epochs.read_text()) if epochs.exists() else [])
    graphs = mrf_tables.load(folder / "link_prediction.jsonl")
    images = mrf_tables.load(folder / "denoising.jsonl")
    tables |= mrf_tables.tables(mrf_tables.load(folder / "mrf.jsonl"), table)
    tables |= link_tables.tables(graphs, table)
    tables |= denoise_tables.tables(images, table)
    tables["scale"] = scale.summary(mrf_tables.load(folder / "speed.jsonl"), table)
    tables["from paper"] = deviation_tables.from_paper(deviation_tables.stored(folder), table)
    for name, content in tables.items():
        print(f"\n{name}\n{content}")
    for against in ("backbone", "backbone, temperature", "backbone + agreement, temperature"):
        print("", *nodes_tables.tests(rows, against), sep="\n")
    if args.readme:
        text = args.readme.read_text()
        for name, content in tables.items():
            text = insert(text, name, content)
        args.readme.write_text(text)
    if args.figures:
        matplotlib.use("Agg")
        plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
        args.figures.mkdir(parents=True, exist_ok=True)
        nodes_figures.figures(rows, args.figures)
        link_tables.bound_figure(graphs, args.figures)
        denoise_tables.curves_figure(images, args.figures)
    return tables


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=RESULTS / "nodes.jsonl")
    parser.add_argument("--readme", type=Path, help="file with markers <!-- accuracy --> and so on")
    parser.add_argument("--figures", type=Path, help="folder for pictures")
    return parser


if __name__ == "__main__":
    main(parser().parse_args())
