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
import statistics
from pathlib import Path

import denoise_tables
import deviation_tables
import link_tables
import matplotlib
import matplotlib.pyplot as plt
import mrf_tables
from scipy.stats import ttest_rel

RESULTS = Path(__file__).parent / "results"
NAMES = {"gcn": "GCN", "gat": "GAT", "appnp": "APPNP", "mlp": "MLP"}
GRAPHS = {"cora": "Cora", "citeseer": "CiteSeer", "pubmed": "PubMed"}
COLORS = {"gcn": "#0072B2", "gat": "#D55E00", "appnp": "#009E73", "mlp": "#CC79A7"}


class Runs:
    """Rows of one task, looked up by what they were run on, paired by seed."""

    def __init__(self, path: Path, task: str) -> None:
        lines = path.read_text().splitlines() if path.exists() else []
        rows = [json.loads(line) for line in lines]
        self.rows = [row for row in rows if row["task"] == task]

    def get(self, field: str, method: str, among: tuple[str, ...] = (), **key) -> dict[int, float]:
        """
        Values by seed, of the seeds that the methods ``among`` have been run with; without
        them, of those that the most methods of the block share, so that all rows of a table are
        paired. ``field`` may be ``"test.nll"``.
        """
        block = [r for r in self.rows if all(r.get(k) == v for k, v in key.items())]
        seen: dict[int, set] = {}
        for row in block:
            seen.setdefault(row["seed"], set()).add(row["method"])
        wanted = set(among)
        if not wanted:
            shared = [(m, sum(m <= other for other in seen.values())) for m in seen.values()]
            wanted = max(shared, key=lambda s: (s[1] >= 3, len(s[0])), default=(set(), 0))[0]
        found = {}
        for row in block:
            if row["method"] == method and wanted <= seen[row["seed"]]:
                value = row
                for name in field.split("."):
                    value = value.get(name) if value is not None else None
                if value is not None and method in wanted:
                    found[row["seed"]] = value
        return found


def paired(a: dict[int, float], b: dict[int, float]) -> tuple[float, float]:
    """Mean difference a - b over common seeds, and the p-value of a paired t-test."""
    seeds = sorted(a.keys() & b.keys())
    first, second = [a[s] for s in seeds], [b[s] for s in seeds]
    if len(seeds) < 3:
        return float("nan"), 1.0
    return statistics.mean(first) - statistics.mean(second), ttest_rel(first, second).pvalue


def mean(values: dict[int, float]) -> float:
    return statistics.mean(values.values())


def table(head: list[str], rows: list[list[str]], left: int = 1) -> str:
    rows = [row for row in rows if any(row[left:])]  # without what has not been run
    align = ["---"] * left + ["---:"] * (len(head) - left)
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, align, *rows])


def accuracy(runs: Runs) -> str:
    """Accuracy in percent, mean ± sd; † and ‡ mark differences from the backbone alone."""
    rows = []
    methods = {"backbone": "{}", "NMM": "NMM-{}", "backbone + agreement": "{} + agreement",
               "backbone + agreement, stacked": "StackedNMM on {} + agreement",
               "NMM + agreement": "NMM-{} + agreement",
               "NMM + agreement, stacked": "StackedNMM on NMM-{} + agreement"}  # fmt: skip
    for kind, name in NAMES.items():
        for method, label in methods.items():
            row = [label.format(name)]
            for dataset in GRAPHS:
                key = {"dataset": dataset, "backbone": kind}
                values = runs.get("test.accuracy", **key, method=method)
                base = runs.get("test.accuracy", **key, method="backbone")
                if len(values) < 2:
                    row.append("")
                    continue
                difference, p = paired(values, base)
                mark = "" if not p < 0.05 else " †" if difference > 0 else " ‡"
                sd = statistics.stdev(values.values())
                row.append(f"{100 * mean(values):.1f} ± {100 * sd:.1f}{mark}")
            rows.append(row)
    return table(["accuracy", *GRAPHS.values()], rows)


def quality(runs: Runs) -> str:
    """Accuracy, NLL, ECE and the joint likelihood of the test set on the public split."""
    methods = {"backbone": "{}", "backbone, temperature": "{} + temperature",
               "backbone, stacked": "StackedNMM on {}",
               "backbone + agreement, temperature": "{} + agreement + temperature",
               "backbone + agreement, stacked": "StackedNMM on {} + agreement",
               "NMM + agreement, stacked": "StackedNMM on NMM-{} + agreement"}  # fmt: skip
    rows = []
    for kind, name in NAMES.items():
        for method, label in methods.items():
            row = [label.format(name)]
            for dataset in GRAPHS:
                key = {"dataset": dataset, "backbone": kind, "method": method}
                fields = ("test.nll", "test.ece", "joint")
                values = [runs.get(f, **key) for f in fields]
                hit = runs.get("test.accuracy", **key)
                cells = [f"{mean(v):.3f}" for v in values if v]
                row.append(" / ".join([f"{100 * mean(hit):.1f}", *cells]) if hit else "")
            rows.append(row)
    return table(["accuracy / NLL / ECE / log p(test \\| train)", *GRAPHS.values()], rows)


def pairs(runs: Runs) -> str:
    """PLL given the training labels; in brackets the product of own marginals and the prior."""
    methods = {"backbone": "{}", "backbone, temperature": "{} + temperature",
               "backbone, stacked": "StackedNMM on {}",
               "backbone + agreement, temperature": "{} + agreement + temperature",
               "backbone + agreement, stacked": "StackedNMM on {} + agreement",
               "NMM + agreement, stacked": "StackedNMM on NMM-{} + agreement"}  # fmt: skip
    datasets, ratios = ("cora", "citeseer"), (0.2, 0.4, 0.6)
    rows = []
    for kind, name in NAMES.items():
        for method, label in methods.items():
            row = [label.format(name)]
            for dataset in datasets:
                for ratio in ratios:
                    key = {"dataset": dataset, "backbone": kind, "ratio": ratio}
                    product = runs.get("own product", **key, method=method)
                    value = runs.get("conditional", **key, method=method) or product
                    if len(product) < 3:
                        row.append("")
                        continue
                    cell = f"{mean(value):.3f}"
                    if "stacked" in method:
                        prior = runs.get("prior", **key, method=method)
                        cell += f" ({mean(product):.3f}, {mean(prior):.3f})"
                    row.append(cell)
            rows.append(row)
    return table(["PLL", *(f"{GRAPHS[d]} {r}" for d in datasets for r in ratios)], rows)


def on_top(runs: Runs) -> str:
    """PLL of StackedNMM minus that of temperature scaling, on the same trained classifier."""
    ratios, rows = (0.2, 0.4, 0.6), []
    for dataset, graph in GRAPHS.items():
        for kind, name in NAMES.items():
            row, seconds = [], []
            for ratio in ratios:
                key = {"dataset": dataset, "backbone": kind, "ratio": ratio}
                key["among"] = "backbone, temperature", "backbone, stacked"
                ours = runs.get("conditional", **key, method="backbone, stacked")
                own = runs.get("own product", **key, method="backbone, stacked")
                base = runs.get("own product", **key, method="backbone, temperature")
                seconds += runs.get("fit seconds", **key, method="backbone, stacked").values()
                difference, p = paired(ours, base)
                share, _ = paired(ours, own)
                star = " *" if p < 0.05 else ""
                row.append(f"{difference:+.3f}{star} ({share:+.3f})" if len(ours) > 2 else "")
            time = f"{statistics.median(seconds):.1f}" if seconds else ""
            rows.append([graph, name, *row, time])
    head = ["PLL gained on temperature scaling", "classifier", *map(str, ratios), "seconds a fit"]
    return table(head, rows, left=2)


def tests(runs: Runs, against: str) -> list[str]:
    """Paired differences of the stacked rows from a row without correlation."""
    lines = []
    for dataset in GRAPHS:
        for kind in NAMES:
            for method in ("backbone, stacked", "NMM + agreement, stacked"):
                for ratio in (0.2, 0.4, 0.6):
                    key = {"dataset": dataset, "backbone": kind, "ratio": ratio}
                    key["among"] = method, against
                    ours = runs.get("conditional", **key, method=method)
                    base = runs.get("own product", **key, method=against)
                    difference, p = paired(ours, base)
                    number = len(ours.keys() & base.keys())
                    if number:
                        lines.append(f"{dataset:9} {kind:6} {ratio} {method:26} - {against}: "
                                     f"{difference:+.4f}  p {p:.4f}  n {number}")  # fmt: skip
    return lines


def epochs(path: Path) -> str:
    if not path.exists():
        return ""
    rows = []
    for row in json.loads(path.read_text()):
        times = [f"{row['ms'][n]:.1f}" for n in ("backbone", "networks", "NMM")]
        ratios = [f"{ratio:.2f}" for ratio in row["ratios"]]
        rows.append([GRAPHS[row["dataset"]], NAMES[row["backbone"]], *times, *ratios])
    head = ["graph", "backbone", "backbone, ms", "networks, ms", "NMM, ms", "NMM / networks",
            "with agreement", "in Pyro"]  # fmt: skip
    return table(head, rows, left=2)


def sizes_figure(runs: Runs, path: Path) -> None:
    datasets = [d for d in GRAPHS if any(r["dataset"] == d for r in runs.rows)]
    if not datasets:
        return
    figure, axes = plt.subplots(1, len(datasets), figsize=(4.5 * len(datasets), 3.6),
                                layout="constrained", squeeze=False)  # fmt: skip
    for axis, dataset in zip(axes[0], datasets, strict=True):
        for kind, name in list(NAMES.items())[:3]:
            for method, style in (("backbone", "--"), ("NMM + agreement", "-")):
                key = {"dataset": dataset, "backbone": kind, "method": method}
                points = {r: runs.get("test.accuracy", ratio=r, **key)
                          for r in (0.1, 0.2, 0.3, 0.4, 0.5)}  # fmt: skip
                points = {r: v for r, v in points.items() if len(v) > 1}
                if not points:
                    continue
                errors = [
                    100 * statistics.stdev(v.values()) / len(v) ** 0.5 for v in points.values()
                ]
                axis.errorbar(list(points), [100 * mean(v) for v in points.values()], errors,
                              ls=style, marker="o", ms=4, capsize=2, color=COLORS[kind],
                              label=name if method == "backbone" else f"NMM-{name} + agreement",
                              )  # fmt: skip
        axis.set(xlabel="share of training nodes", ylabel="test accuracy, %",
                 title=f"{GRAPHS[dataset]}, ± one standard error")  # fmt: skip
        axis.set_xticks([0.1, 0.2, 0.3, 0.4, 0.5])
    axes[0][0].legend(frameon=False, fontsize=8)
    figure.savefig(path / "training_size.png", dpi=150)
    plt.close(figure)


def convergence_figure(runs: Runs, path: Path) -> None:
    rows = [r for r in runs.rows if "curve" in r and r["backbone"] == "gcn"]
    datasets = [d for d in GRAPHS if any(r["dataset"] == d for r in rows)]
    if not datasets:
        return
    figure, axes = plt.subplots(1, len(datasets), figsize=(4 * len(datasets), 3.4),
                                layout="constrained", squeeze=False)  # fmt: skip
    shown = {"backbone": ("GCN", "#E69F00"), "NMM": ("NMM-GCN", "#56B4E9"),
             "NMM + agreement": ("NMM-GCN + agreement", "#0072B2")}  # fmt: skip
    for axis, dataset in zip(axes[0], datasets, strict=True):
        for row in rows:
            if row["dataset"] == dataset and row["method"] in shown:
                name, color = shown[row["method"]]
                curve = [100 * value for value in row["curve"]]
                axis.plot(range(1, len(curve) + 1), curve, color=color, label=name, lw=1)
        axis.set(xlabel="epoch", ylabel="validation accuracy, %", title=GRAPHS[dataset],
                 ylim=(50, None))  # fmt: skip
    axes[0][0].legend(frameon=False, fontsize=8, loc="lower right")
    figure.savefig(path / "convergence.png", dpi=150)
    plt.close(figure)


def insert(text: str, name: str, content: str) -> str:
    """``content`` between the markers of ``name``; an error if they are missing."""
    pattern = rf"(<!-- {name} -->\n).*?(<!-- end of {name} -->)"
    if not re.search(pattern, text, re.DOTALL):
        raise ValueError(f"the file has no markers <!-- {name} --> and <!-- end of {name} -->")
    return re.sub(pattern, lambda m: m[1] + content + "\n" + m[2], text, flags=re.DOTALL)


def main(args) -> dict[str, str]:
    runs = {task: Runs(args.results, task) for task in ("accuracy", "pairs", "sizes")}
    tables = {
        "accuracy": accuracy(runs["accuracy"]),
        "quality": quality(runs["accuracy"]),
        "pairs": pairs(runs["pairs"]),
        "on top": on_top(runs["pairs"]),
        "epochs": epochs(args.results.parent / "epochs.json"),
    }
    folder = args.results.parent
    graphs = mrf_tables.load(folder / "link_prediction.jsonl")
    images = mrf_tables.load(folder / "denoising.jsonl")
    tables |= mrf_tables.tables(mrf_tables.load(folder / "mrf.jsonl"), table)
    tables |= link_tables.tables(graphs, table)
    tables |= denoise_tables.tables(images, table)
    tables["from paper"] = deviation_tables.from_paper(deviation_tables.stored(folder), table)
    for name, content in tables.items():
        print(f"\n{name}\n{content}")
    for against in ("backbone", "backbone, temperature", "backbone + agreement, temperature"):
        print("", *tests(runs["pairs"], against), sep="\n")
    if args.readme:
        text = args.readme.read_text()
        for name, content in tables.items():
            text = insert(text, name, content)
        args.readme.write_text(text)
    if args.figures:
        matplotlib.use("Agg")
        plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
        args.figures.mkdir(parents=True, exist_ok=True)
        sizes_figure(runs["sizes"], args.figures)
        convergence_figure(runs["accuracy"], args.figures)
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
