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
import re
from pathlib import Path

import denoise_tables
import deviation_tables
import link_tables
import matplotlib
import matplotlib.pyplot as plt
import mrf_tables
import node_claims
import node_figures
import node_tables
import scale
from runs import Runs, table

RESULTS = Path(__file__).parent / "results"


def insert(text: str, name: str, content: str) -> str:
    """``content`` between the markers of ``name``; an error if they are missing."""
    pattern = rf"(<!-- {name} -->\n).*?(<!-- end of {name} -->)"
    if not re.search(pattern, text, re.DOTALL):
        raise ValueError(f"the file has no markers <!-- {name} --> and <!-- end of {name} -->")
    return re.sub(pattern, lambda m: m[1] + content + "\n" + m[2], text, flags=re.DOTALL)


def nodes(path: Path) -> dict[str, str]:
    """What follows from the results of node classification."""
    tasks = ("accuracy", "pairs", "sizes", "deviations")
    runs = {task: Runs.read(path, task) for task in tasks}
    return {
        "reproduced nodes": node_claims.first_screen(
            runs["accuracy"], runs["pairs"], runs["deviations"]
        ),
        "against backbone": node_tables.against_backbone(runs["accuracy"]),
        "accuracy": node_tables.accuracy(runs["accuracy"]),
        "searches": node_tables.searches(path),
        "quality": node_tables.quality(runs["accuracy"]),
        "deviations": node_tables.deviations(runs["deviations"]),
        "pairs": node_tables.pairs(runs["pairs"]),
        "hubs": node_claims.hubs(runs["pairs"]),
        "gains": node_tables.gains(runs["pairs"]),
        "on top": node_tables.on_top(runs["pairs"]),
        "sizes": node_tables.sizes(runs["sizes"]),
        "few labels": node_claims.few_labels(runs["sizes"]),
        "epochs": node_tables.epochs(path.parent / "epochs.json"),
    }


def main(args) -> dict[str, str]:
    tables = nodes(args.results)
    folder = args.results.parent
    graphs = mrf_tables.load(folder / "link_prediction.jsonl")
    images = mrf_tables.load(folder / "denoising.jsonl")
    tables |= mrf_tables.tables(mrf_tables.load(folder / "mrf.jsonl"), table)
    tables |= link_tables.tables(graphs, table)
    tables |= denoise_tables.tables(images, table)
    tables["scale"] = scale.summary(mrf_tables.load(folder / "speed.jsonl"), table)
    tables["from paper"] = deviation_tables.from_paper(deviation_tables.stored(folder), table)
    for name, content in tables.items():
        print(f"\n{name}\n{content}")
    runs = {task: Runs.read(args.results, task) for task in ("accuracy", "pairs", "sizes")}
    for against in ("backbone", "backbone, temperature", "backbone + agreement, temperature"):
        print("", *node_tables.tests(runs["pairs"], against), sep="\n")
    if args.readme:
        text = args.readme.read_text()
        for name, content in tables.items():
            text = insert(text, name, content)
        args.readme.write_text(text)
    if args.figures:
        matplotlib.use("Agg")
        plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
        args.figures.mkdir(parents=True, exist_ok=True)
        node_figures.sizes_figure(runs["sizes"], args.figures)
        node_figures.convergence_figure(runs["accuracy"], args.figures)
        link_tables.bound_figure(graphs, args.figures)
        denoise_tables.curves_figure(images, args.figures)
    return tables


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=RESULTS / "node_classification.jsonl")
    parser.add_argument("--readme", type=Path, help="file with markers <!-- accuracy --> and so on")
    parser.add_argument("--figures", type=Path, help="folder for pictures")
    return parser


if __name__ == "__main__":
    main(parser().parse_args())
