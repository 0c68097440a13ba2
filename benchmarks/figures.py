# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Figures of the stored results, for report.py."""

from __future__ import annotations

from pathlib import Path
from statistics import mean, stdev

import matplotlib.pyplot as plt
import torch

from benchmarks.images import figures as images_figures
from benchmarks.images import tables as images_tables
from benchmarks.links import tables as links_tables
from benchmarks.nodes.runs import Rows, label, on_shared, parts, runs, shared
from benchmarks.random_fields import figures as fields_figures
from benchmarks.scale import samples_figures
from benchmarks.shared.common import pick
from benchmarks.shared.writing import sections

COLORS = ("#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7")
#: Of methods of denoising in their order; others are grey.
DENOISING = ("#D55E00", "#E69F00", "#CC79A7", "#56B4E9", "#0072B2")


def figures(files: dict[str, Rows], path: Path) -> None:
    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    training_size(files["nodes"], path)
    convergence(files["nodes"], path)
    link_bound(files["links"], path)
    denoising_steps(files["images"], path)
    fields_figures.field_seconds(files["fields_compared"], path / "field_seconds.png")
    images_figures.spectra(files["images"], path / "denoising_spectra.png")
    samples_figures.samples(files["samples"], path / "samples.png")
    samples_figures.growth(files["speed"], path / "growth.png")


def save(figure, path: Path) -> None:
    figure.savefig(path, dpi=150)
    plt.close(figure)


def panels(rows: Rows, width: float):
    """One axis a graph, with its rows."""
    graphs = parts(rows, "dataset")
    size = {"figsize": (width * len(graphs), 3.6), "layout": "constrained"}
    figure, axes = plt.subplots(1, len(graphs), squeeze=False, **size)
    for axis, (dataset,) in zip(axes[0], graphs, strict=True):
        axis.set_title(dataset)
    return figure, list(zip(axes[0], graphs.values(), strict=True))


def colors(rows: Rows) -> dict[str, str]:
    """Of what is trained; the same for all that is fitted on top of it."""
    first = dict.fromkeys(method.split(", ")[0] for (method,) in parts(rows, "method"))
    return {name: COLORS[number % len(COLORS)] for number, name in enumerate(first)}


def training_size(rows: Rows, path: Path) -> None:
    """
    Accuracy over training sizes, a panel a graph and backbone, where a method has the splits that
    the others share; a temperature changes none, so its rows coincide. Dots are what is fitted on
    top of a model.
    """
    cells = parts(runs(rows, "sizes"), "dataset", "backbone").values()
    known = [row for part in cells if shared(part) for row in part]
    if not known:
        return
    color, graphs, kinds = colors(known), parts(known, "dataset"), parts(known, "backbone")
    size = {"figsize": (max(4 * len(kinds), 6), 3.2 * len(graphs) + 0.6), "layout": "constrained"}
    figure, axes = plt.subplots(len(graphs), len(kinds), squeeze=False, sharey="row", **size)
    for row, every in zip(axes, graphs.values(), strict=True):
        for axis, (kind,) in zip(row, kinds, strict=True):
            part = pick(every, backbone=kind)
            axis.set_visible(bool(part))
            over_sizes(axis, part, kind, color)
        row[0].set_ylabel("test accuracy, %")
    handles, names = axes[0, 0].get_legend_handles_labels()
    looks = {"frameon": False, "fontsize": 9, "ncols": 4 if len(kinds) > 2 else 2}
    figure.legend(handles, names, loc="outside lower center", **looks)
    save(figure, path / "training_size.png")


def over_sizes(axis, rows: Rows, kind: str, color: dict[str, str]) -> None:
    """A line a method, ± one standard error."""
    if rows:
        splits = len(shared(rows))
        axis.set_title(
            f"{rows[0]['dataset']}, {kind}: {splits} splits, ± 1 standard error", fontsize=9
        )
    axis.set(xlabel="share of training nodes", xticks=[ratio for (ratio,) in parts(rows, "ratio")])
    for (method,) in parts(rows, "method"):
        points = {}
        for (ratio,), among in parts(rows, "ratio").items():
            values, fewer = on_shared(among, "accuracy", method)
            if len(values) > 1 and not fewer:
                points[ratio] = [100 * value for value in values.values()]
        if "temperature" in method or not points:
            continue
        name, _, more = method.partition(", ")
        means = [mean(values) for values in points.values()]
        errors = [stdev(values) / len(values) ** 0.5 for values in points.values()]
        looks = {"marker": "s" if more else "o", "ms": 3, "capsize": 2, "lw": 1}
        looks |= {"color": color[name], "ls": ":" if more else "-"}
        axis.errorbar(list(points), means, errors, label=label(method, "backbone"), **looks)


def convergence(rows: Rows, path: Path) -> None:
    """Validation accuracy over the epochs of the first seed, with a GCN."""
    known = [row for row in pick(runs(rows, "accuracy"), backbone="GCN") if "curve" in row]
    if not known:
        return
    color, (figure, places) = colors(known), panels(known, 4)
    for axis, part in places:
        for row in part:
            curve = [100 * value for value in row["curve"]]
            looks = {"label": label(row["method"], "GCN"), "color": color[row["method"]]}
            axis.plot(range(1, len(curve) + 1), curve, lw=1, **looks)
        axis.set(xlabel="epoch", ylabel="validation accuracy, %", ylim=(50, None))
    places[0][0].legend(frameon=False, fontsize=8, loc="lower right")
    save(figure, path / "convergence.png")


def link_bound(rows: Rows, path: Path, graph: str = "NIPS12") -> None:
    """The bound over the steps: every split, and their mean."""
    part = links_tables.compared(rows).get(graph, [])
    seeds = [{row["seed"] for row in pick(part, guide=guide)} for guide in links_tables.GUIDES]
    both = [row for row in part if row["seed"] in set.intersection(*seeds) and "curve" in row]
    if not both:
        return
    figure, axis = plt.subplots(figsize=(5, 3.6), layout="constrained")
    for guide, color in (("original", "#D55E00"), ("nmm", "#0072B2")):
        values = -torch.tensor([row["curve"] for row in pick(both, guide=guide)])
        steps = 10 * torch.arange(1, values.shape[1] + 1)
        axis.plot(steps, values.T, color=color, lw=0.4, alpha=0.4)
        axis.plot(steps, values.mean(0), color=color, lw=1.8, label=links_tables.GUIDES[guide])
    every = -torch.tensor([row["curve"] for row in both])
    axis.set(xlabel="step", ylabel="evidence lower bound, nats a pair of nodes")
    axis.set(title=f"{graph}, {len(values)} splits and their mean")
    axis.set_ylim(every[:, every.shape[1] // 8].min().item(), every.max().item() + 0.005)
    axis.legend(frameon=False, loc="lower right")
    save(figure, path / "link_bound.png")


def denoising_steps(rows: Rows, path: Path) -> None:
    """PSNR on validation images of the largest networks, from the trunk on which they stand."""
    figure, axis = plt.subplots(figsize=(5.4, 3.6), layout="constrained")
    known = dict(zip(images_tables.METHODS, DENOISING, strict=False))
    for (method, seed), points in validated(rows).items():
        looks = {"color": known.get(method, "#999999"), "marker": "o", "ms": 3, "lw": 1.2}
        name = images_tables.METHODS.get(method, method)
        axis.plot(*zip(*points, strict=True), label=name if seed == 0 else None, **looks)
    axis.set(xlabel="step", ylabel="PSNR on validation images, dB")
    if axis.lines:
        axis.legend(frameon=False, loc="lower right")
        save(figure, path / "denoising_steps.png")


def validated(rows: Rows) -> dict[tuple[str, int], list[tuple[int, float]]]:
    """Steps and values by method and seed: the control goes on where the trunk ends."""
    trained = pick(rows, task="train")
    largest = max((row["settings"]["num_steps"] for row in trained), default=0)
    watched = [row for row in trained if row["settings"]["num_steps"] == largest]
    points, lines = {}, {}
    for line, part in sections(watched, method=list(images_tables.METHODS), seed=None).items():
        points[line] = sorted((row["step"], row["PSNR"]) for row in part)
    for method, seed in points:
        trunk = points.get(("trunk", seed), [])
        below = {"U-Net": [], "U-Net-log": trunk}.get(method, trunk[-1:])
        if method != "trunk":
            lines[method, seed] = below + points[method, seed]
    return lines
