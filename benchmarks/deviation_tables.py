# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Where this library deviates from the paper, and what each deviation changes, for report.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import denoise_tables
from comparison import Table, difference, names
from link_tables import GRAPHS
from mrf_tables import load

#: The change back to the paper's choice (or to another one): where, in the paper, and here.
NODES = {
    "link softplus + 1": ("concentrations", "softplus + 1", "exp, floor 0.1"),
    "link square + 1": ("concentrations", "square + 1", "exp, floor 0.1"),
    "link exp + 1": ("concentrations", "floor 1", "exp, floor 0.1"),
    "gamma 0": ("attention to oneself", "γ starts at 0", "γ starts at 2"),
    "200 epochs": ("training", "200 epochs", "400 epochs"),
    "weight decay .005": ("weight decay", ".005", "chosen from a pool by validation"),
    "paper's, softplus + 1": ("all of it", "softplus + 1, rate .01", "ours"),
    "paper's, square + 1": ("all of it", "square + 1, rate .01", "ours"),
    "paper's, softplus + 1, lr .05": ("all of it", "softplus + 1, rate .05", "ours"),
    "paper's, square + 1, lr .05": ("all of it", "square + 1, rate .05", "ours"),
    "estimator horizon": (
        "gradient",
        "REINFORCE; tried: `horizon`",
        "`later` up to 300 labels, unbiased too",
    ),
    "estimator em": (
        "gradient",
        "REINFORCE; tried: `em`",
        "`later` up to 300 labels, unbiased too",
    ),
    "sequential": ("prediction", "joint: one node after another", "marginals"),
}
LINKS = {"own attention": ("DGLFRM's attention", "a network of its own, as wide as memberships",
                           "first layer shared, 16 outputs")}  # fmt: skip
FIELDS = {"no groups": ("NMM-CNN's input", "potentials", "and the groups of the order")}
IMAGES = {
    "NMM-horizon": ("gradient", "REINFORCE; tried: `horizon`", "`em`: no score term"),
    "NMM-Gaussian": ("concentrations, attention", "Gaussian of one width, γ = 5",
                     "logistic of a width for each pixel, γ learned"),
    "NMM-one-width": ("widths", "one width", "a width for each pixel"),
}  # fmt: skip
Line = list[str]


def nodes(rows: list[dict]) -> Iterator[Line]:
    """Test accuracy in points and NLL, paired by seed with the row of no change."""
    rows = [row for row in rows if row["task"] == "deviations"]
    blocks = {(row["dataset"], row["backbone"]): None for row in rows}
    for dataset, kind in blocks:
        part = [r for r in rows if (r["dataset"], r["backbone"]) == (dataset, kind)]
        where = f"NMM-{kind.upper()}, {GRAPHS.get(dataset, dataset)}"
        by = {change: {r["seed"]: r for r in part if r["change"] == change}
              for change in (row["change"] for row in part)}  # fmt: skip
        base = by.get("none", {})
        ours = {seed: row for seed, row in base.items() if "sequential" in row}
        for change in names(NODES, ["sequential"] * bool(ours) + list(by)):
            if change == "none":
                continue
            if change == "sequential":
                hits = [(r["test"]["accuracy"], r["sequential"]) for r in ours.values()]
                effects = {"accuracy": (hits, 100, 1)}
            else:
                both = [(base[s]["test"], by[change][s]["test"]) for s in base if s in by[change]]
                effects = {"accuracy": ([(a["accuracy"], b["accuracy"]) for a, b in both], 100, 1),
                           "NLL": ([(a["nll"], b["nll"]) for a, b in both], 1, 3)}  # fmt: skip
            yield line(where, change, NODES, effects, "seeds")


def links(rows: list[dict], compared: list[dict]) -> Iterator[Line]:
    here = {(r["dataset"], r["seed"]): r for r in compared
            if r["task"] == "compare" and r["guide"] == "nmm"}  # fmt: skip
    part = [row for row in rows if row["task"] == "links"]
    for dataset, change in dict.fromkeys((r["dataset"], r["change"]) for r in part):
        both = [(here[dataset, r["seed"]], r) for r in part
                if (r["dataset"], r["change"]) == (dataset, change)
                and (dataset, r["seed"]) in here]  # fmt: skip
        effects = {m: ([(a["test"][m], b["test"][m]) for a, b in both], 1, 2)
                   for m in ("AP", "AUC")}  # fmt: skip
        effects["bound"] = [(-a["loss"], -b["loss"]) for a, b in both], 1, 4
        yield line(f"NMM-DGLFRM, {GRAPHS.get(dataset, dataset)}", change, LINKS, effects, "splits")


def fields(rows: list[dict]) -> Iterator[Line]:
    part = [row for row in rows if row["task"] == "fields"]
    by = {change: {(r["coupling"], r["seed"]): r for r in part if r["change"] == change}
          for change in (row["change"] for row in part)}  # fmt: skip
    base = by.pop("", {})
    for change, found in by.items():
        both = [(base[key]["bound"], found[key]["bound"]) for key in base if key in found]
        effects = {"KL's bound, nats": (both, 1, 2)}
        yield line("NMM-CNN on 12 x 40 pixels", change, FIELDS, effects, "fields")


def images(rows: list[dict]) -> Iterator[Line]:
    """Test images where there are, or else the mean over validation images."""
    done = set()
    for block, found in denoise_tables.tested(rows).items():
        for change in IMAGES:
            if change in found and "NMM" in found:
                parts = [denoise_tables.with_scaled(found[m]) for m in ("NMM", change)]
                effects = {"PSNR": (denoise_tables.paired(*parts, "PSNR"), 1, 2),
                           "log p": (denoise_tables.paired(*parts, "best"), 1, 3)}  # fmt: skip
                where = "NMM denoiser, " + ", ".join(denoise_tables.title(block))
                done.add((change, parts[0][next(iter(parts[0]))]["settings"]["num_steps"]))
                yield line(where, change, IMAGES, effects, "images")
    last: dict[tuple, dict] = {}
    for row in rows:
        if row["task"] == "train" and "log p" in row:
            last[row["method"], row["seed"], denoise_tables.size(row["settings"])] = row
    for change, seed, size in list(last):
        row, base = last[change, seed, size], last.get(("NMM", seed, size))
        if change in IMAGES and base and (change, row["settings"]["num_steps"]) not in done:
            effects = {"PSNR": ([(base["PSNR"], row["PSNR"])], 1, 2),
                       "log p": ([(base["log p"], row["log p"])], 1, 3),
                       "joint": ([(base["joint"], row["joint"])], 1, 3)}  # fmt: skip
            yield line(f"NMM denoiser, {size}, validation", change, IMAGES, effects, "seed")


def line(where: str, change: str, known: dict, effects: dict, unit: str) -> Line:
    """Of each measure: pairs (here, changed), the factor of its unit, and digits."""
    what, paper, here = known.get(change, (change, "", ""))
    cells, number = [], 0
    for name, (pairs, factor, digits) in effects.items():
        number = max(number, len(pairs))
        gap = difference([(factor * a, factor * b) for a, b in pairs], digits)
        cells.append(f"{name} {gap}" if gap else "")
    return [where, what, paper, here, f"{number} {unit}", "; ".join(filter(None, cells))]


def stored(folder: Path) -> dict[str, list[dict]]:
    files = "nodes", "link_prediction", "denoising", "deviations"
    return {name: load(folder / f"{name}.jsonl") for name in files}


def from_paper(rows: dict[str, list[dict]], table: Table) -> str:
    """Each deviation undone alone: what is measured with the paper's choice, minus ours."""
    lines = [*nodes(rows["nodes"]),
             *images(rows["denoising"]),
             *links(rows["deviations"], rows["link_prediction"]),
             *fields(rows["deviations"])]  # fmt: skip
    head = ["experiment", "what", "in the paper", "here", "measured on", "the paper's minus ours"]
    return table(head, lines, left=5)
