# Copyright the pyro-nmm contributors
# SPDX-License-Identifier: Apache-2.0

"""Tables and figures of docs/results/fields.md."""

from itertools import combinations
from math import nan

import pandas as pd
from pandas import DataFrame, Series

from benchmarks.shared import tables as shared
from benchmarks.shared.records import Files
from benchmarks.shared.tables import Cell, Paired, average, centre_of, ordered, table

SETS = {"bsds300": "BSD300", "kodak24": "Kodak24"}
PLACE = ["network", "images", "noise"]
METHODS = ["U-Net", "U-Net-log", "U-Net-widths", "NMM-one-width", "NMM", "NMM-one-step-credit",
           "NMM-Gaussian", "NMM-paper"]  # fmt: skip
#: Decibels in the paper's table of image denoising.
PAPER = {("BSD300", "25", "U-Net"): "30.28", ("Kodak24", "25", "U-Net"): "31.07"}
PAPER |= {("BSD300", "25", "NMM"): "30.33", ("Kodak24", "25", "NMM"): "31.55"}
SCORES = ("joint", "log p, scaled", "joint, scaled", "log p, logistic")
SEEDS = {"seeds": average("seed", "", of=lambda seeds: len(set(seeds)))}


def names(row: dict) -> dict:
    """The names under which tables show a row's network, images and noise."""
    own = {"run": "", "crop": ""} | row["settings"]
    network = "{width} filters, {depth} levels, {num_steps:,} steps, rate {lr:g}".format(**own)
    network += f", {own['run']} run" * bool(own["run"])
    images = SETS.get(row.get("dataset"), row.get("dataset", ""))
    images += f", middles of {own['crop']}" * bool(own["crop"])
    return {"network": network, "images": images, "noise": row.get("noise", 25.0)}


def stored(files: Files, task: str) -> DataFrame:
    """Rows of a task with their names, the longest trained first."""
    rows = [row | names(row) for row in files["images"] if row["task"] == task]
    known = shared.frame(sorted(rows, key=lambda row: -row["settings"]["num_steps"]))
    levels = {sd: f"{sd:g}" for sd in sorted(known["noise"])}
    orders = {"network": (), "images": (), "noise": levels, "method": ["trunk", *METHODS]}
    return known.assign(**{name: ordered(known[name], order) for name, order in orders.items()})


def tested(files: Files) -> DataFrame:
    """Test images, with likelihoods of the widths that validation images chose."""
    known = stored(files, "test")
    known = known.assign(**dict.fromkeys({*SCORES} - {*known}, nan))
    known["chosen"] = known["log p, scaled"].fillna(known["log p, logistic"])
    known["best"] = known["chosen"].fillna(known["log p"])
    known["gain"] = known["joint"] - known["log p"]
    known["gain, scaled"] = known["joint, scaled"] - known["log p, scaled"]
    keys = zip(known["images"], known["noise"], known["method"], strict=True)
    return known.assign(paper=[PAPER.get(key) for key in keys])


def by_image(form, field: str, *options) -> Cell:
    """Cell: a text of the means over seeds, image by image."""
    return lambda part, peers: form(part.groupby("image")[field].mean().dropna(), *options)


def change_of(gaps: Series, digits: int) -> str:
    """The mean difference over images, its standard deviation, median and p-value."""
    return Paired(gaps.tolist()).text(digits)


def denoised(files: Files) -> str:
    cells = SEEDS | {
        "PSNR, dB": by_image(centre_of, "PSNR", 2),
        "PSNR in the paper": shared.first("paper"),
        "log p": by_image(centre_of, "log p", 3),
        "log p, width by validation": by_image(centre_of, "chosen", 3),
        "log p of whole images, at least": by_image(centre_of, "joint", 3),
        "minus log p": by_image(change_of, "gain", 3),
        "minus log p, widths by validation": by_image(change_of, "gain, scaled", 3),
        "in 90 % intervals": by_image(lambda each: f"{100 * each.mean():.1f} %", "coverage"),
        "their length": average("length", ".1f"),
    }
    return table(tested(files), [*PLACE, "method"], cells)


def denoising_steps(files: Files) -> str:
    rows, fields, parts = tested(files), ["PSNR", "log p", "best"], []
    of = {name: part for (name,), part in shared.groups(rows, ["method"])}
    for base, method in combinations(of, 2):
        ours, theirs = (of[n].set_index([*PLACE, "image", "seed"])[fields] for n in (method, base))
        parts.append((ours - theirs).dropna().assign(method=method, minus=base))
    cells = SEEDS | {
        "PSNR, dB": by_image(change_of, "PSNR", 2),
        "log p": by_image(change_of, "log p", 3),
        "log p, width by validation": by_image(change_of, "best", 3),
        "images that gain": by_image(lambda gaps: f"{sum(gaps > 0)} of {len(gaps)}", "best"),
        "log p, seed by seed": lambda part, peers: ", ".join(
            f"{gap:+.3f}" for gap in part.groupby("seed")["best"].mean()
        ),
    }
    gaps = pd.concat(parts).reset_index()
    gaps["method"] = ordered(gaps["method"], METHODS)
    return table(gaps, [*PLACE, "method", "minus"], cells)


def denoising_validated(files: Files) -> str:
    def listed(field: str, form: str) -> Cell:
        return lambda part, peers: ", ".join(format(v, form) for v in shared.values(part, field))

    cells = {"steps": listed("step", ","), "PSNR, dB": listed("PSNR", ".2f")}
    cells |= {"log p": listed("log p", ".4f"), "log p of whole images": listed("joint", ".4f")}
    rows = stored(files, "train").sort_values("step", kind="stable")
    return table(rows, ["network", "method", "seed"], cells)


TABLES = denoised, denoising_steps, denoising_validated
